"""Attention as a convolution: exactly for hard heads, in the least-squares sense for others.

Hard heads attend one shift each, so their layer is a convolution whose kernel holds W_h at head h's shift. The heads of
`from_conv` give back the convolution that they were made from, weights bit for bit; other hard layers get the smallest
kernel centred on the query that holds all of their shifts.

For other heads `to_conv` solves, over all queries of an image of a given size,

    minimise over V   sum_q || sum_j E_q[j] V_j - sum_h A_q[h] W_h ||^2            (E_q: the taps' keys, A_q: the rows)

which is the best convolution for white input. W_h enters linearly, so that V_j = sum_h Psi[j, h] W_h with one Psi for
all channels, the solution of (sum_q E_q E_q^T) Psi = sum_q E_q A_q^T. Only these sums are kept, never a map.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from attnconv._util.errors import bad
from attnconv._util.input_checks import check_dense
from attnconv.grid import Border, per_axis
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators.base import AttentionOperator
from attnconv.theory.best_weights import operator_beside
from attnconv.theory.conv_taps import (
    BORDERS,
    FORWARD,
    TRANSPOSED,
    Convolution,
    Forward,
    head_weights,
    kernel,
    tap_keys,
    taps,
)
from attnconv.theory.error_bounds import merged_weight
from attnconv.theory.lemma3_phi import Reduction, Residuals, relative

_MODES = {border: mode for mode, border in BORDERS.items()} | {"renormalise": "replicate"}
_BLOCK = 2**23  # attention probabilities held at once


def to_conv(
    layer: SelfAttention,
    kernel_size: int | Sequence[int] | None = None,
    *,
    x: Float[Tensor, "b c *sizes"] | None = None,
) -> Convolution:
    """The convolution that an attention layer computes or, with a kernel size, the one nearest to it.

    Args:
        layer: Any attention layer.
        kernel_size: None for the exact convolution of hard heads; else the kernel, one number or one per axis, in which
            the best convolution is sought. It stays centred where the layer's window is, or on the query.
        x: With a kernel size, images over which the two are compared: their size, and their content where the
            probabilities depend on it.

    Returns:
        nn.Conv1d, nn.Conv2d, nn.Conv3d or a transpose, with the layer's stride, groups, bias, dtype and mode; its
        padding mode is the border rule, `replicate` under `renormalise`. See `conversion_error`.

    Raises:
        TypeError: layer is no attention layer, or x no dense tensor of floating point numbers.
        ValueError: The layer is on the meta device. Without a kernel size: heads that are soft, that left the taps of
            their window, or that look beyond a padding that no convolution continues. With one: x is missing or of
            other axes, or the kernel has no centre or taps that no query sees.

    Example:
        >>> import torch
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
        raise ValueError(bad("x", "must say on which images the convolution is to be near", None, fix))
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
    """How far a convolution is from the layer that it stands for, for white input on images of x's size.

        sqrt( sum_q || sum_j E_q[j] V_j - sum_h A_q[h] W_h ||^2 / sum_q || sum_h A_q[h] W_h ||^2 )

    That is the root-mean-square difference of the outputs over that of the layer's outputs, biases left out; over all
    images of x where attention depends on content. (`imitation_error` measures against the convolution.)

    Raises:
        ValueError: The two have other channels, groups, strides or numbers of outputs.
    """
    with torch.no_grad():
        reduction = Reduction.of(operator_beside(layer, conv, x, None), taps(conv), conv.padding_mode)
        ours = merged_weight(layer).to(reduction.everywhere).flatten(1)  # (h, i d)
        theirs = head_weights(conv).to(reduction.everywhere).flatten(1)  # (j, i d)
        return reduction.over(lambda place: relative(place[:, layer.heads :] @ theirs, place[:, : layer.heads] @ ours))


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
    known, steps, base = layer.padding, layer.dilation, layer.kernel_size
    if base is None:
        known, steps, base = ((0, 0),) * layer.dims, (1,) * layer.dims, (1,) * layer.dims
    if any((size - old) % 2 and step % 2 for size, old, step in zip(sizes, base, steps, strict=True)):
        raise ValueError(bad("kernel_size", f"must differ from {base} by even numbers, to keep its centre", sizes))
    wider = [step * (size - old) // 2 for size, old, step in zip(sizes, base, steps, strict=True)]
    pads = [(before + more, after + more) for (before, after), more in zip(known, wider, strict=True)]
    total = [step * (size - 1) for size, step in zip(sizes, steps, strict=True)]
    same = not layer.transposed and set(layer.stride) == {1}
    if all(first == last and first >= 0 for first, last in pads):
        padding: Any = tuple(first for first, _ in pads)
    elif same and pads == [(extent // 2, extent - extent // 2) for extent in total]:
        padding = "same"
    else:
        raise ValueError(bad("layer", "must have a padding that nn.Conv2d can have", f"(before, after) = {pads}"))
    return _make(layer, sizes, padding, steps)


def _centred(layer: SelfAttention, shifts: Sequence[Sequence[int]]) -> Convolution:
    """The smallest kernel centred on the query that holds all shifts of a free layer."""
    border = _continued(layer, shifts)
    reach = [max(abs(shift[dim]) for shift in shifts) for dim in range(layer.dims)]
    steps = [max(math.gcd(*(shift[dim] for shift in shifts)), 1) for dim in range(layer.dims)]
    sizes = tuple(2 * far // step + 1 for far, step in zip(reach, steps, strict=True))
    return _make(layer, sizes, tuple(reach), tuple(steps), border)


def _continued(layer: SelfAttention, shifts: Sequence[Sequence[int]]) -> Border:
    """The border rule that a free layer's hard heads follow, as far out as they look."""
    sides = [(side, dim) for side in (0, 1) for dim in range(layer.dims)]
    reach = {(side, dim): max((2 * side - 1) * shift[dim] for shift in shifts) for side, dim in sides}
    outside = {place: far for place, far in reach.items() if far > 0}
    pads = {(side, dim): layer.padding[dim][side] for side, dim in sides}
    if layer.border in ("renormalise", "replicate") or all(far <= pads[place] for place, far in outside.items()):
        return layer.border
    if layer.border == "zero":
        if all(pads[place] > 0 for place in outside):  # the nearest lattice point is padding: it holds a zero as well
            return "zero"
        if all(pads[place] == 0 for place in outside):  # it is a pixel: as without padding
            return "renormalise"
    got = f"heads up to {max(outside.values())} pixels out with padding {layer.padding} and border {layer.border!r}"
    raise ValueError(bad("layer", "must not look beyond its padding", got, "Give it more padding."))


def _make(
    layer: SelfAttention,
    sizes: tuple[int, ...],
    padding: Any,
    dilation: tuple[int, ...],
    border: Border | None = None,
) -> Convolution:
    parameter = next(layer.parameters())
    mode = _MODES[layer.border if border is None else border]
    more: dict[str, Any] = {"output_padding": layer.output_padding} if layer.transposed else {"padding_mode": mode}
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
        device=parameter.device,
        dtype=parameter.dtype,
        **more,
    )
    return cast(Convolution, conv.train(layer.training))


def _fill(conv: Convolution, layer: SelfAttention, weight: Float[Tensor, "j i d"]) -> None:
    sizes = tuple(conv.kernel_size)
    conv.weight.copy_(kernel(weight, sizes, conv.groups, transposed=not isinstance(conv, Forward)))
    if conv.bias is not None and layer.bias is not None:
        conv.bias.copy_(layer.bias)


def _nearest(layer: SelfAttention, shifts: Sequence[Sequence[int]], x: Tensor) -> Float[Tensor, "j h"]:
    """Psi: the taps that come nearest to each head."""
    grid = layer.grid(x.shape[2:])
    pairs = torch.zeros((len(shifts), len(shifts)), dtype=torch.float64, device=x.device)
    shared = torch.zeros((len(shifts), layer.heads), dtype=torch.float64, device=x.device)
    for queries, rows in _blocks(layer.operator(x)):
        keys = tap_keys(grid, shifts, queries)  # (r, j)
        shown = keys >= 0
        same = (keys[:, :, None] == keys[:, None, :]) & shown[:, :, None]
        pairs += same.sum(0)
        mean = rows.mean(0)  # (r, h, m)
        seen = mean.gather(2, keys.clamp_min(0)[:, None].expand(-1, layer.heads, -1)) * shown[:, None]  # (r, h, j)
        shared += seen.sum(0).mT
    return torch.linalg.pinv(pairs, hermitian=True) @ shared


def _blocks(operator: AttentionOperator) -> Iterator[tuple[Tensor, Tensor]]:
    """Queries (r,) and their rows (b, r, h, m) in float64, a block at a time."""
    size = max(_BLOCK // (operator.batch * operator.heads * operator.grid.key_count), 1)
    for queries in torch.arange(operator.grid.query_count, device=operator.device).split(size):
        yield queries, operator.rows(queries).double().transpose(1, 2)
