"""Moments of attention: where, how far and how widely heads attend, without storing all queries x keys probabilities.

A query's weights w are its probabilities A over the image's keys divided by their sum, its *mass*. The mass is below 1
if some attention falls on zero padding or class tokens. With the shifts delta = key - query in positions,

    centre        c_q = sum_k w_k delta_k
    covariance    C_q = sum_k w_k (delta_k - c_q) (delta_k - c_q)^T
    distance      d_q = sum_k w_k |delta_k|
    entropy       H_q = - sum_k w_k ln w_k                                               (0 ln 0 = 0)

are a query's moments. Those of a head are means over its queries with mass. If probabilities are products over axes
(`Kronecker`, `Shift`), means over all queries factorise, and no row over the whole image is computed:

    centre, variance, entropy    per axis, from n_a x m_a weights; entropies add up, and axes are uncorrelated
    distance                     sum_delta W_1(delta_1) W_2(delta_2) .. |delta|,  W_a(delta) = mean_q w_a[q, q + delta]
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from attnconv.grid import Grid
from attnconv.inspect.chosen_queries import BLOCK, query_blocks
from attnconv.operators.base import AttentionOperator, LatticeOperator, Queries, WindowRows
from attnconv.operators.kronecker import Kronecker
from attnconv.operators.shift import Shift


@final
@dataclass(frozen=True, eq=False)
class AttentionMoments:
    """Moments of the heads of one operator, averaged over queries; b is the operator's batch size.

    If a head does not attend to the image, its values are NaN, except `padding_mass` and `content_share`.

    Attributes:
        centre: Mean shift (key minus query), (b, h, dims) in positions.
        covariance: Mean covariance of a query's attention over positions, (b, h, dims, dims) in positions squared.
        distance: Mean Euclidean distance between query and key, (b, h) in positions.
        entropy: Mean entropy of a query's attention, (b, h) in nats.
        padding_mass: Mean attention outside the image (zero padding, class tokens) over all queries, (b, h), 0 to 1.
        content_share: Share of the variance of the probabilities that is due to differences between images, (h,), 0 to
            1: W / (W + B), with W the mean variance over images, and B the mean variance over keys (in the query's
            window) of the attention averaged over images, both corrected for the number of images. None if the
            operator's batch size is 1.
    """

    centre: Float64[Tensor, "b h dims"]
    covariance: Float64[Tensor, "b h dims dims"]
    distance: Float64[Tensor, "b h"]
    entropy: Float64[Tensor, "b h"]
    padding_mass: Float64[Tensor, "b h"]
    content_share: Float64[Tensor, "h"] | None


@torch.no_grad()
def attention_moments(operator: AttentionOperator, *, queries: Queries | None = None) -> AttentionMoments:
    """Compute the moments of each head and image, averaged over queries.

    Without `queries`, `Kronecker` and `Shift` are evaluated axis by axis. Pass a sample for other large operators.

    Args:
        operator: The attention probabilities, for example from `layer.operator(x)` or `attention_operators`.
        queries: Flat query indices, for example from `sample_queries`; None for all queries of the grid.

    Raises:
        TypeError: If `queries` contains values that are not integers.
        ValueError: If `queries` is empty or contains an index outside the grid.

    Example:
        >>> from attnconv import Grid, Kronecker
        >>> scores = [torch.zeros(1, 3, 3), torch.zeros(1, 4, 4)]  # uniform attention over 3 x 4 positions
        >>> moments = attention_moments(Kronecker.from_scores(Grid.make((3, 4)), scores))
        >>> moments.covariance[0, 0].round(decimals=3).tolist()  # (m^2 - 1) / 12 per axis
        [[0.667, 0.0], [0.0, 1.25]]
    """
    running = RunningMoments(operator, all_queries=queries is None)
    for some in query_blocks(operator, queries) if running.needs_rows else ():
        running.add(some, operator.window_rows(some))
    return running.result()


@final
class RunningMoments:
    """Moments of one operator, from blocks of queries: `add` each block, then call `result`.

    `needs_rows` is False if all queries are used and the operator is a product over axes; then `add` is not called.
    """

    def __init__(self, operator: AttentionOperator, *, all_queries: bool) -> None:
        self._operator, dims = operator, operator.grid.dims
        self._parts = _axis_operators(operator) if all_queries and dims > 1 else None
        self.needs_rows = self._parts is None
        self._queries = 0
        self._padding = torch.zeros(operator.batch, operator.heads, dtype=torch.float64, device=operator.device)
        self._with_mass = torch.zeros_like(self._padding)
        self._sums = self._padding.new_zeros(*self._padding.shape, dims + dims * dims + 2)
        self._shares = self._padding.new_zeros(2, operator.heads)
        # Lattice operators compute their rows again for the padding mass, which is 0 except under the border rule
        # `zero`.
        borders = (axis.border for axis in operator.grid.axes)
        self._padded = not isinstance(operator, LatticeOperator) or "zero" in borders

    def add(self, queries: Int[Tensor, "r"], window: WindowRows) -> None:
        operator = self._operator
        moments, has_mass = _row_moments(window)
        self._queries += len(queries)
        self._sums += moments.sum(2)
        self._with_mass += has_mass.sum(2)
        if self._padded:
            self._padding += operator.padding_mass(queries).double().sum(-1)
        if operator.batch > 1:
            self._shares += _variances(window)

    def result(self) -> AttentionMoments:
        if self._parts is not None:
            return _product_moments(self._parts)
        images, dims, content = self._operator.batch, self._operator.grid.dims, None
        if images > 1:  # W and B, with the bias of a finite number of images removed
            within = self._shares[0] * images / (images - 1)
            total = within + (self._shares[1] - within / images).clamp_min(0)
            content = within / total.where(total > 0, 1)
        means = (self._sums / self._with_mass[..., None]).split((dims, dims * dims, 1, 1), -1)
        centre, covariance, distance, entropy = means
        return AttentionMoments(
            centre=centre,
            covariance=covariance.unflatten(-1, (dims, dims)),
            distance=distance.squeeze(-1),
            entropy=entropy.squeeze(-1),
            padding_mass=self._padding / self._queries,
            content_share=content,
        )


def _weights(rows: Float64[Tensor, "*lead m"]) -> tuple[Float64[Tensor, "*lead m"], Bool[Tensor, "*lead"]]:
    """Return the rows divided by their mass, and which rows have mass; the others stay zero."""
    mass = rows.sum(-1)
    has_mass = mass != 0  # NaN counts as mass, so that it propagates
    return rows / mass.where(has_mass, 1)[..., None], has_mass


def _row_moments(window: WindowRows) -> tuple[Float64[Tensor, "b h r moments"], Bool[Tensor, "b h r"]]:
    """Compute each row's centre, covariance, distance and entropy (0 without mass), and which rows have mass."""
    weights, has_mass = _weights(window.rows.flatten(3))
    joint, dims = weights.unflatten(-1, window.rows.shape[3:]), len(window.shifts)
    shifts = [shift.double() for shift in window.shifts]
    lines = [_along(joint, axis) for axis in range(dims)]
    centres = [(line * shift).sum(-1) for line, shift in zip(lines, shifts, strict=True)]
    # Second moments about each row's own centre avoid cancellation.
    off = [shift - centre[..., None] for shift, centre in zip(shifts, centres, strict=True)]  # (b, h, r, m_a) each
    entries: dict[tuple[int, int], Tensor] = {}
    for a in range(dims):
        entries[a, a] = (lines[a] * off[a].square()).sum(-1)
        for b in range(a):
            plane = _along(joint, b, a)  # (b, h, r, m_b, m_a)
            entries[a, b] = entries[b, a] = ((plane @ off[a][..., None]).squeeze(-1) * off[b]).sum(-1)
    distances = shifts[0].new_zeros(len(shifts[0]), 1)
    for shift in shifts:
        distances = (distances[:, :, None] + shift.square()[:, None, :]).flatten(1)  # (r, keys so far)
    distance = (weights * distances.sqrt()).sum(-1)  # an einsum would copy all weights into a different memory order
    entropy = torch.special.entr(weights).sum(-1)
    moments = [*centres, *(entries[a, b] for a in range(dims) for b in range(dims)), distance, entropy]
    return torch.stack(moments, -1), has_mass


def _along(joint: Tensor, *axes: int) -> Tensor:
    """Sum weights (b, h, r, *sizes) over all axes except the given ones."""
    others = [dim for dim in range(3, joint.dim()) if dim - 3 not in axes]
    return joint.sum(others) if others else joint


def _variances(window: WindowRows) -> Float64[Tensor, "2 h"]:
    """Return variances summed over queries: over images (mean over keys), and over keys (of the mean over images)."""
    rows = window.rows.flatten(3)
    present = torch.ones((), dtype=torch.bool) if window.present is None else window.present.flatten(1)
    keys = present.expand(rows.shape[2:]).sum(-1)  # (r,)
    # Subtracting one of the values first makes the variance of equal probabilities exactly 0.
    off = rows - rows[:1]
    mean = off.mean(0)  # (h, r, m)
    within = off.sub_(mean).square_().sum((0, -1)) / (rows.shape[0] * keys)  # (h, r)
    mean = mean + (rows[0] - rows[0].amax(-1, keepdim=True)) * present
    around = (mean - mean.sum(-1, keepdim=True) / keys[:, None]) * present
    return torch.stack((within.sum(-1), (around.square().sum(-1) / keys).sum(-1)))


def _axis_operators(operator: AttentionOperator) -> list[AttentionOperator] | None:
    """Return operators of single axes whose product is the given operator; None if it is not such a product."""
    grids = [Grid((axis,)) for axis in operator.grid.axes]
    if isinstance(operator, Kronecker):
        parts = zip(grids, operator.factors, operator.padding_masses, strict=True)
        return [Kronecker(grid, [factor], [mass]) for grid, factor, mass in parts]
    if isinstance(operator, Shift):
        anchor = torch.zeros((), device=operator.device)
        return [Shift(grid, [(shift[a],) for shift in operator.shifts], anchor) for a, grid in enumerate(grids)]
    return None


def _product_moments(parts: Sequence[AttentionOperator]) -> AttentionMoments:
    """Compute the moments from operators along single axes, by the formulas in the module docstring."""
    moments = [attention_moments(part) for part in parts]
    entropy = torch.stack([of.entropy for of in moments]).sum(0)  # NaN if any axis has no mass
    absent = entropy.isnan()[..., None]
    variances = torch.cat([of.covariance[..., 0] for of in moments], -1)
    padding = torch.zeros_like(entropy)
    for of in moments:
        padding = padding + (1 - padding) * of.padding_mass
    return AttentionMoments(
        centre=torch.cat([of.centre for of in moments], -1).masked_fill(absent, math.nan),
        covariance=torch.diag_embed(variances).masked_fill(absent[..., None], math.nan),
        distance=_product_distance([_shift_weights(part) for part in parts])[None],
        entropy=entropy,
        padding_mass=padding,
        content_share=None,
    )


def _shift_weights(part: AttentionOperator) -> tuple[Float64[Tensor, "shifts"], Float64[Tensor, "h shifts"]]:
    """Return all shifts from a query to an image key along one axis, and their mean weights W(shift) over queries."""
    (axis,) = part.grid.axes
    last = axis.stride * (axis.queries - 1) + axis.offset
    count = axis.stride * (axis.queries - 1) + axis.spacing * (axis.size - 1) + 1
    totals = torch.zeros(part.heads, count, dtype=torch.float64, device=part.device)
    rows_with_mass = totals.new_zeros(part.heads, 1)
    for some in query_blocks(part):
        window = part.window_rows(some)
        weights, has_mass = _weights(window.rows[0])  # (h, r, m)
        totals.index_add_(1, (window.shifts[0] + last).flatten(), weights.flatten(1))
        rows_with_mass += has_mass.sum(-1, keepdim=True)
    shifts = torch.arange(count, device=part.device) - last
    return shifts.double(), totals / rows_with_mass


def _product_distance(weights_by_axis: Sequence[tuple[Tensor, Tensor]]) -> Float64[Tensor, "h"]:
    """Sum W_1(delta_1) W_2(delta_2) .. |delta| over all shifts, in blocks of the first axis."""
    (shifts, first), *others = weights_by_axis
    squares, joint = shifts.new_zeros(1), torch.ones_like(first[:, :1])
    for values, weights in others:
        squares = (squares[:, None] + values.square()).flatten()
        joint = (joint[:, :, None] * weights[:, None, :]).flatten(1)  # (h, shifts of the other axes)
    length = max(1, BLOCK // len(squares))
    total = joint.new_zeros(len(joint))
    for some, weights in zip(shifts.split(length), first.split(length, 1), strict=True):
        total += ((weights @ (some.square()[:, None] + squares).sqrt()) * joint).sum(-1)
    return total
