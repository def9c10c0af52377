"""`benchmarks.keep_reproduction`: what it takes, and what it leaves."""

from pathlib import Path

import pytest

from attnconv.models.load import load
from attnconv.training.fit import fit
from benchmarks.keep_reproduction import Settings, main
from tests.training.making import tiny


def test_finished_runs_go_along_with_weights_of_the_first_seed(tmp_path: Path) -> None:
    source, out = tmp_path / "made", tmp_path / "kept"
    for name in ("quadratic", "quadratic-seed-43"):
        fit(tiny(epochs=1, limit=60), source / "runs" / name, progress=False)
    for name in ("figures/figure-01.png", "figures/figure-01.svg", "tables/table-1.md", "runs/learned/settings.json"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("{}")
    found = {str(path.relative_to(out)) for path in main(Settings(source, out))}
    records = {
        f"runs/{run}/{name}"
        for run in ("quadratic", "quadratic-seed-43")
        for name in ("settings.json", "metrics.jsonl", "result.json")
    }
    assert found == {"figures/figure-01.png", "tables/table-1.md", "runs/quadratic/weights.safetensors", *records}
    weights = out / "runs" / "quadratic" / "weights.safetensors"
    assert weights.stat().st_size < (source / "runs/quadratic/checkpoints/last.safetensors").stat().st_size
    assert load(weights).settings is not None


def test_a_folder_without_a_finished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--reproduction: must hold a finished run"):
        main(Settings(tmp_path, tmp_path / "kept"))
