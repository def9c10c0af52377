"""Convert attention to a convolution: exactly for hard heads, in the least-squares sense for others.

With A_q the attention rows and E_q the keys of the taps, the best convolution for white input minimises over V

    sum_q || sum_j E_q[j] V_j - sum_h A_q[h] W_h ||^2,

so V_j = sum_h Psi[j, h] W_h with one Psi for all channels: (sum_q E_q E_q^T) Psi = sum_q E_q A_q^T.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from attnconv._util.errors import bad
from attnconv._util.value_checks import check_dense
from attnconv.grid import Border, per_axis
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators.base import all_queries
from attnconv.theory.best_weights import compare_outputs
from attnconv.theory.conv_taps import (
    BORDERS,
    FORWARD,
    TRANSPOSED,
    Convolution,
    Forward,
    kernel,
    tap_keys,
    taps,
)
from attnconv.theory.error_bounds import merged_weight
from attnconv.theory.lemma3_phi import Residuals, relative

_MODES = {border: mode for mode, border in BORDERS.items()} | {"renormalise": "replicate"}
_BLOCK = 2**23  # attention probabilities held at once


def to_conv(
    layer: SelfAttention,
    kernel_size: int | Sequence[int] | None = None,
    *,
    x: Float[Tensor, "b c *sizes"] | None = None,
) -> Convolution:
    """Return the convolution that an attention layer computes or, with a kernel size, the nearest one.

    Layers of `from_conv` give back their convolution, weights bit for bit; other layers of hard heads get the smallest
    kernel, centred on the query, that holds all of their shifts.

    Args:
        layer: Any attention layer.
        kernel_size: None for the exact convolution of hard heads; else the kernel of the nearest one, a number or one
            per axis, centred like the layer's window or on the query.
        x: With a kernel size, images: their size, and their content if the probabilities depend on it.

    Returns:
        nn.Conv1d, nn.Conv2d, nn.Conv3d or a transpose, with the layer's stride, groups, bias, dtype and mode; its
        padding mode is the border rule, `replicate` under `renormalise`. See `conversion_error`.

    Raises:
        TypeError: layer is no attention layer, or x no dense tensor of floating point numbers.
        ValueError: The layer is on the meta device; its heads are soft, not at taps of their window, or attend beyond
            their padding; or with a kernel size, x is missing or has other axes, or the kernel has no centre or taps
            that no query sees.

    Example:
        >>> from attnconv import from_conv
        >>> conv = torch.nn.Conv2d(2, 3, kernel_size=3, padding=1, padding_mode="reflect")
        >>> bool((to_conv(from_conv(conv)).weight == conv.weight).all())
        True
    """
    if not isinstance(layer, SelfAttention):
        raise TypeError(bad("layer", "must be an attention layer", type(layer).__name__))
    if next(layer.parameters()).is_meta:
        raise ValueError(bad("layer", "must have its weights", "a layer on the meta device"))
    if kernel_size is None:
        return _exact(layer)
    if x is None:
        fix = "Pass images, or zeros of their shape where attention does not depend on content."
        raise ValueError(bad("x", "must be given with a kernel size", None, fix))
    check_dense(x, "x", least=1, dims=layer.dims)
    sizes = per_axis("kernel_size", kernel_size, layer.dims, least=1)
    most = tuple(2 * (size + sum(pad)) - 1 for size, pad in zip(x.shape[2:], layer.padding, strict=True))
    if any(size > limit for size, limit in zip(sizes, most, strict=True)):
        requirement = f"must be at most {most} on the padded images: no query sees further"
        raise ValueError(bad("kernel_size", requirement, sizes))
    conv = _empty(layer, sizes)
    with torch.no_grad():
        solution = _nearest(layer, taps(conv), x)
        weight = torch.einsum("jh,hid->jid", solution, merged_weight(layer).to(solution))
        _fill(conv, layer, weight)
    return conv


def conversion_error(layer: SelfAttention, conv: Convolution, x: Float[Tensor, "b c *sizes"]) -> Residuals:
    """Measure the distance of a convolution from a layer, for white input on images of x's size.

        sqrt( sum_q || sum_j E_q[j] V_j - sum_h A_q[h] W_h ||^2 / sum_q || sum_h A_q[h] W_h ||^2 )

    That is the root-mean-square difference of the outputs over that of the layer's outputs, without biases; over all
    images of x if attention depends on content. (`imitation_error` is relative to the convolution.)

    Raises:
        ValueError: The two have other channels, groups, strides or numbers of outputs.
    """
    return compare_outputs(layer, conv, x, None, lambda ours, theirs: relative(theirs, ours))


def _exact(layer: SelfAttention) -> Convolution:
    shifts = layer.hard_shifts()
    if shifts is None:
        fix = "Pass a kernel size and images for the nearest convolution."
        raise ValueError(bad("layer", "must have hard heads to be a convolution", "soft heads", fix))
    conv = _centred(layer, shifts) if layer.kernel_size is None else _empty(layer, layer.kernel_size)
    known = taps(conv)
    if strays := [shift for shift in shifts if shift not in set(known)]:
        fix = "Pass a larger kernel size and images."
        raise ValueError(bad("layer", "must have every head at a tap of its window", f"heads at {strays[:3]}", fix))
    with torch.no_grad():
        weight = merged_weight(layer)
        if shifts != known:  # other orders, heads that share a tap, taps without a head
            places = torch.tensor([known.index(shift) for shift in shifts], device=weight.device)
            weight = weight.new_zeros((len(known), *weight.shape[1:])).index_add(0, places, weight)
        _fill(conv, layer, weight)
    return conv


def _empty(layer: SelfAttention, sizes: tuple[int, ...]) -> Convolution:
    """A convolution with the layer's geometry and a kernel of these sizes, centred as the layer's window is."""
    old, known, steps = layer.kernel_size, layer.padding, layer.dilation
    if old is None:
        old, known, steps = (1,) * layer.dims, ((0, 0),) * layer.dims, (1,) * layer.dims
    more = [step * (size - before) for size, before, step in zip(sizes, old, steps, strict=True)]
    if any(extent % 2 for extent in more):
        raise ValueError(bad("kernel_size", f"must differ from {old} by even numbers, to keep its centre", sizes))
    pads = [(first + extent // 2, last + extent // 2) for (first, last), extent in zip(known, more, strict=True)]
    total = [step * (size - 1) for size, step in zip(sizes, steps, strict=True)]
    if all(first == last and first >= 0 for first, last in pads):
        return _make(layer, sizes, tuple(first for first, _ in pads), steps)
    if (
        not layer.transposed
        and set(layer.stride) == {1}
        and pads == [(extent // 2, extent - extent // 2) for extent in total]
    ):
        return _make(layer, sizes, "same", steps)
    raise ValueError(bad("layer", "must have a padding that nn.Conv2d can have", f"(before, after) = {pads}"))


def _centred(layer: SelfAttention, shifts: Sequence[Sequence[int]]) -> Convolution:
    """The smallest kernel centred on the query that holds all shifts of a free layer."""
    border = _continued(layer, shifts)
    reach = [max(abs(shift[dim]) for shift in shifts) for dim in range(layer.dims)]
    steps = [max(math.gcd(*(shift[dim] for shift in shifts)), 1) for dim in range(layer.dims)]
    sizes = tuple(2 * far // step + 1 for far, step in zip(reach, steps, strict=True))
    return _make(layer, sizes, tuple(reach), tuple(steps), border)


def _continued(layer: SelfAttention, shifts: Sequence[Sequence[int]]) -> Border:
    """The border rule that a free layer's hard heads follow outside the image."""
    outside = []  # pixels beyond the image and padding there, of each side that a head attends
    for dim, (before, after) in enumerate(layer.padding):
        along = [shift[dim] for shift in shifts]
        outside += [(far, pad) for far, pad in ((-min(along), before), (max(along), after)) if far > 0]
    if layer.border in ("renormalise", "replicate") or all(far <= pad for far, pad in outside):
        return layer.border
    if layer.border == "zero" and all(pad > 0 for _, pad in outside):
        return "zero"  # the nearest lattice point is padding: it holds a zero as well
    if layer.border == "zero" and all(pad == 0 for _, pad in outside):
        return "renormalise"  # it is a pixel: as without padding
    got = f"heads up to {max(outside)[0]} pixels out with padding {layer.padding} and border {layer.border!r}"
    raise ValueError(bad("layer", "must not attend beyond its padding", got, "Give it more padding."))


