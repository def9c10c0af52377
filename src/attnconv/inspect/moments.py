"""Moments of attention: where heads look, how far, how widely, without a matrix of queries x keys.

A query's weights w are its probabilities A over the image's keys divided by their sum, its *mass*, which is below 1
only where the border rule `zero` leaves some on points that hold zeros. Over the shifts delta = key - query, in pixels,

    centre        c_q = sum_k w_k delta_k
    covariance    C_q = sum_k w_k (delta_k - c_q) (delta_k - c_q)^T
    distance      d_q = sum_k w_k |delta_k|
    entropy       H_q = - sum_k w_k ln w_k                                               (0 ln 0 = 0)

and the moments are means over queries. A query without mass on the image has no weights and counts as none.

Rows come a block of queries at a time and only running sums are kept. Where the probabilities are products over axes
(`Kronecker`, `Shift`) no joint row is made at all: queries are products too, so means over them factor,

    centre, variance, entropy    per axis, from n_a x m_a weights; entropies add, and axes are uncorrelated
    distance                     sum_delta W_1(delta_1) W_2(delta_2) .. |delta|,  W_a(delta) = mean_q w_a[q, q + delta]

exactly: no query is left out, and no row of a whole image is made.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from attnconv._util.errors import bad
from attnconv._util.value_checks import whole
from attnconv.grid import Axis, Grid
from attnconv.operators.base import AttentionOperator, Queries, all_queries, query_indices
from attnconv.operators.kronecker import Kronecker
from attnconv.operators.shift import Shift

BLOCK = 2**22  # probabilities held at once: 32 MiB in float64, a few times over


@final
@dataclass(frozen=True, eq=False)
class AttentionMoments:
    """Where the heads of one operator look, as means over queries: see the module's formulas.

    All in float64; b is the operator's batch. A head without mass on the image at any query has NaN, but for
    `padding_mass` and `content_share`.

    Attributes:
        centre: Mean centre of mass, key minus query, (b, h, dims) in pixels.
        covariance: Mean covariance of a query's weights, (b, h, dims, dims) in pixels squared: how widely it looks.
        spread_of_centres: Covariance over queries of their centres of mass, (b, h, dims, dims) in pixels squared: how
            much the head's shift depends on the query.
        distance: Mean Euclidean distance between query and key, (b, h) in pixels.
        entropy: Mean entropy, (b, h) in nats.
        padding_mass: Mean mass on lattice points that hold zeros, (b, h), over all queries.
        content_share: The part of the probabilities' variance that the image explains, (h,), from 0 to 1: W / (W + B)
            with W the mean over queries and keys of the variance over images, and B the mean over queries of the
            variance over keys of the mean over images, each freed of the bias of few images (B of W / images; 0 if less
            is left); 0 where all probabilities are equal. None for an operator that all images share.
        queries: Number of queries that were looked at.
    """

    centre: Float64[Tensor, "b h dims"]
    covariance: Float64[Tensor, "b h dims dims"]
    spread_of_centres: Float64[Tensor, "b h dims dims"]
    distance: Float64[Tensor, "b h"]
    entropy: Float64[Tensor, "b h"]
    padding_mass: Float64[Tensor, "b h"]
    content_share: Float64[Tensor, "h"] | None
    queries: int


@torch.no_grad()
def attention_moments(
    operator: AttentionOperator, *, queries: Queries | None = None, block: int | None = None
) -> AttentionMoments:
    """Means over queries of centre, covariance, distance and entropy of attention, for each head and image.

    Cost: a few passes over all rows, one block at a time; `Kronecker` and `Shift` operators on several axes take
    (queries x keys) of single axes and (shifts of all axes) instead. For others on large images pass some `queries`.

    Args:
        operator: The attention probabilities, as `layer.operator(x)` or `attention_operators(model, images)` give them.
        queries: Flat query indices to take the means over, as from `sample_queries`; None for all of the grid's.
        block: Rows at a time, at least 1; None for as many as make 2^22 probabilities over all heads and images.

    Raises:
        TypeError: `block` is no whole number, or `queries` are not whole numbers.
        ValueError: `block` is below 1, or `queries` is empty or outside the grid.

    Example:
        >>> from attnconv import Grid, Kronecker
        >>> scores = [torch.zeros(1, 3, 3), torch.zeros(1, 4, 4)]  # uniform attention over 3 x 4 pixels
        >>> moments = attention_moments(Kronecker.from_scores(Grid.make((3, 4)), scores))
        >>> moments.covariance[0, 0].round(decimals=3).tolist()  # (m^2 - 1) / 12 per axis
        [[0.667, 0.0], [0.0, 1.25]]
        >>> torch.testing.assert_close(moments.entropy.exp(), torch.tensor([[12.0]]).double())
    """
    if block is not None:
        block = whole("block", block, 1)
    if queries is not None:
        queries = query_indices(queries, operator.grid, operator.device)
        if queries.numel() == 0:
            raise ValueError(bad("queries", "must hold at least one query", 0, "Pass None for all."))
    parts = _axis_operators(operator) if queries is None and operator.grid.dims > 1 else None
    if parts is not None:
        return _product_moments(operator.grid, parts, block)
    chosen = all_queries(operator.grid, operator.device) if queries is None else queries.to(operator.device)
    return _moments_of_rows(operator, chosen, block)


def sample_queries(grid: Grid, count: int, *, seed: int = 0, device: torch.device | None = None) -> Int[Tensor, "r"]:
    """At most `count` queries spread over a grid, flat and ascending: one at a random place in each of its cells.

    The grid is cut into cells as alike as whole numbers allow. An even lattice of queries would meet windows, which are
    a lattice too, at the same few places in each.

    Args:
        grid: Where the queries stand.
        count: How many to take at most, at least 1; all of them if there are not more.
        seed: Of the places in the cells. The same seed gives the same queries on every device.
        device: Where the indices are wanted, as `operator.device`.

    Example:
        >>> sample_queries(Grid.make((4, 6)), 6).tolist()  # cells of 2 x 2
        [5, 6, 8, 18, 20, 22]
    """
    count = whole("count", count, 1)
    counts = _cells(grid, count)
    generator = torch.Generator().manual_seed(seed)
    flat = torch.zeros((), dtype=torch.int64)
    for axis, (size, taken) in enumerate(zip(grid.query_sizes, counts, strict=True)):
        edges = _edges(size, taken)
        along = [1] * grid.dims
        along[axis] = taken
        first, length = edges[:-1].reshape(along), edges.diff().reshape(along)
        part = torch.rand(counts, generator=generator, dtype=torch.float64)
        flat = flat * size + first + (part * length).long()
    return flat.flatten().sort().values.to(device)


def lattice_queries(grid: Grid, count: int, *, device: torch.device | None = None) -> Int[Tensor, "r"]:
    """At most `count` queries spread over a grid, flat and ascending: the middle one of each cell of `sample_queries`.

    An even lattice keeps every query near to one of them, which is what a picture wants. What is measured on them meets
    periodic structure at the same few places: `sample_queries` is for that.

    Args:
        grid: Where the queries stand.
        count: How many to take at most, at least 1; all of them if there are not more.
        device: Where the indices are wanted, as `operator.device`.

    Example:
        >>> lattice_queries(Grid.make((4, 6)), 6).tolist()  # cells of 2 x 2
        [7, 9, 11, 19, 21, 23]
    """
    flat = torch.zeros(1, dtype=torch.int64)
    for size, taken in zip(grid.query_sizes, _cells(grid, whole("count", count, 1)), strict=True):
        edges = _edges(size, taken)
        places = torch.div(edges[:-1] + edges[1:], 2, rounding_mode="floor")
        flat = (flat[:, None] * size + places).flatten()
    return flat.to(device)


def _cells(grid: Grid, count: int) -> list[int]:
    """Cells per axis, at most `count` in all."""
    sizes = grid.query_sizes
    part = min(1.0, (count / grid.query_count) ** (1 / grid.dims))
    counts = [max(1, int(size * part)) for size in sizes]
    while math.prod(counts) > count:  # axes shorter than one cell
        counts[max(range(grid.dims), key=counts.__getitem__)] -= 1
    while True:  # the coarsest axis that still has room becomes finer
        room = [a for a in range(grid.dims) if counts[a] < sizes[a] and _one_more(counts, a) <= count]
        if not room:
            return counts
        counts[min(room, key=lambda a: counts[a] / sizes[a])] += 1


def _edges(size: int, taken: int) -> Tensor:
    """Where the cells of an axis begin, and the end of the last."""
    return torch.div(torch.arange(taken + 1) * size, taken, rounding_mode="floor")


def _one_more(counts: Sequence[int], axis: int) -> int:
    """Number of points of a grid with one more along an axis."""
    return math.prod(counts) // counts[axis] * (counts[axis] + 1)


def _moments_of_rows(operator: AttentionOperator, queries: Tensor, block: int | None) -> AttentionMoments:
    """The definition, a block of rows at a time."""
    grid, dims = operator.grid, operator.grid.dims
    running = _Running(operator.batch, operator.heads, dims, operator.device)
    padding = torch.zeros(operator.batch, operator.heads, dtype=torch.float64, device=operator.device)
    shares = torch.zeros(2, operator.heads, dtype=torch.float64, device=operator.device)
    for some in queries.split(_rows_at_a_time(operator, block)):
        rows = operator.rows(some).double()
        running.add(*_row_moments(grid, some, rows))
        if any(axis.border == "zero" for axis in grid.axes):
            padding += operator.padding_mass(some).double().sum(-1)
        if operator.batch > 1:
            shares += _variances(rows)
    centre, covariance, distance, entropy = running.mean.split((dims, dims * dims, 1, 1), -1)
    return AttentionMoments(
        centre=centre,
        covariance=covariance.unflatten(-1, (dims, dims)),
        spread_of_centres=running.covariance,
        distance=distance.squeeze(-1),
        entropy=entropy.squeeze(-1),
        padding_mass=padding / len(queries),
        content_share=_content_share(shares[0], shares[1], operator.batch) if operator.batch > 1 else None,
        queries=len(queries),
    )


def _rows_at_a_time(operator: AttentionOperator, block: int | None) -> int:
    if block is not None:
        return block
    return max(1, BLOCK // (operator.batch * operator.heads * operator.grid.lattice_count))


def _weights(rows: Float64[Tensor, "*lead m"]) -> tuple[Float64[Tensor, "*lead m"], Bool[Tensor, "*lead"]]:
    """Rows divided by their mass, and which of them have any; those without stay zero."""
    mass = rows.sum(-1)
    has_mass = mass != 0  # NaN counts, so that it is seen
    return rows / mass.where(has_mass, 1)[..., None], has_mass


def _row_moments(
    grid: Grid, queries: Int[Tensor, "r"], rows: Float64[Tensor, "b h r m"]
) -> tuple[Float64[Tensor, "b h r moments"], Bool[Tensor, "b h r"]]:
    """Each row's centre, covariance (row-major), distance and entropy, and whether it has weights at all.

    Second moments are taken about the row's own centre, along axes whose other axes are summed away: nothing cancels.
    """
    weights, has_mass = _weights(rows)
    joint = weights.unflatten(-1, grid.sizes)
    shifts = [_shifts(axis, index).double() for axis, index in zip(grid.axes, grid.unravel(queries), strict=True)]
    lines = [_along(joint, axis) for axis in range(grid.dims)]
    centres = [(line * shift).sum(-1) for line, shift in zip(lines, shifts, strict=True)]
    off = [shift - centre[..., None] for shift, centre in zip(shifts, centres, strict=True)]  # (b, h, r, m_a) each
    entries: dict[tuple[int, int], Tensor] = {}
    for a in range(grid.dims):
        entries[a, a] = (lines[a] * off[a].square()).sum(-1)
        for b in range(a):
            plane = _along(joint, b, a)  # (b, h, r, m_b, m_a)
            entries[a, b] = entries[b, a] = ((plane @ off[a][..., None]).squeeze(-1) * off[b]).sum(-1)
    distances = torch.zeros(len(queries), 1, dtype=torch.float64, device=rows.device)
    for shift in shifts:
        distances = (distances[:, :, None] + shift.square()[:, None, :]).flatten(1)  # (r, keys so far)
    distance = (weights * distances.sqrt()).sum(-1)  # an einsum would copy all weights into another order
    entropy = torch.special.entr(weights).sum(-1)
    moments = [*centres, *(entries[a, b] for a in range(grid.dims) for b in range(grid.dims)), distance, entropy]
    return torch.stack(moments, -1), has_mass


def _shifts(axis: Axis, index: Int[Tensor, "r"]) -> Int[Tensor, "r m"]:
    """Position of every image key minus the positions of some queries."""
    keys = torch.arange(axis.size, device=index.device) * axis.spacing
    return keys - (axis.stride * index + axis.offset)[:, None]


def _along(joint: Tensor, *axes: int) -> Tensor:
    """Weights (b, h, r, *sizes) with all but some axes summed away."""
    others = [dim for dim in range(3, joint.dim()) if dim - 3 not in axes]
    return joint.sum(others) if others else joint


def _content_share(within: Float64[Tensor, "h"], between: Float64[Tensor, "h"], images: int) -> Float64[Tensor, "h"]:
    """W / (W + B): of what images make differ, and of what keys make differ, both as if there were many images."""
    within = within * images / (images - 1)
    between = (between - within / images).clamp_min(0)  # the mean of few images varies over keys by chance
    total = within + between
    return within / total.where(total > 0, 1)


def _variances(rows: Float64[Tensor, "b h r m"]) -> Float64[Tensor, "2 h"]:
    """Sums over queries: of the mean over keys of the variance over images, of the variance over keys of the mean."""
    # Taken about entries of the rows: equal probabilities differ by exactly 0.
    off = rows - rows[:1]
    mean = off.mean(0)  # (h, r, m)
    within = off.sub_(mean).square_().sum((0, -1)) / (rows.shape[0] * rows.shape[-1])  # (h, r)
    mean = mean + (rows[0] - rows[0, ..., :1])
    between = (mean - mean.mean(-1, keepdim=True)).square().mean(-1)
    return torch.stack((within.sum(-1), between.sum(-1)))


@final
class _Running:
    """Mean of rows' moments, and scatter of their centres about it, over blocks of rows (Chan, Golub and LeVeque)."""

    def __init__(self, batch: int, heads: int, dims: int, device: torch.device) -> None:
        self._dims = dims
        self._count = torch.zeros(batch, heads, 1, dtype=torch.float64, device=device)
        self._mean = self._count.new_zeros(batch, heads, dims + dims * dims + 2)
        self._scatter = self._count.new_zeros(batch, heads, dims, dims)

    def add(self, moments: Float64[Tensor, "b h r moments"], has_mass: Bool[Tensor, "b h r"]) -> None:
        """Take in some rows; those without mass do not count."""
        counts = has_mass.double()[..., None]  # (b, h, r, 1)
        new = counts.sum(2)
        mean = (moments * counts).sum(2) / new.clamp_min(1)
        off = (moments - mean[:, :, None])[..., : self._dims] * counts
        total = (self._count + new).clamp_min(1)
        step = mean - self._mean
        jump = step[..., : self._dims]
        between = (self._count * new / total)[..., None] * jump[..., :, None] * jump[..., None, :]
        self._scatter += off.mT @ off + between
        self._mean += step * (new / total)
        self._count += new

    @property
    def mean(self) -> Float64[Tensor, "b h moments"]:
        """Over all rows so far; NaN where there was none."""
        return self._mean.where(self._count > 0, math.nan)

    @property
    def covariance(self) -> Float64[Tensor, "b h dims dims"]:
        """Of the rows' centres; NaN where there was none."""
        return self._scatter / self._count[..., None]


