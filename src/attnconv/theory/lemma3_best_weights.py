"""Least-squares fit of Lemma 3: the combination Phi of heads that best approximates each kernel position.

Phi is the minimum-norm minimiser of sum_q ||E_q - Phi A_q||^2, with the attention rows A_q (heads x keys) and the
indicators E_q of the kernel positions of query q. Matrices [A_q^T | E_q^T] are reduced to triangular QR factors, block
by block, so nothing of size n x m is stored and no Gram matrix squares the condition number. For white-noise input,

    W_h = sum_j Phi[j, h] W_j   minimises   sum_q || sum_j E_q[j] W_j - sum_h A_q[h] W_h ||^2
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.grid import Axis, Grid, per_axis
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators.base import AttentionOperator, all_queries
from attnconv.theory.conv_taps import BORDERS, Convolution, check_convolution, convolution_grid, head_weights, taps
from attnconv.theory.error_bounds import merged_weight

Shifts: TypeAlias = Sequence[Sequence[int]]

_BLOCK = 2**22  # elements of [A^T | E^T] in memory at once
_ROUNDING = 2.0**-48  # rounding error of the decompositions, 16 eps of float64
_FARTHEST = 32  # maximum number of positions beyond the taps, even if heads are wider


@final
@dataclass(frozen=True)
class Residuals:
    """Relative residuals over three sets of queries: 0 for an exact match, 1 for an approximation by zero.

    If the reference is 0 in a set (because all taps read zero padding), the residual is 0 for a match, else infinite.

    Attributes:
        inside: Residual over the queries with all of their taps in the image; None if there are none.
        border: Residual over the other queries; None if there are none.
        everywhere: Residual over all queries.
    """

    inside: float | None
    border: float | None
    everywhere: float


@final
@dataclass(frozen=True, eq=False)
class Fit:
    """Least-squares fit of one matrix Phi to the equations E_q = Phi A_q of many queries; see `can_express`.

    Attributes:
        phi: Phi, taps (row-major) x heads, float64. For kernel matrices W_j, the best W_h is sum_j Phi[j, h] W_j.
        residuals: sqrt(sum_q ||E_q - Phi A_q||^2 / sum_q ||E_q||^2) over each set of queries.
        worst: Largest ||E_q - Phi A_q|| / max(||E_q||, 1) over the fitted queries.
        rank: Rank of the stacked rows A of the fitted queries; less than the number of heads if heads are redundant.
    """

    phi: Float[Tensor, "j h"] = field(repr=False)
    residuals: Residuals
    worst: float
    rank: int


def imitate(
    layer: SelfAttention,
    conv: Convolution,
    *,
    x: Float[Tensor, "b c *sizes"] | None = None,
    sizes: Sequence[int] | None = None,
    where: Literal["all", "inside"] = "all",
) -> SelfAttention:
    """Return a copy of a layer with the weights and bias that best imitate a convolution, for fixed attention.

    The weights minimise the squared error for white-noise images of the given size. They are exact if the layer can
    express every kernel of this size (see `can_express`). Measure the error with `imitation_error`.

    Args:
        layer: A layer with merged weights and the convolution's channels, stride and output size, and with a bias if
            the convolution has one.
        conv: nn.Conv1d, nn.Conv2d or nn.Conv3d (their transposed counterparts for a transposed layer) with any padding,
            padding mode and dilation, and with as many groups as the layer, or any number if the layer has one group.
        x: Images, all weighted equally. Required if attention depends on content, otherwise only their size is used.
        sizes: Image size per axis, in positions; may replace x if attention depends only on positions.
        where: Queries to fit: `all`, or `inside` for only those with all taps in the image. Use `inside` for weights
            that will be applied to larger images.

    Raises:
        TypeError: If `conv` is not one of these convolutions, or is lazy, quantised or complex.
        ValueError: If the layer has factored weights; if channels, groups, stride, bias or output size do not match; if
            attention depends on content and `x` is missing; or if `where="inside"` and no query is inside.

    Example:
        >>> from attnconv import from_conv
        >>> layer, conv = from_conv(torch.nn.Conv1d(2, 3, 5, padding=2)), torch.nn.Conv1d(2, 3, 3, padding=1)
        >>> imitation_error(imitate(layer, conv, sizes=(9,)), conv, sizes=(9,)).everywhere < 1e-6
        True
    """
    if where not in ("all", "inside"):
        raise ValueError(bad("where", "must be 'all' or 'inside'", repr(where)))
    if layer.weight is None:
        raise ValueError(bad("layer", "must have merged weights", "factored weights", "Omit head_channels."))
    with torch.no_grad():
        spans = _beside(layer, conv, x, sizes)
        if conv.bias is not None and layer.bias is None:
            raise ValueError(bad("layer", "must have a bias if conv has one", None, "Create the layer with bias=True."))
        everywhere, within, _ = spans.fit()
        best = everywhere if where == "all" else within
        if best is None:
            got = f"'inside' for images of size {spans.operator.grid.sizes}"
            raise ValueError(bad("where", "must be 'all' if no query has all of its taps in the image", got))
        made = copy.deepcopy(layer)
        weight = torch.einsum("jh,jid->hid", best.phi, head_weights(conv, layer.groups).to(best.phi))
        made.get_parameter("weight").copy_(weight)
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
    """Compute the root-mean-square error of a layer for white-noise input, relative to a convolution's output.

        sqrt( sum_q || sum_h A_q[h] W_h - sum_j E_q[j] W_j ||^2 / sum_q || sum_j E_q[j] W_j ||^2 )

    W_j is the kernel's matrix at tap j; see `can_express` for A_q and E_q. Biases are ignored. `imitate` minimises this
    error and documents the arguments; here, the layer may also have factored weights. See also `conversion_error`.

    Raises:
        TypeError: If `conv` is not a convolution.
        ValueError: If channels, groups, stride or output size do not match, or `x` is missing and attention needs it.

    Example:
        >>> from attnconv import from_conv
        >>> conv = torch.nn.Conv2d(1, 1, 3, padding=1, dtype=torch.float64)
        >>> imitation_error(from_conv(conv), conv, sizes=(5, 5)).everywhere < 1e-14
        True
    """
    return compare_outputs(layer, conv, x, sizes)[1]


def nearest_weights(layer: SelfAttention, conv: Convolution) -> Float[Tensor, "h i d"]:
    """Return the weights with which `Quadratic` heads best approximate a convolution away from the border.

    The weights are W_h = sum_j Phi[j, h] W_j; see `Fit`. Layer and convolution must have the same geometry.
    """
    shifts = taps(conv)
    blunt = float(layer.encoding.get_parameter("spread").double().square().min()) / 2
    beyond = min(math.ceil(math.sqrt(-math.log(1e-8) / blunt)), _FARTHEST)
    axes = []
    gaps = layer.stride if layer.transposed else (1,) * layer.dims  # between keys
    for gap, along in zip(gaps, zip(*shifts, strict=True), strict=True):
        # One query for each offset between two central keys, and keys as far around them as heads and taps reach.
        side = -(-(max(map(abs, along)) + beyond) // gap) + 1
        axes.append(Axis(2 * side + 1, gap, offset=gap * (side - 1) + 1, spacing=gap, border="zero"))
    grid = Grid(tuple(axes))
    pixels = next(layer.parameters()).new_zeros(1, *grid.sizes, layer.in_channels)
    spans = Spans(layer.encoding.operator(grid, pixels), shifts, "zeros", weights=pixels.dtype)
    phi, _ = spans.solve(*(part.flatten(0, 2) for part in spans.of(all_queries(grid, pixels.device))))
    return torch.einsum("jh,jid->hid", phi, head_weights(conv).to(phi))


def compare_outputs(
    layer: SelfAttention, conv: Convolution, x: Tensor | None, sizes: Sequence[int] | None
) -> tuple[Residuals, Residuals]:
    """Compute the error for white-noise input, relative to the layer's outputs and to the convolution's outputs."""
    with torch.no_grad():
        spans = _beside(layer, conv, x, sizes)
        weights = (merged_weight(layer), head_weights(conv, layer.groups))
        both = torch.cat([part.to(spans.operator.device, torch.float64).flatten(1) for part in weights])  # (h + j, i d)
        # both = R^T Q^T, so norms are those of R^T, with h + j output channels at most.
        left, right = torch.linalg.qr(both.mT, mode="r").R.mT.split((spans.heads, len(spans.shifts)))
        apart, ours, theirs = spans.norms(lambda rows, seen: (rows @ left - seen @ right, rows @ left, seen @ right))
        return spans.over(apart, ours), spans.over(apart, theirs)


@final
class Spans:
    """Attention rows A_q^T and the keys under a kernel's taps, E_q^T, for the queries of an operator, in float64.

    Attributes:
        inside: Boolean mask of the queries with all of their taps between the first and last key of each axis, (n,).
        dtype: Dtype in which the rows are computed.
        cut: Singular values of the rows A count as zero below `cut` times the largest one, because rounding can cause
            them: relative errors of eps form a matrix of norm at most eps ||A||_F <= eps sqrt(h) ||A||_2. Weights in
            the dtype `weights` are rounded, too.
    """

    def __init__(
        self, operator: AttentionOperator, shifts: Shifts, padding_mode: str, *, weights: torch.dtype = torch.float64
    ) -> None:
        if padding_mode not in list(BORDERS):  # a list has no hash
            raise ValueError(bad("padding_mode", f"must be one of {', '.join(BORDERS)}", repr(padding_mode)))
        if padding_mode != "zeros" and any(axis.spacing > 1 for axis in operator.grid.axes):
            raise ValueError(bad("padding_mode", "must be 'zeros' for a transposed layer", repr(padding_mode)))
        self.operator, self.shifts, self.heads = operator, shifts, operator.heads
        self.dtype = operator.rows([0]).dtype
        eps = max(torch.finfo(self.dtype).eps, torch.finfo(weights).eps, _ROUNDING)
        self.cut = eps * math.sqrt(self.heads)
        self._axes = [replace(axis, border=BORDERS[padding_mode]) for axis in operator.grid.axes]
        self._along = torch.tensor(shifts, device=operator.device).T  # (dims, j)
        self.inside = torch.ones(1, dtype=torch.bool, device=operator.device)
        for axis, along in zip(self._axes, self._along, strict=True):
            positions = axis.query_positions(operator.device)[:, None] + along
            held = ((positions >= 0) & (positions <= axis.spacing * (axis.size - 1))).all(1)
            self.inside = (self.inside[:, None] & held).flatten()

    def keys(self, queries: Int[Tensor, "r"]) -> Int[Tensor, "r j"]:
        """Return the flat, row-major index of the key under each tap; -1 if the tap reads zero padding."""
        keys = torch.zeros((len(queries), len(self.shifts)), dtype=torch.long, device=queries.device)
        shown = torch.ones_like(keys, dtype=torch.bool)
        for axis, index, along in zip(self._axes, self.operator.grid.unravel(queries), self._along, strict=True):
            key = axis.sources((axis.offset + axis.stride * index)[:, None] + along)
            keys, shown = keys * axis.size + key, shown & (key >= 0)
        return torch.where(shown, keys, -1)

    def of(self, queries: Int[Tensor, "r"]) -> tuple[Float[Tensor, "b r m h"], Float[Tensor, "b r m j"]]:
        """Return A_q^T and E_q^T, whose columns are 1 at the key under a tap, or all zero if it reads zero padding."""
        rows = self.operator.rows(queries).double().permute(0, 2, 3, 1)
        if not bool(torch.isfinite(rows).all()):
            raise ValueError(bad("attention", "must have finite rows", "NaN or infinite probabilities"))
        seen = self.keys(queries)[:, None] == torch.arange(rows.shape[2], device=rows.device)[:, None]  # (r, m, j)
        return rows, seen.to(rows).expand(len(rows), -1, -1, -1)

    def blocks(self) -> Sequence[Int[Tensor, "_"]]:
        """Split all queries into blocks that fit in memory."""
        grid = self.operator.grid
        numbers = self.operator.batch * (self.heads + len(self.shifts)) * grid.key_count
        return all_queries(grid, self.operator.device).split(max(_BLOCK // numbers, 1))

    def solve(
        self, rows: Float[Tensor, "*lead k h"], seen: Float[Tensor, "*lead k j"]
    ) -> tuple[Float[Tensor, "*lead j h"], Int[Tensor, "*lead"]]:
        """Return the minimum-norm Phi that minimises ||E^T - A^T Phi^T||, and the rank of A."""
        left, values, right = torch.linalg.svd(rows, full_matrices=False)
        kept = values > self.cut * values[..., :1]
        inverse = torch.where(kept, 1 / torch.where(kept, values, 1), 0)
        return (left.mT @ seen).mT @ (inverse[..., None] * right), kept.sum(-1)

    def fit(self) -> tuple[Fit, Fit | None, Residuals]:
        """Return the fits of one Phi to all queries and to those inside (or None), and the residuals of separate Phi_q.

        If attention differs between images, the queries of all images are fitted together.
        """
        factors: list[Tensor | None] = [None, None]  # R of [A^T | E^T] over the queries inside, and at the border
        alone = []
        for queries in self.blocks():
            # Per image and query; the number of rows does not depend on the number of keys.
            reduced = torch.linalg.qr(torch.cat(self.of(queries), -1), mode="r").R
            parts = reduced[..., : self.heads], reduced[..., self.heads :]
            alone.append(residual(*parts, self.solve(*parts)[0]))
            for place, chosen in enumerate((self.inside[queries], ~self.inside[queries])):
                if bool(chosen.any()):
                    factors[place] = _stacked(factors[place], reduced[:, chosen].flatten(0, 2))
        stacked = [factor for factor in (_stacked(*factors), factors[0]) if factor is not None]
        solved = [self.solve(factor[:, : self.heads], factor[:, self.heads :]) for factor in stacked]
        whole, *gaps = self.norms(lambda rows, seen: [seen, *(rows @ phi.mT - seen for phi, _ in solved)])
        fits, sets = [], (torch.ones_like(self.inside), self.inside)
        for (phi, rank), apart, chosen in zip(solved, gaps, sets, strict=False):
            worst = float((apart / whole.clamp_min(1))[:, chosen].max())
            fits.append(Fit(phi, self.over(apart, whole), worst, int(rank)))
        each = torch.cat(alone, 1)
        return fits[0], fits[1] if len(fits) > 1 else None, self.over(each, torch.ones_like(each), order=math.inf)

    def norms(self, measured: Callable[[Tensor, Tensor], Sequence[Tensor]]) -> Float[Tensor, "_ b n"]:
        """Return the norms of the matrices that `measured` computes from A_q^T and E_q^T, for every query."""
        blocks = (measured(*self.of(queries)) for queries in self.blocks())
        return torch.cat([torch.stack([torch.linalg.matrix_norm(part) for part in parts]) for parts in blocks], -1)

    def over(self, apart: Float[Tensor, "b n"], whole: Float[Tensor, "b n"], *, order: float = 2) -> Residuals:
        """Return the norm of `apart` relative to `whole` over the queries inside, at the border and everywhere."""

        def relative(chosen: Tensor) -> float:
            left, size = (torch.linalg.vector_norm(part[:, chosen], order) for part in (apart, whole))
            return float(ratio(left, size))

        inner, border = (relative(chosen) if bool(chosen.any()) else None for chosen in (self.inside, ~self.inside))
        return Residuals(inner, border, relative(torch.ones_like(self.inside)))


def residual(
    rows: Float[Tensor, "*lead k h"], seen: Float[Tensor, "*lead k j"], phi: Float[Tensor, "*lead j h"]
) -> Float[Tensor, "*lead"]:
    """Compute ||E - Phi A|| / ||E|| from A^T and E^T."""
    return ratio(torch.linalg.matrix_norm(rows @ phi.mT - seen), torch.linalg.matrix_norm(seen))


def ratio(apart: Float[Tensor, "*lead"], whole: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
    """Compute apart / whole; 0 if both are zero, infinite if only `whole` is."""
    return torch.where((whole > 0) | (apart == 0), apart / torch.where(whole > 0, whole, 1), math.inf)


def _stacked(*parts: Tensor | None) -> Tensor:
    """Return the R factor of the stacked matrices, ignoring None."""
    return torch.linalg.qr(torch.cat([part for part in parts if part is not None]), mode="r").R


def layer_operator(
    layer: SelfAttention, x: Float[Tensor, "b c *sizes"] | None, sizes: Sequence[int] | None
) -> AttentionOperator:
    """Return a layer's operator for images `x`, or for an image of `sizes` if attention depends on positions only."""
    if x is not None:
        if sizes is not None:
            raise ValueError(bad("sizes", "must be None if x is given", tuple(sizes)))
        return layer.operator(x)
    if sizes is None:
        raise ValueError(bad("x", "must be given if sizes is None", None, "Pass images as x, or their size as sizes."))
    sizes = per_axis("sizes", sizes, layer.dims, least=1)
    operator = layer.operator(next(layer.parameters()).new_zeros(2, layer.in_channels, *sizes))
    if operator.batch > 1:  # the rows differ between the two images
        got = f"None for {type(layer.encoding).__name__}"
        raise ValueError(bad("x", "must be given if attention depends on content", got, "Pass images as x."))
    return operator


