"""How do time and memory of full attention grow up to a megapixel?

Forward pass of one layer over one square image, every query over every key, by local and by wide heads. The peak is
that of a process of its own, the interpreter and torch included, beside the size of the dense matrices.

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
QUICK = {"sides": (32, 64), "alphas": (0.5,), "channels": 8, "repeats": 2}


def run(
    *,
    sides: tuple[int, ...] = (128, 256, 512, 1024),
    alphas: tuple[float, ...] = (0.5, 0.001),  # in 1 / pixel^2: local and wide heads
    channels: int = 64,
    repeats: int = 3,
) -> Results:
    """Times and memory of all sizes, and how time grows with the number of pixels."""
    rows: list[Row] = []
    contenders = [f"alpha {alpha:g}" for alpha in alphas]
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
        rows += [replace(row, ratio=None, memory_ratio=None) for row in found]  # they compute different things
    facts = {}
    for name in contenders:
        seconds = [row.median for row in rows if row.contender == name]
        facts[f"time grows as pixels to the power of, {name}"] = exponent([side**2 for side in sides], seconds)
    return Results("megapixel", "", tuple(rows), facts)


def prepare(*, side: int, channels: int, heads: int, contender: str) -> Step:
    """The forward pass over one image, without gradients."""
    torch.manual_seed(0)
    layer = SelfAttention2d(channels, channels, heads)
    assert isinstance(layer.encoding, Quadratic)
    with torch.no_grad():
        layer.encoding.spread.fill_((2 * float(contender.removeprefix("alpha "))) ** 0.5)
    images = torch.randn(1, side, side, channels).movedim(-1, 1)

    def step() -> list[Tensor]:
        with torch.no_grad():
            layer(images)
        return []

    return step
