"""Run Python in two processes, as users do with torchrun."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_python(*words: str, processes: int = 2, cwd: Path | None = None) -> str:
    """Run `python WORDS`, started by torchrun if there are several processes; return the output, or fail."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else ()), *words]
    done = subprocess.run(command, check=False, env=environment, cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
