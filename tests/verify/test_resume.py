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

KILLS = 5
SOURCE = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from attnconv.training.fit import fit
from tests.training.making import tiny
fit(tiny(epochs=12, limit=800), sys.argv[1], resume=True, progress=False)
"""


def start(run: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{SOURCE / 'src'}{os.pathsep}{SOURCE}"}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(run)], env=environment)


def test_killed_and_resumed_runs_end_with_the_same_weights(tmp_path: Path, verify_scale: float) -> None:
    whole, torn = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "torn")
    assert start(whole.path).wait() == 0
    seconds = whole.metrics()[-1]["seconds"]
    draw, kills = random.Random(0), 0
    while kills < max(1, round(KILLS * verify_scale)):
        process = start(torn.path)
        known = len(torn.heads()) if torn.exists() else 0
        while process.poll() is None and len(torn.heads()) <= known:
            time.sleep(0.005)  # it trains now: from here on at a random moment of its first epochs
        time.sleep(draw.uniform(0.0, 0.4) * seconds)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
        assert torn.result() is None, "the run ended before it could be killed: make it longer"
    assert start(torn.path).wait() == 0
    first, second = load_file(whole.last_weights), load_file(torn.last_weights)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(second[name], value), name
    lines = [[{**line, "seconds": 0.0} for line in run.metrics()] for run in (whole, torn)]
    assert lines[0] == lines[1]
    assert whole.heads() == torn.heads()
    print(f"{kills} kills, resumed each time: all {len(first)} tensors equal bit for bit")
