"""Two processes run `attnconv reproduce` together, for a run and for a run pruned from it."""

from pathlib import Path

from attnconv.training.run_folder import RunFolder
from tests.two_processes import run_python

SOURCE_RUN, PRUNED = "quadratic-generalized", "quadratic-generalized-pruned"


def test_two_processes_reproduce_together(tmp_path: Path) -> None:
    words = ["reproduce", "--scale", "tiny", "--out", str(tmp_path), "--only", PRUNED]
    said = run_python("-m", "attnconv", *words)
    assert said.count("precision  state") == said.count("Figures and tables") == 1
    first, pruned = (RunFolder(tmp_path / "runs" / name) for name in (SOURCE_RUN, PRUNED))
    assert first.result() is not None
    result = pruned.result()
    assert (result is not None and "start" in result) or "not trained, because" in said
    again = run_python("-m", "attnconv", *words)
    assert again.count("already complete") == (1 if result is None else 2)