def _axis_operators(operator: AttentionOperator) -> list[AttentionOperator] | None:
    """One operator per axis whose product this one is, or None where it is no product."""
    grids = [Grid((axis,)) for axis in operator.grid.axes]
    if isinstance(operator, Kronecker):
        parts = zip(grids, operator.factors, operator.padding_masses, strict=True)
        return [Kronecker(grid, [factor], [mass]) for grid, factor, mass in parts]
    if isinstance(operator, Shift):
        anchor = torch.zeros((), device=operator.device)
        return [Shift(grid, [(shift[a],) for shift in operator.shifts], anchor) for a, grid in enumerate(grids)]
    return None


def _product_moments(grid: Grid, parts: Sequence[AttentionOperator], block: int | None) -> AttentionMoments:
    """The same from operators along single axes, by the products of the module's docstring."""
    moments = [_moments_of_rows(part, all_queries(part.grid, part.device), block) for part in parts]
    entropy = torch.stack([of.entropy for of in moments]).sum(0)  # NaN if an axis has nothing: then there is no row
    padding = torch.zeros_like(entropy)
    for of in moments:
        padding = padding + (1 - padding) * of.padding_mass
    absent = entropy.isnan()[..., None]
    variances = torch.cat([of.covariance[..., 0] for of in moments], -1).masked_fill(absent, math.nan)
    spreads = torch.cat([of.spread_of_centres[..., 0] for of in moments], -1).masked_fill(absent, math.nan)
    return AttentionMoments(
        centre=torch.cat([of.centre for of in moments], -1).masked_fill(absent, math.nan),
        covariance=_diagonal(variances),
        spread_of_centres=_diagonal(spreads),
        distance=_product_distance([_shift_profile(part, block) for part in parts])[None],
        entropy=entropy,
        padding_mass=padding,
        content_share=None,
        queries=grid.query_count,
    )


