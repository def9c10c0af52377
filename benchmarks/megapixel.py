"""How do time and memory of full attention grow up to a megapixel?

Forward pass of one layer over one square image, every query over every key, by local and by wide heads. The peak is
that of a process of its own, the interpreter and torch included. Beside it stands what the dense matrix would take.

    attnconv bench megapixel
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attnconv.encodings.quadratic import Quadratic
from attnconv.layers import SelfAttention2d
from benchmarks.measure import exponent, interleaved, memory_of
from benchmarks.results import Answer, Row
from benchmarks.settings import MegapixelSettings


def answer(settings: MegapixelSettings) -> Answer:
    """Times and memory of all sizes, and how time grows with the number of pixels."""
    rows = tuple(row for side in settings.sides for row in _rows(side, settings))
    facts = {}
    for alpha in settings.alphas:
        own = [row for row in rows if row.contender == _name(alpha)]
        sizes, seconds = [float(row.pixels or 0) for row in own], [row.seconds.median for row in own]
        facts[f"time grows as pixels to the power of, {_name(alpha)}"] = exponent(sizes, seconds)
    return Answer("megapixel", "", rows, facts)


def prepared(*, side: int, channels: int, heads: int, alpha: float) -> Callable[[], Tensor]:
    """The forward pass over one image, without gradients."""
    torch.manual_seed(0)
    layer = SelfAttention2d(channels, channels, heads)
    assert isinstance(layer.encoding, Quadratic)
    with torch.no_grad():
        layer.encoding.spread.fill_((2 * alpha) ** 0.5)
    images = torch.randn(1, side, side, channels).movedim(-1, 1)

    def step() -> Tensor:
        with torch.no_grad():
            out: Tensor = layer(images)
        return out

    return step


def _rows(side: int, settings: MegapixelSettings) -> Iterator[Row]:
    case = {"side": side, "channels": settings.channels, "heads": settings.heads}
    times = interleaved({_name(alpha): prepared(**case, alpha=alpha) for alpha in settings.alphas}, settings.repeats)
    for alpha in settings.alphas:
        yield Row(
            case=f"{side} x {side}",
            contender=_name(alpha),
            seconds=times[_name(alpha)],
            memory=memory_of(__name__, {**case, "alpha": alpha}) if side >= settings.memory_from else None,
            pixels=side**2,
            dense_bytes=4 * settings.heads * side**4,
        )


def _name(alpha: float) -> str:
    return f"alpha {alpha:g}"
