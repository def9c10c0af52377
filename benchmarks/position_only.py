"""How fast and lean is a position-only layer beside the formula it computes?

The whole layer, mixing and projection, forward and backward, of round Gaussians. Contenders are the layer's backends
with the same weights on the same images:

    reference     the formula itself: the softmax of all scores, its matrix stored
    dense         the matrix from one factor per axis, stored
    structured    the factors, never a matrix
    auto          the form that the layer chooses by default

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
    """Times of all cases, and peak memory of the larger ones."""
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
    facts = {"structured: tensors at their peak, largest part of the formula's": max(shares)} if shares else {}
    return Results("position-only", "times as fast as the formula", tuple(rows), facts)


def prepare(*, batch: int, side: int, channels: int, heads: int, dtype: str, contender: Backend) -> Step:
    """A step, forward and backward, on a new layer; every backend draws the same weights and images."""
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