def _diagonal(variances: Float64[Tensor, "b h dims"]) -> Float64[Tensor, "b h dims dims"]:
    """Variances of uncorrelated axes as a matrix, all of it NaN where they are."""
    return torch.diag_embed(variances).masked_fill(variances.isnan().any(-1)[..., None, None], math.nan)


def _shift_profile(
    part: AttentionOperator, block: int | None
) -> tuple[Float64[Tensor, "shifts"], Float64[Tensor, "h shifts"]]:
    """Every shift between a query and an image key of one axis, and its mean weight over queries W(shift)."""
    (axis,) = part.grid.axes
    last = axis.stride * (axis.queries - 1) + axis.offset
    count = axis.stride * (axis.queries - 1) + axis.spacing * (axis.size - 1) + 1
    values = torch.arange(count, device=part.device) - last
    totals = torch.zeros(part.heads, count, dtype=torch.float64, device=part.device)
    rows_with_mass = totals.new_zeros(part.heads, 1)
    for some in all_queries(part.grid, part.device).split(_rows_at_a_time(part, block)):
        weights, has_mass = _weights(part.rows(some)[0].double())  # (h, r, m)
        totals.index_add_(1, (_shifts(axis, some) + last).flatten(), weights.flatten(1))
        rows_with_mass += has_mass.sum(-1, keepdim=True)
    return values.double(), totals / rows_with_mass


def _product_distance(profiles: Sequence[tuple[Tensor, Tensor]]) -> Float64[Tensor, "h"]:
    """sum over all shifts of W_1(delta_1) W_2(delta_2) .. |delta|, some shifts of the first axis at a time."""
    (shifts, profile), *others = profiles
    squares, joint = shifts.new_zeros(1), torch.ones_like(profile[:, :1])
    for values, weights in others:
        squares = (squares[:, None] + values.square()).flatten()
        joint = (joint[:, :, None] * weights[:, None, :]).flatten(1)  # (h, shifts of the other axes)
    length = max(1, BLOCK // len(squares))
    total = joint.new_zeros(len(joint))
    for some, weights in zip(shifts.split(length), profile.split(length, 1), strict=True):
        total += ((weights @ (some.square()[:, None] + squares).sqrt()) * joint).sum(-1)
    return total
