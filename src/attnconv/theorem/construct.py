"""A convolution as multi-head self-attention: the construction of Theorem 1.

One head per kernel position. Head j looks at the shift dilation * j - padding (its centre) with so large an alpha that
the softmax puts everything on that one key; its matrix W_h is the kernel's slice there:

    conv(x)_q = sum_j x_{stride q + dilation j - padding} W_j + b  =  sum_h (A_h x)_q W_h + b

The border rule is the convolution's padding mode, so outputs agree at every pixel, not only inside.
"""

import math
from itertools import product
from typing import TypeAlias

import torch
from torch import Tensor, nn

from attnconv._errors import bad
from attnconv.encodings.quadratic import Quadratic
from attnconv.grid import Border
from attnconv.layers.self_attention import SelfAttention, SelfAttention1d, SelfAttention2d, SelfAttention3d

Convolution: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d
_LAYERS: dict[int, type[SelfAttention]] = {1: SelfAttention1d, 2: SelfAttention2d, 3: SelfAttention3d}
_BORDERS: dict[str, Border] = {
    "zeros": "zero",
    "replicate": "replicate",
    "reflect": "reflect",
    "circular": "circular",
}


def from_conv(conv: Convolution, *, alpha: float | None = None) -> SelfAttention:
    """The attention layer that computes what a convolution computes.

    Args:
        conv: nn.Conv1d, nn.Conv2d or nn.Conv3d with any stride, dilation, padding, padding mode, groups and dtype.
        alpha: How hard the heads are, in 1 / pixel^2; None for heads that are hard to the dtype's precision.

    Returns:
        A layer with one head per kernel position; its centres, alpha and weights are ordinary parameters.

    Raises:
        TypeError: conv is no convolution of these kinds.
        ValueError: alpha is not positive and finite.

    Example:
        >>> import torch
        >>> conv = torch.nn.Conv2d(3, 4, kernel_size=3, padding=1)
        >>> x = torch.randn(2, 3, 6, 7)
        >>> bool((from_conv(conv)(x) - conv(x)).abs().max() < 1e-5)
        True
    """
    if not isinstance(conv, Convolution):
        raise TypeError(bad("conv", "must be an nn.Conv1d, nn.Conv2d or nn.Conv3d", type(conv).__name__))
    dtype = conv.weight.dtype
    alpha = hard_alpha(dtype) if alpha is None else alpha
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(bad("alpha", "must be positive and finite", alpha))
    dims, kernel = conv.weight.dim() - 2, tuple(conv.weight.shape[2:])
    heads = math.prod(kernel)
    padding = _paddings(conv)
    layer = _LAYERS[dims](
        conv.in_channels,
        conv.out_channels,
        heads,
        encoding=Quadratic(heads, dims),
        stride=conv.stride,
        padding=padding,
        dilation=conv.dilation,
        border=_BORDERS[conv.padding_mode],
        window=[dilation * (size - 1) + 1 for size, dilation in zip(kernel, conv.dilation, strict=True)],
        bias=conv.bias is not None,
        groups=conv.groups,
        device=conv.weight.device,
        dtype=dtype,
    )
    places = product(*(range(size) for size in kernel))
    centres = [
        [step * j - before for j, step, (before, _) in zip(place, conv.dilation, padding, strict=True)]
        for place in places
    ]
    _fill(layer, torch.tensor(centres), alpha, conv)
    return layer.train(conv.training)


def hard_alpha(dtype: torch.dtype) -> float:
    """An alpha whose neighbours' weights are eps^2: nothing of them is left in a sum, in any dimension."""
    precision = torch.finfo(torch.promote_types(dtype, torch.float32))
    return -2 * math.log(precision.eps)


def _fill(layer: SelfAttention, centres: Tensor, alpha: float, conv: Convolution) -> None:
    encoding = layer.encoding
    assert isinstance(encoding, Quadratic)
    assert layer.weight is not None
    with torch.no_grad():
        encoding.centres.copy_(centres)
        encoding.spread.fill_(math.sqrt(2 * alpha))
        layer.weight.copy_(conv.weight.flatten(2).permute(2, 1, 0))  # (kernel positions, in / groups, out)
        if layer.bias is not None and conv.bias is not None:
            layer.bias.copy_(conv.bias)


def _paddings(conv: Convolution) -> tuple[tuple[int, int], ...]:
    """(before, after) per axis, with "same" and "valid" worked out as PyTorch does."""
    if conv.padding == "valid":
        return ((0, 0),) * len(conv.kernel_size)
    if conv.padding == "same":
        totals = [step * (size - 1) for size, step in zip(conv.kernel_size, conv.dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((int(pad), int(pad)) for pad in conv.padding)
