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
from functools import partial
from itertools import product
from typing import Any, Literal, TypeAlias, final

import torch
from jaxtyping import Float, Int
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
    measure: Callable[[Tensor, Tensor], Tensor],
) -> Residuals:
    """Measure R factors of the outputs of a layer and of a convolution for white input; see `Reduction.over`."""
    with torch.no_grad():
        reduction = Reduction.of(_operator_beside(layer, conv, x, sizes), taps(conv), conv.padding_mode)
        ours = merged_weight(layer).to(reduction.everywhere).flatten(1)  # (h, i d)
        theirs = _matrices(conv, layer.groups).to(reduction.everywhere).flatten(1)  # (j, i d)
        return reduction.over(lambda place: measure(place[:, : layer.heads] @ ours, place[:, layer.heads :] @ theirs))


def fit(operator: AttentionOperator, shifts: Shifts, padding_mode: str) -> tuple[Fit, Fit | None, Residuals]:
    """Phi for all queries, Phi for those inside (None if there is none), and the residuals of a Phi_q for each query.

    Where images have rows of their own, all images count as more queries.
    """
    reduction, heads = Reduction.of(operator, shifts, padding_mode), operator.heads
    factors = [place for place in (reduction.everywhere, reduction.inside) if place is not None]
    solved = [solve(factor, heads, reduction.cut) for factor in factors]
    worst = [0.0 for _ in solved]
    for stack, within in _blocks(operator, shifts, padding_mode):
        size = torch.linalg.matrix_norm(stack[..., heads:]).clamp_min(1)
        for index, ((phi, _), chosen) in enumerate(zip(solved, (torch.ones_like(within), within), strict=False)):
            apart = torch.linalg.matrix_norm(stack[..., :heads] @ phi.mT - stack[..., heads:])
            worst[index] = max(worst[index], float(((apart / size) * chosen).max()))
    found = []
    for (phi, values), most in zip(solved, worst, strict=True):
        left, rank = reduction.over(partial(residual, phi=phi)), int((values > reduction.cut * values[:1]).sum())
        found.append(Fit(phi, left, most, rank, values))
    return found[0], found[1] if len(found) > 1 else None, reduction.each_query


@final
@dataclass(frozen=True, eq=False)
class Reduction:
    """[A_q^T | E_q^T] of all queries, stacked and reduced to triangles of heads + kernel positions columns."""

    inside: Float[Tensor, "_ columns"] | None  # of the queries all of whose taps lie in the image
    border: Float[Tensor, "_ columns"] | None  # of the others
    everywhere: Float[Tensor, "_ columns"]
    each_query: Residuals  # the largest that a query leaves with a Phi_q of its own
    cut: float  # singular values of A up to this part of the largest count as zero

    @staticmethod
    def of(operator: AttentionOperator, shifts: Shifts, padding_mode: str) -> "Reduction":
        """All queries, a block at a time; arguments as for `fit`."""
        cut = rank_tolerance(operator)
        factors: list[Tensor | None] = [None, None]  # of the queries inside, and at the border
        worst: list[float | None] = [None, None]
        for stack, within in _blocks(operator, shifts, padding_mode):
            # One factor per image and query: few rows, whatever the number of keys.
            reduced = torch.linalg.qr(stack, mode="r").R
            alone = residual(reduced, solve(reduced, operator.heads, cut)[0])
            for place, chosen in enumerate((within, ~within)):
                if bool(chosen.any()):
                    factors[place] = _stacked(factors[place], reduced[:, chosen].flatten(0, 2))
                    worst[place] = max(float(alone[:, chosen].max()), worst[place] or 0.0)
        each_query = Residuals(worst[0], worst[1], max(most for most in worst if most is not None))
        return Reduction(factors[0], factors[1], _stacked(*factors), each_query, cut)

    def over(self, measure: Callable[[Tensor], Tensor]) -> Residuals:
        """A relative difference that depends on [A^T | E^T] by its R factor only, over the three sets."""
        within, border = (None if place is None else float(measure(place)) for place in (self.inside, self.border))
        return Residuals(within, border, float(measure(self.everywhere)))


def _blocks(operator: AttentionOperator, shifts: Shifts, padding_mode: str) -> Iterator[tuple[Tensor, Tensor]]:
    """[A^T | E^T] and which are inside, of all queries in parts of moderate size."""
    numbers = operator.batch * (operator.heads + len(shifts)) * operator.grid.key_count
    for queries in all_queries(operator.grid, operator.device).split(max(_BLOCK // numbers, 1)):
        yield matrices(operator, shifts, padding_mode, queries), inside(operator.grid, shifts, queries)


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
    """||E - Phi A|| / ||E|| of [A^T | E^T]."""
    heads = phi.shape[-1]
    return relative(stack[..., :heads] @ phi.mT, stack[..., heads:])


def relative(
    found: Float[Tensor, "*lead rows columns"], wanted: Float[Tensor, "*lead rows columns"]
) -> Float[Tensor, "*lead"]:
    """||found - wanted|| / ||wanted||: 0 where both are zero, infinite where only wanted is zero."""
    apart, whole = torch.linalg.matrix_norm(found - wanted), torch.linalg.matrix_norm(wanted)
    ratio = apart / torch.where(whole > 0, whole, 1)
    return torch.where((whole > 0) | (apart == 0), ratio, math.inf)


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
    grouped = head_weights(conv)  # (j, c / groups, d)
    if conv.groups == groups:
        return grouped
    blocks = grouped.unflatten(2, (conv.groups, -1)).unbind(2)  # per group (j, c / groups, d / groups)
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
