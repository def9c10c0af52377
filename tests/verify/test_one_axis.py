"""One axis of 65,536 positions: no n x n matrix, and at most 100 MB besides the layer and its input."""

import subprocess
import sys

import pytest

MEASURE = """
import resource, sys, torch
from attnconv import SelfAttention1d
positions, alpha = int(sys.argv[1]), float(sys.argv[2])
torch.set_num_threads(1)
layer, x = SelfAttention1d(8, 8, heads=9, encoding="quadratic"), torch.randn(1, 8, positions)
with torch.no_grad():
    layer.encoding.spread.fill_((2 * alpha) ** 0.5)
    layer(x[..., :2048])  # libraries load at their first use
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert layer(x).isfinite().all()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts kB on Linux only")
@pytest.mark.parametrize("alpha", [0.5, 0.001, 0.00001])
def test_memory_on_one_long_axis(alpha: float, verify_scale: float) -> None:
    positions = 65_536 if verify_scale >= 1 else 16_384
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(positions), str(alpha)], capture_output=True, text=True, check=True
    )
    print(f"{positions} positions, alpha {alpha}: {float(done.stdout):.0f} MB")
    assert float(done.stdout) <= 100
