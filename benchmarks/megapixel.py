"""Scaling of full attention up to a megapixel.

One layer with local or wide heads on one square image, with attention of all queries to all keys: the forward pass, and
the forward and backward pass with all gradients. Peak memory is also reported for the whole process, next to the size
of the dense matrices.

    python -m benchmarks megapixel
"""

from dataclasses import replace

import torch
from torch import Tensor

from attnconv.encodings.quadratic import Quadratic
from attnconv.layers import SelfAttention2d
from benchmarks.compare import Step, compare
from benchmarks.measure import exponent
from benchmarks.results import Results, Row

HEADS = 9
WITH_GRADIENTS = ", with gradients"
QUICK = {"sides": (32, 64), "alphas": (0.5,), "gradients": (False,), "channels": 8, "repeats": 2}


def run(
    *,
    sides: tuple[int, ...] = (128, 256, 512, 1024),
    alphas: tuple[float, ...] = (0.5, 0.001),  # in 1 / position^2: local and wide heads
    gradients: tuple[bool, ...] = (False, True),
    channels: int = 64,
    repeats: int = 3,
) -> Results:
    """Measure time and memory for all sizes, and the exponent of time over positions."""
    rows: list[Row] = []
    contenders = [f"alpha {alpha:g}{WITH_GRADIENTS * also}" for alpha in alphas for also in gradients]
    for side in sides:
        found = compare(
            prepare,
            {"side": side, "channels": channels, "heads": HEADS},
            contenders,
            case=f"{side} x {side}",
            repeats=repeats,
            memory=side >= 64,
            dense_bytes=4 * HEADS * side**4,
        )
        rows += [replace(row, ratio=None, memory_ratio=None) for row in found]  # contenders are not equivalent
    facts = {}
    for name in contenders:
        seconds = [row.median for row in rows if row.contender == name]
        facts[f"exponent of time over positions, {name}"] = exponent([side**2 for side in sides], seconds)
    return Results("megapixel", "", tuple(rows), facts)


def prepare(*, side: int, channels: int, heads: int, contender: str) -> Step:
    """Return a forward pass over one image without gradients, or a forward and backward pass."""
    torch.manual_seed(0)
    layer = SelfAttention2d(channels, channels, heads)
    assert isinstance(layer.encoding, Quadratic)
    with torch.no_grad():
        layer.encoding.spread.fill_((2 * float(contender.removeprefix("alpha ").removesuffix(WITH_GRADIENTS))) ** 0.5)
    trains = contender.endswith(WITH_GRADIENTS)
    images = torch.randn(1, side, side, channels).movedim(-1, 1).requires_grad_(trains)
    gradient = torch.randn(1, side, side, channels).movedim(-1, 1) if trains else None

    def step() -> list[Tensor]:
        with torch.set_grad_enabled(trains):
            out = layer(images)
        if trains:
            images.grad = None
            layer.zero_grad()
            out.backward(gradient)
        return []

    return step
