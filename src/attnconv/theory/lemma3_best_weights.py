"""The weights with which given attention imitates a convolution best, for white input.

    W_h = sum_j Phi[j, h] W_j   minimises   sum_q || sum_j E_q[j] W_j - sum_h A_q[h] W_h ||^2

with the Phi of `can_express`.
"""

import copy
import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.grid import Grid
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators.base import AttentionOperator
from attnconv.theory.conv_taps import (
    Convolution,
    Forward,
    check_convolution,
    extents,
    head_weights,
    paddings,
    taps,
)
from attnconv.theory.error_bounds import merged_weight
from attnconv.theory.expressibility import layer_operator
from attnconv.theory.lemma3_phi import Reduction, Residuals, fit, matrices, rank_tolerance, relative, solve

_FARTHEST = 32  # pixels beyond the taps at most, however blunt the heads


def imitate(
    layer: SelfAttention,
    conv: Convolution,
    *,
    x: Float[Tensor, "b c *sizes"] | None = None,
    sizes: Sequence[int] | None = None,
    where: Literal["all", "inside"] = "all",
) -> SelfAttention:
    """A copy of a layer whose weights and bias imitate a convolution as well as its attention allows.

    Best in the least-squares sense for white input on images of the size given, and exact where `can_express` says so.
    `imitation_error(copy, conv, sizes=...)` measures the rest.

    Args:
        layer: A layer with merged weights and the convolution's channels, stride and number of outputs, and a bias if
            the convolution has one.
        conv: nn.Conv1d, nn.Conv2d or nn.Conv3d (their transposes for a transposed layer) with any padding, padding
            mode and dilation. Its groups are the layer's, or any number if the layer has one group.
        x: Images: their size, and their content where attention depends on it; all count equally.
        sizes: Pixels per axis, in place of x where attention depends on positions only.
        where: The queries that count: `all`, or those `inside`, all of whose taps lie in the image, for weights that
            serve larger images.

    Returns:
        A deep copy with the layer's own heads, dtype and mode.

    Raises:
        TypeError: conv is no convolution of these kinds, or is lazy, quantised or complex.
        ValueError: The layer has factored weights; channels, groups, stride, bias or number of outputs do not fit;
            content is needed and missing; or `inside` is asked for where no query is.

    Example:
        >>> import torch
        >>> from attnconv import SelfAttention1d
        >>> layer, conv = (
        ...     SelfAttention1d(2, 3, heads=5, border="zero", padding=1),
        ...     torch.nn.Conv1d(2, 3, 3, padding=1),
        ... )
        >>> with torch.no_grad():
        ...     _ = layer.encoding.centres.copy_(torch.tensor([[-1.0], [-0.5], [0.0], [0.5], [1.0]]))
        ...     _ = layer.encoding.spread.fill_(12.0)  # hard, where a centre is a whole number
        >>> x = torch.randn(1, 2, 9)
        >>> bool((imitate(layer, conv, sizes=(9,))(x) - conv(x)).abs().max() < 1e-5)
        True
    """
    if where not in ("all", "inside"):
        raise ValueError(bad("where", "must be 'all' or 'inside'", repr(where)))
    if layer.weight is None:
        fix = "Make the layer without head_channels."
        raise ValueError(bad("layer", "must have merged weights", "factored ones", fix))
    with torch.no_grad():
        operator = _operator_beside(layer, conv, x, sizes)
        if conv.bias is not None and layer.bias is None:
            raise ValueError(bad("layer", "must have a bias, as the convolution has", None, "Make it with bias=True."))
        everywhere, within, _ = fit(operator, taps(conv), conv.padding_mode)
        best = everywhere if where == "all" else within
        if best is None:
            got = f"none on an image of {operator.grid.sizes}"
            raise ValueError(bad("where", "'inside' needs a query all of whose taps lie in the image", got))
        matrices = torch.einsum("jh,jid->hid", best.phi, _matrices(conv, layer.groups).to(best.phi))
        made = copy.deepcopy(layer)
        assert made.weight is not None
        made.weight.copy_(matrices)
        if made.bias is not None:
            made.bias.copy_(torch.zeros_like(made.bias) if conv.bias is None else conv.bias)
    return made


def imitation_error(
    layer: SelfAttention,
    conv: Convolution,
    *,
    x: Float[Tensor, "b c *sizes"] | None = None,
    sizes: Sequence[int] | None = None,
) -> Residuals:
    """Root-mean-square difference of a layer and a convolution for white input, relative to the convolution's output.

        sqrt( sum_q || sum_h A_q[h] W_h - sum_j E_q[j] W_j ||^2 / sum_q || sum_j E_q[j] W_j ||^2 )

    Biases are left out. `imitate` minimises it. (`conversion_error` is relative to the layer.)

    Args:
        layer: A layer with the convolution's channels, stride and number of outputs; its weights may be factored.
        conv: As for `imitate`.
        x: Images: their size, and their content where attention depends on it.
        sizes: Pixels per axis, in place of x where attention depends on positions only.

    Returns:
        The error inside (None where no query has all of its taps in the image), at the border, and everywhere.

    Raises:
        TypeError: conv is no convolution.
        ValueError: Channels, groups, stride or number of outputs do not fit, or content is needed and missing.

    Example:
        >>> import torch
        >>> from attnconv import from_conv
        >>> conv = torch.nn.Conv2d(1, 1, 3, padding=1, dtype=torch.float64)
        >>> imitation_error(from_conv(conv), conv, sizes=(5, 5)).everywhere < 1e-14
        True
    """
    return compare_outputs(layer, conv, x, sizes, relative)


