"""Two processes run `attnconv reproduce` together, for a run and for a run pruned from it."""

import os
import subprocess
import sys
from pathlib import Path

from attnconv.training.run_folder import RunFolder

SOURCE = Path(__file__).resolve().parents[2]
SOURCE_RUN, PRUNED = "quadratic-generalized", "quadratic-generalized-pruned"


def test_two_processes_reproduce_together(tmp_path: Path) -> None:
    words = ["reproduce", "--scale", "tiny", "--out", str(tmp_path), "--only", PRUNED]
    said = call(words)
    assert said.count("precision  state") == said.count("Figures and tables") == 1
    first, pruned = (RunFolder(tmp_path / "runs" / name) for name in (SOURCE_RUN, PRUNED))
    assert first.result() is not None
    result = pruned.result()
    assert (result is not None and "start" in result) or "not trained, because" in said
    assert call(words).count("already complete") == (1 if result is None else 2)


def call(words: list[str]) -> str:
    """Run a command of the library and return its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE / "src")}
    torchrun = ("torch.distributed.run", "--nproc-per-node", "2")
    command = [sys.executable, "-m", *torchrun, "-m", "attnconv", *words]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout
