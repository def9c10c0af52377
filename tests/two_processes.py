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
    with subprocess.Popen(
        command, env=environment, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, errors = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its workers, which hold the pipes open
            out, errors = process.communicate()
    assert process.returncode == 0, out + errors
    return out