def nearest_weights(layer: SelfAttention, conv: Convolution) -> Float[Tensor, "h i d"]:
    """W_h = sum_j Phi[j, h] W_j with the best Phi far from the border, for Gaussian heads of the same geometry.

    There all queries have the same Phi: a small least-squares problem over the shifts that heads and taps reach.
    """
    shifts = taps(conv)
    encoding = layer.encoding
    heads = encoding.gaussians()
    assert heads is not None
    with torch.no_grad():
        blunt = float(torch.linalg.eigvalsh(heads.precision).min()) / 2
        beyond = min(math.ceil(math.sqrt(-math.log(1e-8) / blunt)), _FARTHEST)
        sizes = [_size(layer, dim, max(abs(shift[dim]) for shift in shifts) + beyond) for dim in range(layer.dims)]
        grid = layer.grid(sizes)
        pixels = next(layer.parameters()).new_zeros(1, *sizes, layer.in_channels)
        operator = encoding.operator(grid, pixels)
        stack = matrices(operator, shifts, "zeros", _central(grid)).flatten(0, 2)
        phi, _ = solve(stack, layer.heads, rank_tolerance(operator))
        weight = torch.einsum("jh,jid->hid", phi, head_weights(conv).to(phi))
        return weight.to(conv.weight)


def compare_outputs(
    layer: SelfAttention,
    conv: Convolution,
    x: Tensor | None,
    sizes: Sequence[int] | None,
    measure: Callable[[Tensor, Tensor], Tensor],
) -> Residuals:
    """Measure R factors of the outputs of a layer and of a convolution for white input; see `Reduction.over`."""
    with torch.no_grad():
        reduction = Reduction.of(_operator_beside(layer, conv, x, sizes), taps(conv), conv.padding_mode)
        ours = merged_weight(layer).to(reduction.everywhere).flatten(1)  # (h, i d)
        theirs = _matrices(conv, layer.groups).to(reduction.everywhere).flatten(1)  # (j, i d)
        return reduction.over(lambda place: measure(place[:, : layer.heads] @ ours, place[:, layer.heads :] @ theirs))


def _operator_beside(
    layer: SelfAttention, conv: Convolution, x: Tensor | None, sizes: Sequence[int] | None
) -> AttentionOperator:
    """The layer's attention, after checking that layer and convolution can be compared."""
    check_convolution(conv)
    kind = type(conv).__name__
    if isinstance(conv, Forward) == layer.transposed or len(conv.kernel_size) != layer.dims:
        what = "transposed" if layer.transposed else "plain"
        raise ValueError(bad("conv", f"must be {what} and of {layer.dims} dimensions, as the layer is", kind))
    ours, theirs = ((m.in_channels, m.out_channels) for m in (layer, conv))
    if ours != theirs:
        raise ValueError(bad("conv", f"must have the layer's channels {ours}", theirs))
    if layer.groups not in (1, conv.groups):
        raise ValueError(bad("conv", f"must have the layer's {layer.groups} groups", conv.groups))
    if tuple(conv.stride) != layer.stride:
        raise ValueError(bad("conv", f"must have the layer's stride {layer.stride}", tuple(conv.stride)))
    operator = layer_operator(layer, x, sizes)
    grid = operator.grid
    geometry: dict[str, Any] = {"stride": conv.stride, "padding": paddings(conv), "window": extents(conv)}
    if isinstance(conv, Forward):
        made = Grid.make(grid.sizes, **geometry)
    else:
        made = Grid.transposed(grid.sizes, output_padding=conv.output_padding, **geometry)
    if made.query_sizes != grid.query_sizes:
        requirement = f"must have the layer's outputs, {grid.query_sizes} on an image of {grid.sizes}"
        raise ValueError(bad("conv", requirement, made.query_sizes))
    return operator


def _matrices(conv: Convolution, groups: int) -> Float[Tensor, "j i d"]:
    """One matrix per kernel position for a layer of so many groups: a single one holds zeros between groups."""
    grouped = head_weights(conv)  # (j, c / groups, d)
    if conv.groups == groups:
        return grouped
    blocks = grouped.unflatten(2, (conv.groups, -1)).unbind(2)  # per group (j, c / groups, d / groups)
    return torch.stack([torch.block_diag(*parts) for parts in zip(*blocks, strict=True)])


def _size(layer: SelfAttention, dim: int, reach: int) -> int:
    """Keys along an axis so that the central queries see `reach` positions on either side."""
    spacing = layer.stride[dim] if layer.transposed else 1
    return 2 * -(-reach // spacing) + 2 * layer.stride[dim] + 1


def _central(grid: Grid) -> Int[Tensor, "r"]:
    """The query in the middle of the keys, and those before it until the gaps between keys repeat; row-major."""
    chosen = []
    for axis in grid.axes:
        distance = (axis.query_positions() - axis.spacing * (axis.size - 1) // 2).abs()
        middle = int(distance.argmin())
        chosen.append(range(middle - axis.spacing + 1, middle + 1))
    flat = torch.arange(grid.query_count).reshape(grid.query_sizes)
    return torch.stack([flat[place] for place in product(*chosen)])
