"""`attnconv prune`, and training that continues from its result."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attnconv.cli import main
from attnconv.models.checkpoint import read_checkpoint, save_weights
from attnconv.models.classifiers import build
from attnconv.models.model_loader import load
from attnconv.models.settings import AttentionSettings
from attnconv.training.run_folder import RunFolder
from tests.cli.test_commands import call

SIZES = ["--layers=2", "--width=16", "--mlp-width=16", "--heads=4"]
TINY = ["--epochs=1", "--data-limit=100"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run with degenerate heads 1 and 2 in layer 0; head 2 is degenerate only by the criterion `code`."""
    folder = tmp_path_factory.mktemp("prune") / "run"
    with pytest.raises(SystemExit) as end:
        main(["train", "quadratic-digits", "--encoding=quadratic-generalized", *SIZES, *TINY, "--out", str(folder)])
    assert end.value.code == 0
    found = load(folder)
    assert found.settings is not None
    with torch.no_grad():
        roots = found.model.get_parameter("blocks.0.attention.encoding.root_precision")
        roots[1] = 0.0
        roots[2] = torch.tensor([[1.0, 0.0], [0.0, 0.01]])
    about = {"classes": found.classes, "mean": found.mean, "std": found.std}
    save_weights(RunFolder(folder).best_weights, found.model, found.settings, **about)  # type: ignore[arg-type]
    return folder


