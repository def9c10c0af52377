"""Convert a convolution to multi-head self-attention: the construction of Theorem 1.

    conv(x)_q = sum_j x_{q + shift_j} W_j + b  =  sum_h (A_h x)_q W_h + b

Head j attends shift_j with a one-hot softmax. The border rule is the padding mode, so outputs are equal everywhere.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import is_real, whole
from attnconv.encodings.base import Encoding
from attnconv.encodings.quadratic import Quadratic
from attnconv.encodings.transformer_xl import QuadraticFeatures, Relative
from attnconv.layers.self_attention import SelfAttention, SelfAttention1d, SelfAttention2d, SelfAttention3d
from attnconv.operators.base import score_dtype
from attnconv.theory.best_weights import nearest_weights
from attnconv.theory.conv_taps import (
    BORDERS,
    Convolution,
    Forward,
    check_convolution,
    extents,
    head_weights,
    paddings,
    taps,
)

# The weight of a neighbour is eps^2 of float64: it vanishes in sums of any dtype that a layer is moved to, and smaller
# weights are zero in float32, not denormal.
HARD_ALPHA = -2 * math.log(torch.finfo(torch.float64).eps)
# For training, a compromise (results/recast-finetune): softer heads end with a lower accuracy, harder ones hardly move.
SOFT_ALPHA = 3.0

_LAYERS: dict[int, type[SelfAttention]] = {1: SelfAttention1d, 2: SelfAttention2d, 3: SelfAttention3d}


def from_conv(
    conv: Convolution, *, alpha: float | None = None, weights: Literal["slices", "nearest"] = "slices"
) -> SelfAttention:
    """Return the attention layer that is equal to a convolution (Theorem 1).

    Args:
        conv: nn.Conv1d, nn.Conv2d, nn.Conv3d or one of their transposes, with any stride, dilation, padding, padding
            mode, groups and floating dtype.
        alpha: Sharpness of the heads, in 1 / pixel^2. None for heads that are hard in every dtype (`HARD_ALPHA`): they
            equal the convolution, and their centres and spreads are frozen. Softer ones have a known error bound and
            can be trained; `SOFT_ALPHA` = 3 is the value for that.
        weights: The heads' matrices: the kernel's `slices`, to which `error_bound` applies; or, for soft heads, those
            that are `nearest` to the convolution inside the image.

    Returns:
        A layer with one head per kernel position, row-major.

    Raises:
        TypeError: conv is no convolution of these kinds, or is lazy, quantised or complex.
        ValueError: alpha is not positive, or not finite in the convolution's dtype; `weights` is unknown; a weight is
            not finite or is computed from others; or a tap is at a distance that the dtype cannot represent.

    Example:
        >>> conv = torch.nn.Conv2d(3, 4, kernel_size=3, padding=1)
        >>> x = torch.randn(2, 3, 6, 7)
        >>> bool((from_conv(conv)(x) - conv(x)).abs().max() < 1e-5)
        True
    """
    check_convolution(conv)
    if weights not in ("slices", "nearest"):
        raise ValueError(bad("weights", "must be 'slices' or 'nearest'", repr(weights)))
    spread = math.sqrt(2 * (HARD_ALPHA if alpha is None else _checked(alpha, conv.weight.dtype)))
    with torch.no_grad(), torch.device("cpu"):  # values are needed, whatever the default device
        centres = torch.tensor(taps(conv))
        held = centres.to(conv.weight.dtype)
        if not torch.equal(held.long(), centres):
            requirement, fix = "must have taps at shifts that its dtype can hold", "Convert it with conv.float() first."
            raise ValueError(bad("conv", requirement, str(conv.weight.dtype), fix))
        encoding = Quadratic(*centres.shape)
        encoding.requires_grad_(alpha is not None)
        layer = layer_for(conv, encoding)
        encoding.centres.copy_(held)
        encoding.spread.fill_(spread)
        if weights == "nearest" and not conv.weight.is_meta:
            assert layer.weight is not None
            layer.weight.copy_(nearest_weights(layer, conv))
    return layer


def equation_9(conv: Forward, *, alpha: float = 46.0, key_channels: int | None = None) -> SelfAttention:
    """Return the layer of the proof: the attention of equation (8) with the parameters of equation (9).

        v_h = -alpha (1, -2 Delta_h),   r_delta = (|delta|^2, delta),   W_qry = W_key = 0,   W^_key = I

    so that every score is ``-alpha (|delta - Delta_h|^2 - |Delta_h|^2)``. All four terms of equation (8) are computed.

    Args:
        conv: nn.Conv1d, nn.Conv2d or nn.Conv3d with no more outputs than pixels: equation (8) reads content at queries.
        alpha: Sharpness of the heads; 46 in the paper.
        key_channels: D_k, at least D_p = dims + 1; the identity is padded with zeros. None for D_p.

    Raises:
        TypeError, ValueError: As `from_conv`, or if key_channels is below D_p.

    Example:
        >>> conv = torch.nn.Conv1d(2, 2, kernel_size=3, padding=1)
        >>> layer, x = equation_9(conv), torch.randn(1, 2, 9)
        >>> layer.encoding.position_bias[0].tolist()  # the head at shift -1: -46 (1, 2)
        [-46.0, -92.0]
        >>> bool((layer(x) - conv(x)).abs().max() < 1e-5)
        True
    """
    check_convolution(conv)
    if not isinstance(conv, Forward):
        raise TypeError(bad("conv", "must not be transposed: its queries lie between pixels", type(conv).__name__))
    _checked(alpha, conv.weight.dtype)
    with torch.no_grad(), torch.device("cpu"):
        centres = torch.tensor(taps(conv))
        heads, dims = centres.shape
        channels = dims + 1 if key_channels is None else whole("key_channels", key_channels, 1)
        if channels < dims + 1:
            raise ValueError(bad("key_channels", f"must be at least D_p = {dims + 1}", channels))
        features = QuadraticFeatures(dims)
        encoding = Relative(conv.in_channels, heads, dims, head_channels=channels, features=features, scaled=False)
        layer = layer_for(conv, encoding)
        for parameter in encoding.parameters():
            parameter.zero_()
        encoding.get_parameter("position_key.weight").copy_(torch.eye(channels, dims + 1).repeat(heads, 1))
        position_bias = encoding.get_parameter("position_bias")
        position_bias[:, 0] = -alpha
        position_bias[:, 1 : dims + 1] = 2 * alpha * centres
    return layer


def layer_for(conv: Convolution, encoding: Encoding, weight: Tensor | None = None) -> SelfAttention:
    """Return a layer with a convolution's geometry, bias, mode, device and dtype around other heads.

    `weight` has one matrix per head, (h, c / groups, d); None for the convolution's, with a head per tap.
    """
    geometry: dict[str, Any] = {"border": "zero", "transposed": True}
    if isinstance(conv, Forward):
        geometry = {"border": BORDERS[conv.padding_mode]}
    else:
        geometry["output_padding"] = conv.output_padding
    layer = _LAYERS[encoding.dims](
        conv.in_channels,
        conv.out_channels,
        encoding.heads,
        encoding=encoding,
        stride=conv.stride,
        padding=paddings(conv),
        dilation=conv.dilation,
        window=extents(conv),
        bias=conv.bias is not None,
        groups=conv.groups,
        device=conv.weight.device,
        dtype=conv.weight.dtype,
        **geometry,
    )
    assert layer.weight is not None
    with torch.no_grad():
        # In the convolution's order in memory, so that it runs as a convolution without a copy.
        weight = head_weights(conv) if weight is None else weight.to(layer.weight)
        layer.weight = nn.Parameter(weight.detach().clone())
        if layer.bias is not None and conv.bias is not None:
            layer.bias.copy_(conv.bias)
    return layer.train(conv.training)


def _checked(alpha: float, dtype: torch.dtype) -> float:
    """An alpha whose spread sqrt(2 alpha) is finite in the layer's dtype, and its square in that of the scores."""
    wanted = math.sqrt(2 * alpha) if is_real(alpha) and alpha > 0 else 0.0
    spread = torch.tensor(wanted, dtype=torch.float64, device="cpu").to(dtype)
    squared = float(spread.to(score_dtype(dtype)).square())
    if not 0 < squared < math.inf:
        raise ValueError(bad("alpha", f"must be positive and finite in {dtype}", repr(alpha)))
    return alpha
