"""Conversion of a convolution to multi-head self-attention, by the construction of Theorem 1, and back.

    conv(x)_q = sum_j x_{q + shift_j} W_j + b  =  sum_h (A_h x)_q W_h + b

Head j attends only to shift_j. The border rule matches the padding mode, so outputs also agree at the border. Hard
heads convert back exactly. For soft heads, let E_q be the indicators of the keys under the taps. The best convolution
for white-noise input has the matrices V_j that minimise

    sum_q || sum_j E_q[j] V_j - sum_h A_q[h] W_h ||^2.

The solution is V_j = sum_h Psi[j, h] W_h with one Psi for all channels: (sum_q E_q E_q^T) Psi = sum_q E_q A_q^T.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import check_dense, is_real
from attnconv.encodings.base import Encoding
from attnconv.encodings.content import QuadraticFeatures, Relative
from attnconv.encodings.quadratic import Quadratic
from attnconv.grid import Border, per_axis
from attnconv.layers.self_attention import SelfAttention, SelfAttention1d, SelfAttention2d, SelfAttention3d
from attnconv.operators.base import score_dtype
from attnconv.theory.conv_taps import (
    BORDERS,
    FORWARD,
    TRANSPOSED,
    Convolution,
    Forward,
    check_convolution,
    extents,
    grouped_weights,
    head_weights,
    padding_of,
    paddings,
    taps,
)
from attnconv.theory.error_bounds import merged_weight
from attnconv.theory.lemma3_best_weights import Residuals, Spans, compare_outputs, nearest_weights

# In 1 / position^2. Neighbours of the target have probability eps^2 of float64, which vanishes in sums of every dtype.
# Keys further away have probability zero in float32, not a denormal number.
HARD_ALPHA = -2 * math.log(torch.finfo(torch.float64).eps)
# A compromise for training (results/recast-finetune): softer heads reach a lower accuracy, harder ones hardly move.
SOFT_ALPHA = 3.0

_LAYERS: dict[int, type[SelfAttention]] = {1: SelfAttention1d, 2: SelfAttention2d, 3: SelfAttention3d}
_MODES = {border: mode for mode, border in BORDERS.items()} | {"renormalise": "replicate"}


def from_conv(
    conv: Convolution, *, alpha: float | None = None, weights: Literal["slices", "nearest"] = "slices"
) -> SelfAttention:
    """Convert a convolution to an equivalent attention layer (the paper's Theorem 1), with one head per tap, row-major.

    Args:
        conv: nn.Conv1d, nn.Conv2d, nn.Conv3d or one of their transposed counterparts, with any stride, dilation,
            padding, padding mode, groups and floating-point dtype.
        alpha: Sharpness of the heads, in 1 / position^2. None uses `HARD_ALPHA`: heads are hard in every dtype, the
            layer is equivalent to the convolution, and centres and spreads are frozen. A smaller alpha gives soft
            heads, which have an error bound and can be trained; `SOFT_ALPHA` = 3 is recommended for training.
        weights: Matrices of the heads: `slices` for those of the kernel, for which `error_bound` is valid, or `nearest`
            for those with which soft heads best approximate the convolution away from the border.

    Raises:
        TypeError: If `conv` is not one of these convolutions, or is lazy, quantised or complex.
        ValueError: If `alpha` is not positive and finite in the convolution's dtype; if `weights` is unknown; if a
            weight is not finite or is parametrised; or if the dtype cannot represent the shift of a tap.

    Example:
        >>> conv, x = torch.nn.Conv2d(3, 4, kernel_size=3, padding=1), torch.randn(2, 3, 6, 7)
        >>> bool((from_conv(conv)(x) - conv(x)).abs().max() < 1e-5)
        True
    """
    check_convolution(conv)
    if weights not in ("slices", "nearest"):
        raise ValueError(bad("weights", "must be 'slices' or 'nearest'", repr(weights)))
    spread = math.sqrt(2 * (HARD_ALPHA if alpha is None else _checked(alpha, conv.weight.dtype)))
    with torch.no_grad(), torch.device("cpu"):  # real values, even if the default device is meta
        centres = torch.tensor(taps(conv))
        held = centres.to(conv.weight.dtype)
        if not torch.equal(held.long(), centres):
            requirement, fix = "must have a dtype that can represent its shifts", "Convert it with conv.float() first."
            raise ValueError(bad("conv", requirement, str(conv.weight.dtype), fix))
        encoding = Quadratic(*centres.shape)
        encoding.requires_grad_(alpha is not None)
        layer = layer_for(conv, encoding)
        encoding.centres.copy_(held)
        encoding.spread.fill_(spread)
        if weights == "nearest" and not conv.weight.is_meta:
            layer.get_parameter("weight").copy_(nearest_weights(layer, conv))
    return layer


def equation_9(conv: Forward, *, alpha: float = 46.0) -> SelfAttention:
    """Convert a convolution to attention as in the paper's proof: equation (8) with the parameters of equation (9).

        v_h = -alpha (1, -2 Delta_h),   r_delta = (|delta|^2, delta),   W_qry = W_key = 0,   W^_key = I

    Every score is then `-alpha (|delta - Delta_h|^2 - |Delta_h|^2)`. All four terms of equation (8) are computed.

    Args:
        conv: nn.Conv1d, nn.Conv2d or nn.Conv3d. Queries must be in the image, as equation (8) uses their content.
        alpha: Sharpness of the heads, in 1 / position^2; 46 in the paper.

    Raises:
        TypeError, ValueError: As in `from_conv`, if the dtype cannot represent v_h, or if `conv` is a transposed
            convolution.

    Example:
        >>> layer = equation_9(torch.nn.Conv1d(2, 2, kernel_size=3, padding=1))
        >>> layer.encoding.position_bias[0].tolist()  # the head at shift -1: -46 (1, 2)
        [-46.0, -92.0]
    """
    check_convolution(conv)
    if not isinstance(conv, Forward):
        raise TypeError(bad("conv", "must be an nn.Conv1d, nn.Conv2d or nn.Conv3d", type(conv).__name__))
    _checked(alpha, conv.weight.dtype)
    with torch.no_grad(), torch.device("cpu"):
        centres = torch.tensor(taps(conv), dtype=torch.float64)
        heads, dims = centres.shape
        vectors = alpha * torch.cat((-torch.ones(heads, 1), 2 * centres), 1)
        held = vectors.to(conv.weight.dtype).double()
        if not bool(((held[:, 1:] / (-2 * held[:, :1]) - centres).abs() < 0.25).all()):  # False for NaN
            requirement, fix = "must have a dtype that can represent v_h", "Convert it with conv.float() first."
            raise ValueError(bad("conv", requirement, str(conv.weight.dtype), fix))
        features, channels = QuadraticFeatures(dims), dims + 1  # D_k = D_p
        encoding = Relative(conv.in_channels, heads, dims, head_channels=channels, features=features, scaled=False)
        layer = layer_for(conv, encoding)
        for parameter in encoding.parameters():
            parameter.zero_()
        encoding.get_parameter("position_key.weight").copy_(torch.eye(channels).repeat(heads, 1))
        encoding.get_parameter("position_bias").copy_(vectors)
    return layer


def layer_for(conv: Convolution, encoding: Encoding, weight: Tensor | None = None) -> SelfAttention:
    """Return a layer with an encoding's heads and a convolution's geometry, bias, training mode, device and dtype.

    `weight` has one matrix per head, (h, c / groups, d); None for the convolution's matrices, with one head per tap.
    """
    if isinstance(conv, Forward):
        geometry: dict[str, Any] = {"border": BORDERS[conv.padding_mode]}
    else:
        geometry = {"border": "zero", "transposed": True, "output_padding": conv.output_padding}
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
    with torch.no_grad():
        # Keep the convolution's memory layout, so that hard heads run as a convolution without a copy.
        weight = head_weights(conv) if weight is None else weight.to(conv.weight)
        layer.weight = nn.Parameter(weight.detach().clone())
        if layer.bias is not None and conv.bias is not None:
            layer.bias.copy_(conv.bias)
    return layer.train(conv.training)


def to_conv(
    layer: SelfAttention,
    kernel_size: int | Sequence[int] | None = None,
    *,
    x: Float[Tensor, "b c *sizes"] | None = None,
) -> Convolution:
    """Convert a layer with hard heads to the equivalent convolution, or any layer to the nearest one of a given size.

    A layer from `from_conv` converts back to its convolution, with bit-identical weights. For hard heads without a
    window, the kernel is the smallest one that is centred on the query and contains all shifts of the heads.

    Args:
        layer: Any attention layer.
        kernel_size: Kernel size of the nearest convolution, one number or one per axis, centred like the layer's window
            or, without a window, on the query. None for the convolution that is equivalent to hard heads.
        x: Images; required with a kernel size. Their content is used only if attention depends on it.

    Returns:
        The convolution, with the layer's stride, groups, bias, dtype and training mode. Its padding mode corresponds to
        the border rule; `renormalise` becomes `replicate`. With `kernel_size`, it minimises `conversion_error`.

    Raises:
        TypeError: If `layer` is not an attention layer, or `x` is not a dense floating-point tensor.
        ValueError: If the layer is on the meta device; without `kernel_size`, if a head is soft, is not at a tap of the
            window or attends beyond the padding; with `kernel_size`, if `x` is missing or has the wrong number of
            axes, or if the kernel is too large or cannot be centred.

    Example:
        >>> conv = torch.nn.Conv2d(2, 3, kernel_size=3, padding=1, padding_mode="reflect")
        >>> bool((to_conv(from_conv(conv)).weight == conv.weight).all())
        True
    """
    if not isinstance(layer, SelfAttention):
        raise TypeError(bad("layer", "must be an attention layer", type(layer).__name__))
    if next(layer.parameters()).is_meta:
        raise ValueError(bad("layer", "must have materialised weights", "a layer on the meta device"))
    with torch.no_grad():
        conv, weight = _exact(layer) if kernel_size is None else _nearest(layer, kernel_size, x)
        grouped_weights(conv).copy_(weight.unflatten(2, (conv.groups, -1)))
        if conv.bias is not None and layer.bias is not None:
            conv.bias.copy_(layer.bias)
    return conv


def conversion_error(layer: SelfAttention, conv: Convolution, x: Float[Tensor, "b c *sizes"]) -> Residuals:
    """Compute the root-mean-square error of a convolution for white-noise input, relative to a layer's output.

        sqrt( sum_q || sum_j E_q[j] V_j - sum_h A_q[h] W_h ||^2 / sum_q || sum_h A_q[h] W_h ||^2 )

    V_j is the kernel's matrix at tap j; see `can_express` for A_q and E_q. Biases are ignored. The content of the
    images `x` is used only if attention depends on it. (`imitation_error` is relative to the convolution's output.)

    Raises:
        ValueError: If channels, groups, strides or output sizes of the layer and the convolution do not match.
    """
    return compare_outputs(layer, conv, x, None)[0]


def _exact(layer: SelfAttention) -> tuple[Convolution, Float[Tensor, "j i d"]]:
    """Return the convolution of hard heads, whose weights are not yet set, and the matrix of each tap."""
    shifts = layer.hard_shifts()
    if shifts is None:
        fix = "`to_conv` with a kernel size and images computes the nearest convolution."
        raise ValueError(bad("layer", "must have hard heads to be equivalent to a convolution", "soft heads", fix))
    sizes = layer.kernel_size
    conv = _centred(layer, shifts) if sizes is None else _convolution(layer, sizes, layer.dilation, layer.border)
    known, weight = taps(conv), merged_weight(layer)
    if strays := [shift for shift in shifts if shift not in set(known)]:
        fix = "Pass a larger kernel size and images."
        raise ValueError(bad("layer", "must have all heads at taps of its window", f"heads at {strays[:3]}", fix))
    if shifts != known:  # a different order, several heads at one tap, or taps without a head
        places = torch.tensor([known.index(shift) for shift in shifts], device=weight.device)
        weight = weight.new_zeros((len(known), *weight.shape[1:])).index_add(0, places, weight)
    return conv, weight


def _nearest(
    layer: SelfAttention, kernel_size: int | Sequence[int], x: Tensor | None
) -> tuple[Convolution, Float[Tensor, "j i d"]]:
    """Return the nearest convolution, whose weights are not yet set, and the matrices V."""
    if x is None:
        fix = "Pass images, or zeros of their shape if attention does not depend on content."
        raise ValueError(bad("x", "must be given if kernel_size is given", None, fix))
    check_dense(x, "x", least=1, dims=layer.dims)
    sizes = per_axis("kernel_size", kernel_size, layer.dims, least=1)
    most = tuple(2 * (size + sum(pad)) - 1 for size, pad in zip(x.shape[2:], layer.padding, strict=True))
    if any(size > limit for size, limit in zip(sizes, most, strict=True)):
        raise ValueError(bad("kernel_size", f"must be at most {most} for these images and padding", sizes))
    conv = _convolution(layer, sizes, layer.dilation if layer.window else (1,) * layer.dims, layer.border)
    spans = Spans(layer.operator(x), taps(conv), conv.padding_mode)
    pairs = torch.zeros((len(spans.shifts), len(spans.shifts)), dtype=torch.float64, device=x.device)
    shared = pairs.new_zeros((len(spans.shifts), layer.heads))
    for queries in spans.blocks():
        keys = spans.keys(queries)  # (r, j)
        shown = keys >= 0
        pairs += ((keys[:, :, None] == keys[:, None, :]) & shown[:, :, None]).sum(0)
        rows = spans.operator.rows(queries).double().mean(0)  # (h, r, m)
        shared += (rows.gather(2, keys.clamp_min(0).expand(layer.heads, -1, -1)) * shown).sum(1).mT
    psi = torch.linalg.pinv(pairs, hermitian=True) @ shared
    return conv, torch.einsum("jh,hid->jid", psi, merged_weight(layer).to(psi))


def _centred(layer: SelfAttention, shifts: Sequence[Sequence[int]]) -> Convolution:
    """Return a convolution with the smallest query-centred kernel that contains all shifts; the layer has no window."""
    along = list(zip(*shifts, strict=True))  # per axis, the shift of each head
    reach = [max(map(abs, axis)) for axis in along]
    steps = [max(math.gcd(*axis), 1) for axis in along]
    sizes = tuple(2 * far // step + 1 for far, step in zip(reach, steps, strict=True))
    outside = []  # per side of the image towards which heads attend: how far they reach beyond it, and its padding
    for axis, (before, after) in zip(along, layer.padding, strict=True):
        outside += [(far, pad) for far, pad in ((-min(axis), before), (max(axis), after)) if far > 0]
    border = layer.border
    zeros = border == "zero" and all(pad > 0 for _, pad in outside)  # the nearest lattice point is a padding zero
    if border not in ("renormalise", "replicate") and not zeros and any(far > pad for far, pad in outside):
        if border != "zero" or any(pad > 0 for _, pad in outside):
            got = f"heads up to {max(outside)[0]} positions outside, padding {layer.padding} and border {border!r}"
            raise ValueError(bad("layer", "must not attend beyond its padding", got, "Increase the padding."))
        border = "renormalise"  # the nearest lattice point is a key, as without padding
    return _convolution(layer, sizes, steps, border)


def _convolution(layer: SelfAttention, sizes: Sequence[int], steps: Sequence[int], border: Border) -> Convolution:
    """Return a convolution of these kernel sizes and dilations, centred like the layer's window or on the query."""
    old = layer.kernel_size or (1,) * layer.dims
    more = [step * (size - before) for size, before, step in zip(sizes, old, steps, strict=True)]
    if any(extent % 2 for extent in more):
        fix = "Increase or reduce it by an even number on each axis."
        raise ValueError(bad("kernel_size", f"must have the same centre as kernel size {old}", sizes, fix))
    known = layer.padding if layer.window else ((0, 0),) * layer.dims
    pads = tuple((first + extent // 2, last + extent // 2) for (first, last), extent in zip(known, more, strict=True))
    same = not layer.transposed and set(layer.stride) == {1} and pads == padding_of("same", sizes, steps)
    plain = all(first == last and first >= 0 for first, last in pads)
    if not plain and not same:
        raise ValueError(bad("layer", "must have equal, non-negative padding before and after", pads))
    like = next(layer.parameters())
    options: dict[str, Any] = {"stride": layer.stride, "dilation": steps, "groups": layer.groups}
    options |= {"padding": tuple(first for first, _ in pads) if plain else "same"}
    options |= {"bias": layer.bias is not None, "device": like.device, "dtype": like.dtype}
    options |= {"output_padding": layer.output_padding} if layer.transposed else {"padding_mode": _MODES[border]}
    kind: Any = (TRANSPOSED if layer.transposed else FORWARD)[layer.dims]
    return cast(Convolution, kind(layer.in_channels, layer.out_channels, sizes, **options).train(layer.training))


def _checked(alpha: float, dtype: torch.dtype) -> float:
    """Return `alpha` if sqrt(2 alpha) is finite in the layer's dtype, and its square in the dtype of scores."""
    wanted = math.sqrt(2 * alpha) if is_real(alpha) and alpha > 0 else 0.0
    spread = torch.tensor(wanted, dtype=torch.float64, device="cpu").to(dtype)
    squared = float(spread.to(score_dtype(dtype)).square())
    if not 0 < squared < math.inf:
        raise ValueError(bad("alpha", f"must be positive and finite in {dtype}", repr(alpha)))
    return alpha