def _make(
    layer: SelfAttention,
    sizes: tuple[int, ...],
    padding: Any,
    dilation: tuple[int, ...],
    border: Border | None = None,
) -> Convolution:
    weight = next(layer.parameters())
    options: dict[str, Any] = {"output_padding": layer.output_padding}
    if not layer.transposed:
        options = {"padding_mode": _MODES[layer.border if border is None else border]}
    kind: Any = (TRANSPOSED if layer.transposed else FORWARD)[layer.dims]
    conv = kind(
        layer.in_channels,
        layer.out_channels,
        sizes,
        stride=layer.stride,
        padding=padding,
        dilation=dilation,
        groups=layer.groups,
        bias=layer.bias is not None,
        device=weight.device,
        dtype=weight.dtype,
        **options,
    )
    return cast(Convolution, conv.train(layer.training))


def _fill(conv: Convolution, layer: SelfAttention, weight: Float[Tensor, "j i d"]) -> None:
    sizes = tuple(conv.kernel_size)
    conv.weight.copy_(kernel(weight, sizes, conv.groups, transposed=not isinstance(conv, Forward)))
    if conv.bias is not None and layer.bias is not None:
        conv.bias.copy_(layer.bias)


def _nearest(layer: SelfAttention, shifts: Sequence[Sequence[int]], x: Tensor) -> Float[Tensor, "j h"]:
    """Psi."""
    operator = layer.operator(x)
    pairs = torch.zeros((len(shifts), len(shifts)), dtype=torch.float64, device=x.device)
    shared = torch.zeros((len(shifts), layer.heads), dtype=torch.float64, device=x.device)
    size = max(_BLOCK // (operator.batch * operator.heads * operator.grid.key_count), 1)
    for queries in all_queries(operator.grid, operator.device).split(size):
        keys = tap_keys(operator.grid, shifts, queries)  # (r, j)
        shown = keys >= 0
        pairs += ((keys[:, :, None] == keys[:, None, :]) & shown[:, :, None]).sum(0)
        rows = operator.rows(queries).double().mean(0)  # (h, r, m)
        shared += (rows.gather(2, keys.clamp_min(0).expand(layer.heads, -1, -1)) * shown).sum(1).mT
    return torch.linalg.pinv(pairs, hermitian=True) @ shared
