"""Two processes reproduce what one does: the same runs, and one of them pruned from another's result."""

import os
import subprocess
import sys
from pathlib import Path

from attnconv.training.run_folder import RunFolder

SOURCE = Path(__file__).resolve().parents[2]
NAMES = ("quadratic", "quadratic-generalized", "quadratic-generalized-pruned")


def test_two_processes_reproduce_together(tmp_path: Path) -> None:
    words = ["reproduce", "--scale", "tiny", "--devices", "2", "--out", str(tmp_path), "--only", *NAMES]
    said = call(words)
    assert said.count("What is trained") == said.count("Figures and tables") == 1
    results = {name: RunFolder(tmp_path / "runs" / name).result() for name in NAMES[:2]}
    assert all(result is not None for result in results.values())
    settings = RunFolder(tmp_path / "runs" / "quadratic").settings()
    assert settings.train.devices == 2
    pruned = RunFolder(tmp_path / "runs" / NAMES[2]).result()
    assert (pruned is not None and "start" in pruned) or "not trained, since" in said
    assert call(words).count("finished before") == (3 if pruned is not None else 2)


def call(words: list[str]) -> str:
    """What a command of the library prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE / "src")}
    command = [sys.executable, "-m", "attnconv", *words]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout
