"""The matrix Phi of Lemma 3, the mixture of heads nearest to each kernel position, and the best weights that it gives.

Phi is the shortest that minimises sum_q ||E_q - Phi A_q||^2, with the attention rows A_q (heads x keys) and indicators
E_q of the kernel positions of query q. The [A_q^T | E_q^T] are reduced to triangular QR factors, block by block, so
nothing of size n x m is stored and no Gram matrix squares the condition number. For white input

    W_h = sum_j Phi[j, h] W_j   minimises   sum_q || sum_j E_q[j] W_j - sum_h A_q[h] W_h ||^2
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, TypeAlias, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.grid import Grid, per_axis
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators.base import AttentionOperator, all_queries
from attnconv.theory.conv_taps import (
    BORDERS,
    Convolution,
    Forward,
    check_convolution,
    extents,
    grouped_weights,
    head_weights,
    inside,
    paddings,
    tap_keys,
    taps,
)
from attnconv.theory.error_bounds import merged_weight

Shifts: TypeAlias = Sequence[Sequence[int]]

_BLOCK = 2**22  # numbers of [A^T | E^T] held at once
_ROUNDING = 2.0**-48  # of the decompositions themselves: 16 eps of float64
_FARTHEST = 32  # pixels beyond the taps at most, however blunt the heads


@final
@dataclass(frozen=True)
class Residuals:
    """A relative difference over three sets of queries: 0 where all is expressed, 1 where nothing is.

    Where the kernel sees no pixel from any query of a set, it is 0 if the attention adds nothing either, else infinite.

    Attributes:
        inside: Over queries all of whose taps lie in the image; None if there is none.
        border: Over the other queries; None if there is none.
        everywhere: Over all queries.
    """

    inside: float | None
    border: float | None
    everywhere: float


@final
@dataclass(frozen=True, eq=False)
class Fit:
    """One matrix Phi for many queries.

    Attributes:
        phi: Kernel positions (row-major) x heads, in float64; W_h = sum_j Phi[j, h] W_j are the best weights.
        residuals: sqrt(sum_q ||E_q - Phi A_q||^2 / sum_q ||E_q||^2) of this Phi, over each set of queries.
        worst: The largest ||E_q - Phi A_q|| / max(||E_q||, 1) of a fitted query.
        rank: Rank of the stacked rows A of the fitted queries; below the number of heads where heads repeat others.
        singular_values: Those of A, largest first.
    """

    phi: Float[Tensor, "j h"]
    residuals: Residuals
    worst: float
    rank: int
    singular_values: Float[Tensor, "s"]


def imitate(
    layer: SelfAttention,
    conv: Convolution,
    *,
    x: Float[Tensor, "b c *sizes"] | None = None,
    sizes: Sequence[int] | None = None,
    where: Literal["all", "inside"] = "all",
) -> SelfAttention:
    """A deep copy of a layer whose weights and bias imitate a convolution as well as its attention allows.

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

    Raises:
        TypeError: conv is no convolution of these kinds, or is lazy, quantised or complex.
        ValueError: The layer has factored weights; channels, groups, stride, bias or number of outputs do not fit;
            content is needed and missing; or `inside` is asked for where no query is.

    Example:
        >>> from attnconv import from_conv
        >>> layer, conv = from_conv(torch.nn.Conv1d(2, 3, 5, padding=2)), torch.nn.Conv1d(2, 3, 3, padding=1)
        >>> imitation_error(imitate(layer, conv, sizes=(9,)), conv, sizes=(9,)).everywhere < 1e-6
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
        made = copy.deepcopy(layer)
        assert made.weight is not None
        made.weight.copy_(torch.einsum("jh,jid->hid", best.phi, _matrices(conv, layer.groups).to(best.phi)))
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

    Biases are left out. `imitate` minimises it, and has the same arguments; here the layer's weights may be factored.
    (`conversion_error` is relative to the layer.)

    Raises:
        TypeError: conv is no convolution.
        ValueError: Channels, groups, stride or number of outputs do not fit, or content is needed and missing.

    Example:
        >>> from attnconv import from_conv
        >>> conv = torch.nn.Conv2d(1, 1, 3, padding=1, dtype=torch.float64)
        >>> imitation_error(from_conv(conv), conv, sizes=(5, 5)).everywhere < 1e-14
        True
    """
    return compare_outputs(layer, conv, x, sizes, relative_to="conv")


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
        # On either side of the central queries, keys over the reach of the heads and taps.
        spacing = layer.stride if layer.transposed else (1,) * layer.dims
        reach = [max(map(abs, axis)) + beyond for axis in zip(*shifts, strict=True)]
        each_side = [-(-far // gap) for far, gap in zip(reach, spacing, strict=True)]
        sizes = [2 * (keys + step) + 1 for keys, step in zip(each_side, layer.stride, strict=True)]
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
    *,
    relative_to: Literal["layer", "conv"],
) -> Residuals:
    """The difference of the outputs of a layer and of a convolution for white input, relative to one of the two."""
    with torch.no_grad():
        operator, shifts = _operator_beside(layer, conv, x, sizes), taps(conv)
        weights = (merged_weight(layer), _matrices(conv, layer.groups))
        both = torch.cat([part.to(operator.device, torch.float64).flatten(1) for part in weights])  # (h + j, i d)
        # both = R^T Q^T: norms are those of R^T, with h + j output channels at most.
        norms = _norms(operator, shifts, conv.padding_mode, torch.linalg.qr(both.mT, mode="r").R.mT)
        whole = norms[0 if relative_to == "layer" else 1]
        return _over(inside(operator.grid, shifts, operator.device), _relative(norms[2], whole))


def fit(operator: AttentionOperator, shifts: Shifts, padding_mode: str) -> tuple[Fit, Fit | None, Residuals]:
    """Phi for all queries, Phi for those inside (None if there is none), and the residuals of a Phi_q for each query.

    Where images have rows of their own, all images count as more queries.
    """
    heads, cut = operator.heads, rank_tolerance(operator)
    within = inside(operator.grid, shifts, operator.device)
    factors: list[Tensor | None] = [None, None]  # R of [A^T | E^T] over the queries inside, and at the border
    alone = []
    for queries, stack in _blocks(operator, shifts, padding_mode):
        reduced = torch.linalg.qr(stack, mode="r").R  # of each image and query: few rows, whatever the number of keys
        alone.append(residual(reduced, solve(reduced, heads, cut)[0]))
        for place, chosen in enumerate((within[queries], ~within[queries])):
            if bool(chosen.any()):
                factors[place] = _stacked(factors[place], reduced[:, chosen].flatten(0, 2))
    each_query = torch.cat(alone, 1)

    def fitted(factor: Tensor, chosen: Tensor) -> Fit:
        phi, values = solve(factor, heads, cut)
        one = torch.eye(len(shifts), dtype=phi.dtype, device=phi.device)
        _, whole, apart = _norms(operator, shifts, padding_mode, torch.cat((phi.mT, one)))
        worst = float((apart / whole.clamp_min(1))[:, chosen].max())
        rank = int((values > cut * values[:1]).sum())
        return Fit(phi, _over(within, _relative(apart, whole)), worst, rank, values)

    everywhere = fitted(_stacked(*factors), torch.ones_like(within))
    fit_inside = None if factors[0] is None else fitted(factors[0], within)
    return everywhere, fit_inside, _over(within, lambda chosen: each_query[:, chosen].max())


def _norms(
    operator: AttentionOperator, shifts: Shifts, padding_mode: str, weights: Float[Tensor, "columns i"]
) -> tuple[Float[Tensor, "b n"], Float[Tensor, "b n"], Float[Tensor, "b n"]]:
    """||A_q^T U||, ||E_q^T V|| and ||A_q^T U - E_q^T V|| of every query; U and V are the rows of `weights`."""
    heads, found = operator.heads, []
    for _, stack in _blocks(operator, shifts, padding_mode):
        ours, theirs = stack[..., :heads] @ weights[:heads], stack[..., heads:] @ weights[heads:]
        found.append(torch.stack([torch.linalg.matrix_norm(part) for part in (ours, theirs, ours - theirs)]))
    ours, theirs, apart = torch.cat(found, -1)
    return ours, theirs, apart


def _over(within: Bool[Tensor, "n"], measure: Callable[[Tensor], Tensor]) -> Residuals:
    """What is measured over the queries inside, at the border and everywhere."""
    inner, border = (float(measure(chosen)) if bool(chosen.any()) else None for chosen in (within, ~within))
    return Residuals(inner, border, float(measure(torch.ones_like(within))))


def _relative(apart: Float[Tensor, "b n"], whole: Float[Tensor, "b n"]) -> Callable[[Tensor], Tensor]:
    """The relative difference over some of the queries."""
    return lambda chosen: ratio(apart[:, chosen].norm(), whole[:, chosen].norm())


def _blocks(operator: AttentionOperator, shifts: Shifts, padding_mode: str) -> Iterator[tuple[Tensor, Tensor]]:
    """All queries in parts of moderate size, with their [A^T | E^T]."""
    numbers = operator.batch * (operator.heads + len(shifts)) * operator.grid.key_count
    for queries in all_queries(operator.grid, operator.device).split(max(_BLOCK // numbers, 1)):
        yield queries, matrices(operator, shifts, padding_mode, queries)


def matrices(
    operator: AttentionOperator, shifts: Shifts, padding_mode: str, queries: Int[Tensor, "r"]
) -> Float[Tensor, "b r m columns"]:
    """[A_q^T | E_q^T] in float64. A kernel position's column has a one at the key that it sees, or only zeros."""
    rows = operator.rows(queries).double().permute(0, 2, 3, 1)  # (b, r, m, h)
    if not bool(torch.isfinite(rows).all()):
        raise ValueError(bad("attention", "must have finite rows", "NaN or infinite probabilities"))
    keys = tap_keys(_padded(operator.grid, padding_mode), shifts, queries)  # (r, j), -1 for zeros
    indicators = (keys[:, None, :] == torch.arange(rows.shape[2], device=keys.device)[:, None]).double()  # (r, m, j)
    return torch.cat((rows, indicators.expand(rows.shape[0], -1, -1, -1)), -1)


