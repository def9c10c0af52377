"""A training killed with SIGKILL at random moments and resumed each time ends with the same bits."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from attnconv.training.run_folder import RunFolder

KILLS, EPOCHS = 5, 24
SOURCE = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from attnconv.training.fit import fit
from tests.training.making import tiny
fit(tiny(epochs=int(sys.argv[2]), limit=800), sys.argv[1], resume=True, progress=False)
"""


def start(run: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{SOURCE / 'src'}{os.pathsep}{SOURCE}"}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(run), str(EPOCHS)], env=environment)


def test_killed_and_resumed_runs_end_with_the_same_weights(tmp_path: Path, verify_scale: float) -> None:
    whole, torn = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "torn")
    assert start(whole.path).wait() == 0
    epoch_seconds = whole.metrics()[-1]["seconds"] / EPOCHS
    kills, draw = max(1, round(KILLS * verify_scale)), random.Random(0)
    # Random moments, early to late; the first may come before anything is written, the last leaves a tenth to be done.
    for moment in sorted(draw.uniform(0.0, 0.9 * EPOCHS) for _ in range(kills)):
        process = start(torn.path)
        while process.poll() is None and len(torn.heads()) < moment:  # epoch 0 has a line as well
            time.sleep(0.002)
        time.sleep(draw.uniform(0.0, epoch_seconds))
        assert process.poll() is None, "the run ended before it could be killed: make it longer"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert start(torn.path).wait() == 0
    first, second = load_file(whole.last_weights), load_file(torn.last_weights)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(second[name], value), name
    lines = [[{**line, "seconds": 0.0} for line in run.metrics()] for run in (whole, torn)]
    assert lines[0] == lines[1]
    assert whole.heads() == torn.heads()
    print(f"{kills} kills, resumed each time: all {len(first)} tensors equal bit for bit")
