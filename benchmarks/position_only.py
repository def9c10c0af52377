"""Time and memory of position-only layers compared with a direct softmax.

Forward and backward pass of a whole layer, mixing and projection, with isotropic Gaussian heads. Contenders are the
backends of the layer, with the same weights and images:

    reference     softmax of all scores, as a stored matrix
    dense         a stored matrix, computed from one factor per axis
    structured    one factor per axis, without a matrix
    auto          the default, chosen by the planner

    python -m benchmarks position-only
"""

import itertools

import torch
from torch import Tensor

from attnconv.layers import SelfAttention2d
from attnconv.layers.planning import Backend
from benchmarks.compare import Step, compare
from benchmarks.measure import precision
from benchmarks.results import Results, Row

BACKENDS: tuple[Backend, ...] = ("reference", "dense", "structured", "auto")
HEADS = 9
QUICK = {"cases": ((2, 8), (1, 16)), "channels": (16,), "dtypes": ("float32",), "repeats": 2}


def run(
    *,
    cases: tuple[tuple[int, int], ...] = ((32, 16), (32, 32), (4, 64)),  # batch and side of the images
    channels: tuple[int, ...] = (64, 400),
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    repeats: int = 7,
) -> Results:
    """Measure the time of all cases and the peak memory of the larger ones."""
    rows: list[Row] = []
    for dtype, width, (batch, side) in itertools.product(dtypes, channels, cases):
        if width <= 64 or side <= 32:
            rows += compare(
                prepare,
                {"batch": batch, "side": side, "channels": width, "heads": HEADS, "dtype": dtype},
                BACKENDS,
                case=f"{dtype}, {batch} x {width} x {side} x {side}",
                repeats=repeats,
                memory=side >= 32,
                dense_bytes=4 * HEADS * side**4,
            )
    tensors = {(row.case, row.contender): row.memory.tensors for row in rows if row.memory is not None}
    shares = [tensors[case, name] / tensors[case, BACKENDS[0]] for case, name in tensors if name == "structured"]
    facts = {"structured: peak tensor memory relative to reference, maximum over cases": max(shares)} if shares else {}
    return Results("position-only", "speedup over the reference", tuple(rows), facts)


def prepare(*, batch: int, side: int, channels: int, heads: int, dtype: str, contender: Backend) -> Step:
    """Return a forward and backward step; all backends use the same weights and images."""
    torch.manual_seed(0)
    layer = SelfAttention2d(channels, channels, heads, backend=contender)
    images = torch.randn(batch, side, side, channels).movedim(-1, 1).requires_grad_()
    gradient = torch.randn(batch, side, side, channels).movedim(-1, 1).to(getattr(torch, dtype))

    def step() -> list[Tensor]:
        layer.zero_grad()
        images.grad = None
        with precision(dtype):
            out: Tensor = layer(images)
        out.backward(gradient)
        return [out.detach()]

    return step
