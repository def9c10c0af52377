"""Two processes agree with one process of the same global batch: 50 steps, float64, no batch norm, dropout 0."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attnconv.training.run_folder import RunFolder
from tests.two_processes import run_python

STEPS = 50
PROGRAM = """
import sys
from dataclasses import replace
from attnconv.training.fitting import fit
from tests.training.making import tiny
settings = tiny(epochs=5, limit=200, precision="64", accumulate=int(sys.argv[2]), accelerator="cpu")
settings = replace(settings, model=replace(settings.model, dropout=0.0))
run = fit(settings, sys.argv[1], progress=False)
assert run.result() is not None
"""


def train(run: Path, *, processes: int, accumulate: int = 1) -> RunFolder:
    script = run.parent / "train.py"
    script.write_text(PROGRAM)
    run_python(str(script), str(run), str(accumulate), processes=processes)
    return RunFolder(run)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_follow_one(tmp_path: Path, accumulate: int) -> None:
    one, two = train(tmp_path / "one", processes=1), train(tmp_path / "two", processes=2, accumulate=accumulate)
    assert one.metrics()[-1]["step"] == two.metrics()[-1]["step"] == STEPS
    first, second = load_file(one.last_weights), load_file(two.last_weights)
    worst = 0.0
    for name, value in first.items():
        worst = max(worst, float((second[name] - value).abs().max() / value.abs().max()))
        torch.testing.assert_close(second[name], value, rtol=1e-5, atol=1e-5)
    for a, b in zip(one.metrics(), two.metrics(), strict=True):
        assert abs(a["loss"] - b["loss"]) <= 1e-5 * a["loss"]
    print(f"two processes against one after {STEPS} steps: largest relative difference {worst:.1e}")
