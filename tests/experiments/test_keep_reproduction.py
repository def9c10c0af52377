"""`experiments.keep_reproduction`: the files it copies, the format it writes, and restoring runs from them."""

import json
from pathlib import Path

import pytest
import torch

from attnconv.models.model_loader import load
from attnconv.training.fitting import fit
from attnconv.training.run_folder import RunFolder
from experiments.keep_reproduction import Settings, main
from tests.training.making import tiny

RUNS = ("quadratic", "quadratic-seed-43")


@pytest.fixture(scope="module")
def reproduction(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with two finished runs, an unfinished run, two figures and a table."""
    made = tmp_path_factory.mktemp("made")
    for name in RUNS:
        fit(tiny(epochs=1, limit=60), made / "runs" / name, progress=False)
    for name in ("figures/figure-01.png", "figures/figure-01.svg", "tables/table-1.md", "runs/learned/settings.json"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text("{}")
    return made


def test_finished_runs_go_along_with_their_weights(reproduction: Path, tmp_path: Path) -> None:
    found = {str(path.relative_to(tmp_path)) for path in main(Settings(reproduction, tmp_path))}
    names = ("settings.json", "metrics.jsonl", "heads.jsonl", "result.json", "weights.safetensors")
    assert found == {
        "figures/figure-01.png",
        "tables/table-1.md",
        *(f"runs/{run}/{name}" for run in RUNS for name in names),
    }
    weights = tmp_path / "runs" / "quadratic" / "weights.safetensors"
    assert weights.stat().st_size < (reproduction / "runs/quadratic/checkpoints/last.safetensors").stat().st_size
    assert load(weights).settings is not None


def test_runs_come_back_as_finished_with_their_weights_rounded(reproduction: Path, tmp_path: Path) -> None:
    kept, again = tmp_path / "kept", tmp_path / "again"
    main(Settings(reproduction, kept))
    (kept / "runs" / RUNS[1] / "weights.safetensors").unlink()
    written = main(Settings(again, kept, back=True))
    assert {path.relative_to(again).parts[1] for path in written} == {RUNS[0]}
    before, after = (RunFolder(folder / "runs" / RUNS[0]) for folder in (reproduction, again))
    assert after.result() == before.result()
    assert after.heads() == before.heads()
    pairs = zip(load(before.last_weights).model.parameters(), load(after.last_weights).model.parameters(), strict=True)
    for old, new in pairs:
        torch.testing.assert_close(new, old.half().float(), rtol=0, atol=0)
    assert main(Settings(again, kept, back=True)) == []  # existing runs are not overwritten


def test_a_second_training_of_a_run_is_held_against_the_first(reproduction: Path, tmp_path: Path) -> None:
    kept, name = tmp_path / "kept", RUNS[0]
    main(Settings(reproduction, kept))
    main(Settings(reproduction, kept))
    assert not (kept / "repeats.jsonl").exists()  # the same training
    again = fit(tiny(epochs=1, limit=60), tmp_path / "again" / "runs" / name, progress=False)
    started = json.loads(again.settings_file.read_text()) | {"started": "later"}
    again.settings_file.write_text(json.dumps(started))
    lines = again.metrics()
    lines[-1]["accuracy"] += 0.25
    again.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    main(Settings(tmp_path / "again", kept))
    (said,) = map(json.loads, (kept / "repeats.jsonl").read_text().splitlines())
    assert (said["run"], said["numbers"], said["equal"]) == (name, 2 * len(lines), 2 * len(lines) - 1)
    assert said["largest_difference"] == {"loss": 0.0, "accuracy": pytest.approx(0.25)}
    assert said["trainings"][1]["started"] == "later"


@pytest.mark.parametrize(("back", "named"), [(False, "--reproduction"), (True, "--out")])
def test_a_folder_without_a_finished_run_is_refused(tmp_path: Path, back: bool, named: str) -> None:
    with pytest.raises(ValueError, match=f"{named}: .*finished run"):
        main(Settings(tmp_path, tmp_path / "kept", back=back))
