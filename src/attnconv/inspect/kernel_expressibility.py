"""How much of 3 x 3 kernels no weights of a layer reach, asked of an image that is large enough to tell and no larger.

The answer of `can_express` costs a QR decomposition per query, so that at most `MOST_POSITIONS` per axis are taken. A
layer may not run on so small an image: what it says then stands in the place of the number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from attnconv.layers.self_attention import SelfAttention
from attnconv.theory.expressibility import can_express

KERNEL = 3
MOST_POSITIONS = {1: 64, 2: 16, 3: 6}  # per axis, by number of axes


@final
@dataclass(frozen=True)
class KernelSpan:
    """How near one layer comes to every 3 x 3 convolution.

    Attributes:
        missed: The relative part of such kernels that no weights of the layer reach, away from the border; None where
            it is not known.
        expresses: Whether that is 0 to rounding.
        sizes: Positions per axis of the image that was asked for.
        reason: Why it is not known, in the layer's words; empty where it is.
    """

    missed: float | None
    expresses: bool
    sizes: tuple[int, ...]
    reason: str


def kernel_span(layer: SelfAttention, sizes: Sequence[int]) -> KernelSpan:
    """Ask `can_express` of a layer that looks at positions alone.

    Args:
        layer: The layer.
        sizes: Positions of its image per axis, of which at most `MOST_POSITIONS` are taken.

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
    # An encoding of the user's own may say in any way that it is bound to one size.
    except (ValueError, RuntimeError, IndexError, TypeError) as error:
        words = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        return KernelSpan(None, False, few, f"on {' x '.join(map(str, few))} positions it stopped with: {words}")
    return KernelSpan(found.missed, found.missed <= found.tolerance, few, "")
