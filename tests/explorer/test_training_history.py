"""Snapshots of a training run, as runs record them."""

from pathlib import Path

import pytest
import torch

from attnconv.explorer import snapshots_of
from attnconv.training.run_folder import HeadsLine, RunFolder, append_line
from attnconv.training.run_recorder import WIDEST


def recorded(folder: Path, epochs: int) -> RunFolder:
    """Write a run with two heads, of which one has equal scores along the columns."""
    run = RunFolder(folder)
    for epoch in range(epochs + 1):
        covariance = [[[2.0, 0.5], [0.5, 1.0]], [[4.0, 0.0], [0.0, WIDEST]]]
        line: HeadsLine = {
            "epoch": epoch,
            "layers": [{"name": "layer", "centres": [[float(epoch), 0.0], [0.0, 1.0]], "covariance": covariance}],
        }
        append_line(run.heads_file, line)
    return run


def test_the_first_and_the_last_and_ever_longer_steps(tmp_path: Path) -> None:
    snapshots = snapshots_of(recorded(tmp_path, 300), 6)
    assert [snapshot.name for snapshot in snapshots] == [f"epoch {n}" for n in (0, 2, 9, 30, 95, 300)]
    assert snapshots[-1].layers["layer"][0].tolist() == [[300.0, 0.0], [0.0, 1.0]]
    assert snapshots_of(RunFolder(tmp_path), 6, until=7)[-1].name == "epoch 7"


def test_precisions_are_the_inverse_covariances(tmp_path: Path) -> None:
    (snapshot,) = snapshots_of(recorded(tmp_path, 0))
    inverses = [[[1 / 1.75, -0.5 / 1.75], [-0.5 / 1.75, 2 / 1.75]], [[0.25, 0.0], [0.0, 1 / WIDEST]]]
    wanted = torch.tensor(inverses, dtype=torch.float64)
    torch.testing.assert_close(snapshot.layers["layer"][1], wanted, rtol=1e-12, atol=0)


def test_a_run_without_centres_has_no_snapshots(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert snapshots_of(run) == ()
    append_line(run.heads_file, {"epoch": 0, "layers": []})
    assert snapshots_of(run) == ()


def test_no_snapshots_are_not_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"count: .*got 0"):
        snapshots_of(RunFolder(tmp_path), 0)