def _beside(layer: SelfAttention, conv: Convolution, x: Tensor | None, sizes: Sequence[int] | None) -> Spans:
    """Return the layer's rows and the convolution's taps, after checking that their geometries match."""
    check_convolution(conv)
    if conv.transposed != layer.transposed or len(conv.kernel_size) != layer.dims:
        expected = f"{'ConvTranspose' if layer.transposed else 'Conv'}{layer.dims}d"
        raise ValueError(bad("conv", f"must be an nn.{expected} to match the layer", type(conv).__name__))
    ours, theirs = ((m.in_channels, m.out_channels) for m in (layer, conv))
    if ours != theirs:
        raise ValueError(bad("conv", f"must have the layer's input and output channels {ours}", theirs))
    if tuple(conv.stride) != layer.stride:
        raise ValueError(bad("conv", f"must have the layer's stride {layer.stride}", tuple(conv.stride)))
    if layer.groups not in (1, conv.groups):
        raise ValueError(bad("conv", f"must have the layer's number of groups ({layer.groups})", conv.groups))
    operator = layer_operator(layer, x, sizes)
    grid = operator.grid
    outputs = convolution_grid(conv, grid.sizes).query_sizes
    if outputs != grid.query_sizes:
        requirement = f"must have the layer's output size {grid.query_sizes} for images of size {grid.sizes}"
        raise ValueError(bad("conv", requirement, outputs))
    return Spans(operator, taps(conv), conv.padding_mode, weights=next(layer.parameters()).dtype)
