"""Every notebook runs in a separate process, and its assertions hold."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    """One thread, because tensors are small, and threads that wait for a busy core are several times slower."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.notebook_cells", str(path), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    print(result.stdout)
    assert result.returncode == 0, result.stderr
    assert sorted(tmp_path.glob(f"{path.stem}-*.png"))