def solve(
    stack: Float[Tensor, "*lead rows columns"], heads: int, cut: float
) -> tuple[Float[Tensor, "*lead j h"], Float[Tensor, "*lead s"]]:
    """The shortest Phi that minimises ||E^T - A^T Phi^T||, and A's singular values; zero are those up to `cut`."""
    left, values, right = torch.linalg.svd(stack[..., :heads], full_matrices=False)
    kept = values > cut * values[..., :1]
    inverse = torch.where(kept, 1 / torch.where(kept, values, 1), 0)
    return (left.mT @ stack[..., heads:]).mT @ (inverse[..., None] * right), values


def residual(stack: Float[Tensor, "*lead rows columns"], phi: Float[Tensor, "*lead j h"]) -> Float[Tensor, "*lead"]:
    """||E - Phi A|| / ||E|| of [A^T | E^T]: 0 where both are zero, infinite where only E is zero."""
    rows, indicators = stack.split((phi.shape[-1], phi.shape[-2]), -1)
    return ratio(torch.linalg.matrix_norm(rows @ phi.mT - indicators), torch.linalg.matrix_norm(indicators))


def ratio(apart: Float[Tensor, "*lead"], whole: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
    """apart / whole: 0 where both are zero, infinite where only `whole` is."""
    return torch.where((whole > 0) | (apart == 0), apart / torch.where(whole > 0, whole, 1), math.inf)


def rank_tolerance(operator: AttentionOperator) -> float:
    """How far rounding can move a singular value of the rows, relative to the largest: eps sqrt(h), eps of their dtype.

    Relative errors of eps make a matrix of norm at most eps ||A||_F, and ||A||_F <= sqrt(h) times the largest value.
    """
    return max(torch.finfo(rows_dtype(operator)).eps, _ROUNDING) * math.sqrt(operator.heads)


def rows_dtype(operator: AttentionOperator) -> torch.dtype:
    """The dtype in which an operator computes its probabilities."""
    return operator.rows([0]).dtype


def _stacked(*parts: Tensor | None) -> Tensor:
    """The R factor of stacked matrices, some of which may be missing."""
    return torch.linalg.qr(torch.cat([part for part in parts if part is not None]), mode="r").R


def _padded(grid: Grid, padding_mode: str) -> Grid:
    """The grid under the convolution's own border rule."""
    if padding_mode not in BORDERS:
        raise ValueError(bad("padding_mode", f"must be one of {', '.join(BORDERS)}", repr(padding_mode)))
    if padding_mode != "zeros" and any(axis.spacing > 1 for axis in grid.axes):
        raise ValueError(bad("padding_mode", "must be 'zeros' for a transposed layer", repr(padding_mode)))
    return Grid(tuple(replace(axis, border=BORDERS[padding_mode]) for axis in grid.axes))


def layer_operator(
    layer: SelfAttention, x: Float[Tensor, "b c *sizes"] | None, sizes: Sequence[int] | None
) -> AttentionOperator:
    """A layer's attention on images `x`, or on images of `sizes` where it depends on positions only."""
    if x is not None:
        if sizes is not None:
            raise ValueError(bad("sizes", "must be left out beside x, which has its own", tuple(sizes)))
        return layer.operator(x)
    if sizes is None:
        raise ValueError(bad("x", "or sizes must say how large the image is", None))
    sizes = per_axis("sizes", sizes, layer.dims, least=1)
    operator = layer.operator(next(layer.parameters()).new_zeros(2, layer.in_channels, *sizes))
    if operator.batch > 1:  # two images, two sets of rows
        got = f"none for {type(layer.encoding).__name__}"
        raise ValueError(bad("x", "must be given where attention depends on content", got, "Pass images as x."))
    return operator


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
    if tuple(conv.stride) != layer.stride:
        raise ValueError(bad("conv", f"must have the layer's stride {layer.stride}", tuple(conv.stride)))
    if layer.groups not in (1, conv.groups):
        raise ValueError(bad("conv", f"must have the layer's {layer.groups} groups", conv.groups))
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
    if conv.groups == groups:
        return head_weights(conv)
    blocks = grouped_weights(conv).unbind(2)  # per group (j, c / groups, d / groups)
    return torch.stack([torch.block_diag(*parts) for parts in zip(*blocks, strict=True)])


def _central(grid: Grid) -> Int[Tensor, "r"]:
    """The query in the middle of the keys, and those before it until the gaps between keys repeat; row-major."""
    chosen = []
    for axis in grid.axes:
        distance = (axis.query_positions() - axis.spacing * (axis.size - 1) // 2).abs()
        middle = int(distance.argmin())
        chosen.append(range(middle - axis.spacing + 1, middle + 1))
    flat = torch.arange(grid.query_count).reshape(grid.query_sizes)
    return torch.stack([flat[place] for place in product(*chosen)])
