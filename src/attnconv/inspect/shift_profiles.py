"""Mean attention of each head at each shift, and how constant this pattern is as the query moves.

Let A_h be the attention probabilities of head h, delta = key - query in positions, and Q(delta) the chosen queries q
to which delta is available, that is, for which q + delta is a key of the image (of the query's window, if attention is
restricted to windows). Then

    profile    p_h(delta) = mean over q in Q(delta) of A_h[q, q + delta]                     rows are not renormalised

for each delta that, along each axis, is available to at least half as many queries as any other shift: with
one query per position, up to half of the axis in each direction. A head that implements a tap has p = 1 at this tap.

    constancy  c_h = sum_delta |Q(delta)| p_h(delta)^2 / sum_delta sum_{q in Q(delta)} A_h[q, q + delta]^2

is the share of the map's energy (its squared probabilities) that survives the projection on the shift-invariant
(Toeplitz) matrices. It is 1 only if A_h[q, q + delta] is the same for all q, as in a convolution. It uses only queries
whose receptive field is centred at least a quarter of each axis away from the ends. The shift from a query to that
centre is the mean key position minus the mean query position: 0 with one query per position, (K - 1) / 2 for a kernel
of K taps without padding.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.grid import Axis, Grid
from attnconv.inspect.chosen_queries import query_blocks
from attnconv.inspect.exact_sums import ExactSum
from attnconv.operators.base import AttentionOperator, Queries, WindowRows


@final
@dataclass(frozen=True, eq=False)
class ShiftProfile:
    """Mean attention of each head of one layer at each shift.

    Attributes:
        mass: p_h(delta), (h, *shifts) float64, 0 to 1, with one axis per axis of the grid; 0 where `counts` is 0.
        counts: Number of queries q with a key at q + delta, added over images, (*shifts) int64.
        noise: Estimated sampling variance of p_h(delta), shaped like `mass`: s^2 / (n - 1), with s^2 the variance of
            A_h[q, q + delta] over queries and images, and n the number of these queries in one image.
        constancy: Share of the attention map's energy that survives the projection on shift-invariant matrices, 0 to 1,
            (h,) float64; NaN if all attention is 0.
        reach: Smallest and largest shift in `mass` along each axis, in positions.
        middle: Smallest and largest possible shift from a query to the centre of its receptive field, for each axis.
        key_count: Number of keys to which a query can attend.
    """

    mass: Float64[Tensor, "h ..."]
    counts: Int[Tensor, "..."]
    noise: Float64[Tensor, "h ..."]
    constancy: Float64[Tensor, "h"]
    reach: tuple[tuple[int, int], ...]
    middle: tuple[tuple[int, int], ...]
    key_count: int

    @property
    def shifts(self) -> Int[Tensor, "s dims"]:
        """All shifts, in positions, in the order of `mass.flatten(1)`."""
        lines = [torch.arange(least, most + 1, device=self.mass.device) for least, most in self.reach]
        return torch.stack(torch.meshgrid(*lines, indexing="ij"), -1).flatten(0, -2)


def shift_profile(operator: AttentionOperator, *, queries: Queries | None = None) -> ShiftProfile:
    """Compute the mean attention of each head at each shift, over the queries and images of an operator.

    Args:
        operator: The attention probabilities.
        queries: Flat query indices; None for all. Use at least 100 queries, since means over fewer are mostly noise.

    Raises:
        TypeError: If `queries` contains values that are not integers.
        ValueError: If `queries` is empty or contains an index outside the grid.

    Example:
        >>> from attnconv import Grid, Shift
        >>> profile = shift_profile(Shift(Grid.make((6,)), [(1,), (-2,)], torch.zeros(())))
        >>> profile.mass[0].round(decimals=3).tolist()  # shifts -3 to 3; the last query attends to itself
        [0.0, 0.0, 0.0, 0.167, 1.0, 0.0, 0.0]
    """
    running = RunningShiftProfile()
    running.add(operator, queries=queries)
    return running.result()


@final
class RunningShiftProfile:
    """Profile of one layer, accumulated over batches of images: `add` one operator per batch, then call `result`.

    All images have equal weight; an operator shared by a batch counts as one image. The order of the batches does not
    matter, and they can be added to several accumulators, which are then combined with `merge`.
    """

    def __init__(self) -> None:
        self._grid: Grid | None = None
        self._keys = 0  # number of keys of a window; 0 without windows

    @torch.no_grad()
    def add(self, operator: AttentionOperator, *, queries: Queries | None = None) -> None:
        """Add an operator; raise a `ValueError` if its grid or number of heads is not that of the first operator."""
        blocks = query_blocks(operator, queries)
        with self.adding(operator) as add:
            for some in blocks:
                add(some, operator.window_rows(some))

    @contextmanager
    def adding(self, operator: AttentionOperator) -> Iterator[Callable[[Int[Tensor, "r"], WindowRows], None]]:
        """Return a function that adds the rows of some queries; the sums are complete after the `with` block."""
        if self._grid is None:
            self._begin(operator.grid, operator.heads, operator.device)
        self._check("operator", operator.grid, operator.heads)
        grid, sizes = operator.grid, self._counts.shape
        shifts = self._counts.numel() + 1  # the last one stands for all shifts that are out of reach
        counts = self._counts.new_zeros(2, shifts)  # of all queries and of the inner ones, per image
        sums = self._sums.high.new_zeros(2, operator.heads, shifts)
        totals = sums.new_zeros(operator.batch * operator.heads, shifts)  # over the inner queries
        inner_squares = sums.new_zeros(operator.heads, shifts)

        def add(queries: Int[Tensor, "r"], window: WindowRows) -> None:
            index = queries.new_zeros(len(queries), 1)  # of each entry's shift
            kept, inner = torch.ones_like(index, dtype=torch.bool), torch.ones_like(queries, dtype=torch.bool)
            for axis, number, size, (least, most), shift in zip(
                grid.axes, grid.unravel(queries), sizes, self._reach, window.shifts, strict=True
            ):
                first, last = _inner_range(axis)
                position = axis.query_positions(queries.device)[number]
                inner &= (position >= first) & (position <= last)
                index = (index[:, :, None] * size + (shift - least)[:, None, :]).flatten(1)
                kept = (kept[:, :, None] & ((shift >= least) & (shift <= most))[:, None, :]).flatten(1)
            if window.present is not None:
                present = window.present.flatten(1)
                self._keys, kept = max(self._keys, int(present.sum(1).max())), kept & present
            index = index.where(kept, shifts - 1)
            rows = window.rows.flatten(3)  # (b, h, r, m)
            squares = rows.square().sum(0)
            for total, each in zip(sums, (rows.sum(0), squares), strict=True):
                total.scatter_add_(1, index.flatten().expand(len(total), -1), each.flatten(1))
            counts[0] += index.flatten().bincount(minlength=shifts)
            some = inner.nonzero().squeeze(1)
            index = index[some].flatten()
            inner_squares.scatter_add_(1, index.expand(len(inner_squares), -1), squares[:, some].flatten(1))
            totals.scatter_add_(1, index.expand(len(totals), -1), rows[:, :, some].flatten(2).flatten(0, 1))
            counts[1] += index.bincount(minlength=shifts)

        yield add
        explained = (totals.square() / counts[1].clamp_min(1)).unflatten(0, (operator.batch, operator.heads)).sum(0)
        self._images += operator.batch
        self._counts += operator.batch * counts[0, :-1].unflatten(0, sizes)
        self._sums += ExactSum.of(sums[..., :-1].unflatten(-1, sizes))
        self._shares += ExactSum.of(torch.stack((explained, inner_squares))[..., :-1].unflatten(-1, sizes))

    def merge(self, other: "RunningShiftProfile") -> None:
        """Add all operators of another accumulator; raise a `ValueError` if its grid or number of heads differs."""
        if other._grid is None:
            return
        heads = other._sums.high.shape[1]
        if self._grid is None:
            self._begin(other._grid, heads, other._counts.device)
        self._check("other", other._grid, heads)
        self._images += other._images
        self._keys = max(self._keys, other._keys)
        self._counts += other._counts
        self._sums += other._sums
        self._shares += other._shares

    def _begin(self, grid: Grid, heads: int, device: torch.device) -> None:
        self._grid, self._reach = grid, tuple(_reach(axis) for axis in grid.axes)
        shape = [most - least + 1 for least, most in self._reach]
        self._images, self._counts = 0, torch.zeros(shape, dtype=torch.int64, device=device)
        zeros = torch.zeros(2, heads, *shape, dtype=torch.float64, device=device)
        self._sums = ExactSum.of(zeros)  # of the attention at each shift, and of its square
        self._shares = ExactSum.of(zeros)  # numerator and denominator of the constancy, at each shift

    def _check(self, name: str, grid: Grid, heads: int) -> None:
        first = self._sums.high.shape[1]
        if self._grid != grid or first != heads:
            got = f"{heads} heads on {grid.query_sizes} queries and {grid.sizes} keys"
            requirement = f"must have the same grid and number of heads ({first}) as the first operator"
            raise ValueError(bad(name, requirement, got, "Use a separate accumulator for each layer."))

    def _in_reach(self) -> Tensor:
        """Return which shifts are available to enough queries of their windows; all, without windows."""
        inside = torch.ones_like(self._counts, dtype=torch.bool)
        for axis in range(self._counts.dim()) if self._keys else ():
            most = self._counts.movedim(axis, 0).flatten(1).amax(1)
            inside &= (2 * most >= most.max()).reshape([-1 if each == axis else 1 for each in range(inside.dim())])
        return inside

    def result(self) -> ShiftProfile:
        """Return the profile of all operators added so far; raise a `ValueError` if there is none."""
        if self._grid is None:
            raise ValueError(bad("operator", "must be added before calling result()", "none", "Call add(operator)."))
        inside = self._in_reach()
        explained, squares = self._shares.value().where(inside, 0).flatten(2).sum(2)
        constancy = explained / squares.where(squares > 0, math.nan)
        numbers = self._counts.where(inside, 0)
        counts = numbers.clamp_min(1)
        mass, mean_squares = (self._sums.value() / counts).where(numbers > 0, 0)
        spread = (mean_squares - mass.square()).clamp_min(0.0)
        return ShiftProfile(
            mass=mass,
            counts=numbers,
            noise=spread / (counts / self._images - 1).clamp_min(1.0),
            constancy=constancy.clamp_max(1.0),  # rounding can push it above 1
            reach=self._reach,
            middle=tuple(_middle(axis) for axis in self._grid.axes),
            key_count=self._keys or self._grid.key_count,
        )


def _extent(axis: Axis) -> int:
    """Return the number of positions from the first key to the last, inclusive."""
    return axis.spacing * (axis.size - 1) + 1


def _reach(axis: Axis) -> tuple[int, int]:
    """Return the smallest and largest shift available to at least half as many queries as the most available one."""
    extent, positions = _extent(axis), axis.query_positions()
    shifts = torch.arange(-int(positions[-1]), extent - int(positions[0]))
    ends = torch.searchsorted(positions, extent - 1 - shifts, right=True)  # queries from -shift to extent - 1 - shift
    counts = ends - torch.searchsorted(positions, -shifts)
    kept = shifts[2 * counts >= counts.max()]
    return int(kept[0]), int(kept[-1])


def _middle(axis: Axis) -> tuple[int, int]:
    """Return the smallest and largest shift that may be the centre of a query's receptive field."""
    positions = axis.query_positions()
    # Number of positions after the last query minus number before the first. Up to stride - 1 positions at the end are
    # unused; with spaced keys, up to spacing - 1 are missing.
    twice = _extent(axis) - 1 - int(positions[0]) - int(positions[-1])
    least, most = -((axis.stride - 1 - twice) // 2), (twice + axis.spacing - 1) // 2
    if least > most:  # an even kernel: its centre is between two taps
        least = most = int(twice / 2)
    return least, most


def _inner_range(axis: Axis) -> tuple[int, int]:
    """Return the first and last position of the queries that constancy uses."""
    margin, (least, most) = _extent(axis) // 4, _middle(axis)
    middle = min(max(0, least), most)
    return margin - middle, _extent(axis) - 1 - margin - middle