@pytest.fixture
def pruned(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert call(capsys, "prune", str(run), "--criterion", "code", "--out", str(tmp_path / "pruned"))[0] == 0
    return tmp_path / "pruned"


def heads(path: Path) -> int | tuple[int, ...]:
    settings = load(path).settings
    assert isinstance(settings, AttentionSettings)
    return settings.heads


def test_it_says_what_goes_and_what_that_saves(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    before = sorted(path.name for path in run.rglob("*"))
    status, out, err = call(capsys, "prune", str(run))
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.startswith("blocks.")]
    assert [row[1:5] for row in rows] == [["1", "3", "of", "4"], ["-", "4", "of", "4"]]
    assert rows[1][5] == rows[1][6]
    # One head less: 16 x 16 weights, 6 numbers of its Gaussian; 64 positions; attention of 64 x 64 x 16 multiply-adds.
    counts = dict(line.split(": ") for line in out.splitlines() if " -> " in line)
    drops = {name: difference(text) for name, text in counts.items()}
    saved = 2 * 64 * 16 * 16
    assert drops == {
        "parameters": 16 * 16 + 6,
        "FLOPs, linear layers": saved,
        "FLOPs, with dense attention": saved + 2 * 64 * 64 * 16,
    }
    assert "No layer lost the ability to express every 3 x 3 kernel." in out
    assert sorted(path.name for path in run.rglob("*")) == before


def difference(text: str) -> int:
    before, after = (int(number.replace(",", "")) for number in text.split(" -> "))
    return before - after


def test_a_layer_that_loses_its_kernels_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nine hard heads at the shifts of a 3 x 3 kernel and a constant head; in layer 1, one of the nine is a stripe."""
    found = load("quadratic-digits")
    settings = AttentionSettings(
        encoding="quadratic-generalized", layers=2, heads=10, width=8, mlp_width=8, downsampling=4
    )
    model = build(settings)
    shifts = torch.cartesian_prod(torch.arange(-1.0, 2.0), torch.arange(-1.0, 2.0))
    with torch.no_grad():
        for index in range(2):
            encoding = model.get_submodule(f"blocks.{index}.attention.encoding")
            encoding.get_parameter("centres")[:9] = shifts
            encoding.get_parameter("root_precision").copy_(10 * torch.eye(2).expand(10, 2, 2))
            encoding.get_parameter("root_precision")[9] = 0
        encoding.get_parameter("root_precision")[4] = torch.tensor([[10.0, 0.0], [0.0, 10.0 / 40]])
        # Both spreads are so large that it attends to a single position, but the condition number is 1600.
        encoding.get_parameter("root_precision")[4] *= 40
    save_weights(tmp_path / "hard.safetensors", model, settings, mean=found.mean, std=found.std)
    _, out, _ = call(capsys, "prune", str(tmp_path / "hard.safetensors"))
    assert "No layer lost the ability to express every 3 x 3 kernel." in out
    _, out, _ = call(capsys, "prune", str(tmp_path / "hard.safetensors"), "--criterion=code")
    assert "Can no longer express every 3 x 3 kernel: blocks.1.attention." in out


def test_a_layer_of_degenerate_heads_alone_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = load(run)
    assert found.settings is not None
    with torch.no_grad():
        found.model.get_parameter("blocks.1.attention.encoding.root_precision").zero_()
    save_weights(tmp_path / "flat.safetensors", found.model, found.settings, mean=found.mean, std=found.std)
    status, out, err = call(capsys, "prune", str(tmp_path / "flat.safetensors"))
    assert (status, out) == (1, "")
    assert re.search("--criterion: .*got paper, .* all heads of", err)
    assert "blocks.1.attention are degenerate" in err


def test_it_leaves_a_run_that_begins_with_the_pruned_weights(
    run: Path, pruned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert heads(run) == 4
    assert heads(pruned) == (2, 4)
    original, kept = load_file(RunFolder(run).best_weights), load_file(RunFolder(pruned).start_weights)
    name = "blocks.0.attention.weight"
    torch.testing.assert_close(kept[name], original[name][[0, 3]], rtol=0, atol=0)
    assert read_checkpoint(RunFolder(pruned).start_weights).extra["pruned"]["blocks.0.attention"] == [1, 2]
    settings, before = RunFolder(pruned).settings(), RunFolder(run).settings()
    assert (settings.data, settings.train, settings.preset) == (before.data, before.train, before.preset)
    status, out, _ = call(capsys, "evaluate", str(pruned))
    assert status == 0
    assert "start.safetensors on the test images of digits:\naccuracy" in out


def test_training_goes_on_from_it(pruned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "quadratic-digits", "--start-from", str(pruned), *TINY, "--optim-learning-rate=1e-12"]
    assert call(capsys, *words, "--out", str(tmp_path / "after"))[0] == 0
    after = RunFolder(tmp_path / "after")
    assert heads(after.path) == (2, 4)
    start, last = load_file(RunFolder(pruned).start_weights), load_file(after.last_weights)
    for name in start:  # the learning rate is almost 0, so these are the initial weights
        torch.testing.assert_close(last[name], start[name], rtol=1e-6, atol=1e-6)
    status, _, err = call(capsys, *words, "--heads=4", "--out", str(tmp_path / "other"))
    assert status == 1
    assert "--start-from: must " in err
    assert not (tmp_path / "other").exists()


def test_the_pruned_folder_itself_can_be_resumed(pruned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "train", "quadratic-digits", "--resume", "--out", str(pruned))[0] == 0
    result = RunFolder(pruned).result()
    assert result is not None
    assert result["parameters"] == sum(tensor.numel() for tensor in load_file(RunFolder(pruned).start_weights).values())


def test_what_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(capsys, "prune", str(run), "--out", str(run))
    assert (status, "--out: must be a new or empty folder" in err) == (1, True)
    status, _, err = call(capsys, "prune", "resnet-digits")
    assert (status, "MODEL: must be an attention model" in err) == (1, True)
    status, _, err = call(capsys, "prune", "learned-small")
    assert (status, "attention: must have Gaussian heads" in err) == (1, True)
    words = ["train", "quadratic-digits", "--start-from", str(tmp_path / "none.safetensors")]
    status, _, err = call(capsys, *words, "--out", str(tmp_path / "x"))
    assert (status, "none.safetensors" in err) == (1, True)
    assert not (tmp_path / "x").exists()
    words = ["train", "quadratic-digits", "--start-from", str(run), "--resume", "--out", str(run)]
    status, _, err = call(capsys, *words)
    assert (status, "--start-from: must be omitted" in err) == (1, True)
