"""How much of 3 x 3 kernels no weights of a layer reach, on an image that is just large enough to tell."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from attnconv.layers.self_attention import SelfAttention
from attnconv.theory.expressibility import can_express

KERNEL = 3
MOST_POSITIONS = {1: 64, 2: 16, 3: 6}  # per axis, by number of axes: each query takes a QR decomposition


@final
@dataclass(frozen=True)
class KernelSpan:
    """How near one layer comes to every 3 x 3 convolution."""

    missed: float | None  # relative part of kernels that no weights reach, away from the border
    expresses: bool  # whether that is 0 to rounding
    sizes: tuple[int, ...]  # positions per axis of the image
    reason: str  # why `missed` is None, else empty


def kernel_span(layer: SelfAttention, sizes: Sequence[int]) -> KernelSpan:
    """Measure a layer whose attention depends on positions only, for an image of some positions per axis.

    Example:
        >>> import torch
        >>> from attnconv import from_conv
        >>> found = kernel_span(from_conv(torch.nn.Conv2d(1, 1, 3, padding=1)), (40, 8))
        >>> found.expresses, found.sizes
        (True, (16, 8))
    """
    few = tuple(min(size, MOST_POSITIONS[len(sizes)]) for size in sizes)
    try:
        found = can_express(layer, KERNEL, sizes=few)
    # A custom encoding may raise any of these for an image of another size.
    except (ValueError, RuntimeError, IndexError, TypeError) as error:
        words = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        return KernelSpan(None, False, few, f"on {' x '.join(map(str, few))} positions it stopped with: {words}")
    return KernelSpan(found.missed, found.missed <= found.tolerance, few, "")
