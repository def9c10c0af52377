"""How much attention each head gives to every shift, and how constant that pattern is as the query moves.

With delta = key - query in pixels, Q(delta) the looked-at queries q for which q + delta is one of the image's keys, and
rows that are taken as they are, not renormalised,

    profile    p_h(delta) = mean over q in Q(delta) of A_h[q, q + delta]

for all delta that, along each axis, at least half as many queries can have as any shift: where queries stand on the
pixels, at most half of the axis either way; without padding, queries end before the image does, and shifts go farther
that way. The head of a convolution has p = 1 at its tap under every border rule, since queries whose tap leaves the
image are not asked.

    constancy  c_h = sum_delta |Q(delta)| p_h(delta)^2 / sum_delta sum_{q in Q(delta)} A_h[q, q + delta]^2

is the part of the squared probabilities that the mean pattern explains. It is taken over queries whose field has its
middle at least a quarter of each axis away from its ends, so that no border rule is felt by taps that reach no farther
from there. The middle of the field is where the middle query looks if the middle of the image is what it looks at,

    middle = middle of the keys - middle of the queries,

0 where queries stand on the pixels, (K - 1) / 2 for a kernel of K taps without padding. By the inequality of Cauchy
and Schwarz it is at most 1, and 1 only if A_h[q, q + delta] is the same for all those q: a convolution, with however
many soft taps. Rows without a common key have about 1 / (number of queries).

Each query adds one window of its row to running sums, a block of rows at a time; nothing has queries x keys numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from attnconv._util.errors import bad
from attnconv._util.value_checks import whole
from attnconv.grid import Axis, Grid
from attnconv.operators.base import AttentionOperator, Queries, all_queries, query_indices

BLOCK = 2**22  # probabilities held at once, as in `moments`


@final
@dataclass(frozen=True, eq=False)
class ShiftProfile:
    """Mean attention per shift of one layer's heads: see the module's formulas.

    Attributes:
        mass: p_h(delta), one axis of shifts per axis of the grid, float64 between 0 and 1; entry i of an axis is its
            least shift + i. 0 where no looked-at query has that shift.
        counts: The size of Q(delta) over all images, with the axes of shifts alone, int64.
        noise: Variance of each p_h(delta) as a mean over its queries, v_h(delta) = s^2 / (n - 1), shaped like `mass`:
            s^2 that of A_h[q, q + delta] over queries and images, n the queries of one image. Images do not make it
            smaller, since what a head does by position they all share. 0 at the tap of a convolution.
        constancy: c_h, (h,) float64 from 0 to 1. NaN for a head without mass at the inner queries.
        reach: The least and the largest shift per axis, in pixels: minus and plus half the axis, rounded down, where
            queries stand on the pixels.
        middle: Between which shifts the middle of the layer's field lies, per axis: 0 and 0 where queries stand on the
            pixels; a range of several where a stride leaves pixels over.
        key_count: Number of keys m of an image.
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
        """Every shift, row-major as in `mass.flatten(1)`."""
        lines = [torch.arange(least, most + 1, device=self.mass.device) for least, most in self.reach]
        return torch.stack(torch.meshgrid(*lines, indexing="ij"), -1).flatten(0, -2)


def shift_profile(
    operator: AttentionOperator, *, queries: Queries | None = None, block: int | None = None
) -> ShiftProfile:
    """The mean attention per shift of an operator's heads, over its queries and images.

    Args:
        operator: The attention probabilities.
        queries: Flat query indices to look at, as from `sample_queries`; None for all of the grid's. Under about a
            hundred, chance is no longer small: a single row is its own mean.
        block: Rows at a time, at least 1; None for as many as make 2^22 probabilities over all heads and images.

    Raises:
        TypeError: `block` is no whole number, or `queries` are none.
        ValueError: `block` is below 1, or `queries` is empty or outside the grid.

    Example:
        >>> from attnconv import Grid, Shift
        >>> profile = shift_profile(Shift(Grid.make((6,)), [(1,), (-2,)], torch.zeros(())))
        >>> profile.mass[0].round(decimals=3).tolist()  # shifts -3 .. 3; the last pixel attends itself
        [0.0, 0.0, 0.0, 0.167, 1.0, 0.0, 0.0]
    """
    running = RunningShiftProfile()
    running.add(operator, queries=queries, block=block)
    return running.result()


@final
class RunningShiftProfile:
    """The profile of one layer over several batches of images: `add` each batch's operator, then ask for the `result`.

    Images count alike, but for an operator that all images share, which counts as one.

    Example:
        >>> from attnconv import Dense, Grid
        >>> grid, running = Grid.make((5,)), RunningShiftProfile()
        >>> for seed in range(3):
        ...     generator = torch.Generator().manual_seed(seed)
        ...     running.add(Dense.from_scores(grid, torch.randn(2, 4, 5, 5, generator=generator)))
        >>> running.result().mass.shape
        torch.Size([4, 5])
    """

    def __init__(self) -> None:
        self._grid: Grid | None = None

    @torch.no_grad()
    def add(self, operator: AttentionOperator, *, queries: Queries | None = None, block: int | None = None) -> None:
        """Take in the images of one operator; the arguments are those of `shift_profile`.

        Raises:
            TypeError, ValueError: As `shift_profile`, or the operator has another grid or other heads than the first.
        """
        chosen, rows_at_once = checked(operator, queries, block)
        if self._grid is None:
            self._start(operator)
        if self._grid != operator.grid or len(self._mass) != operator.heads:
            got = f"{operator.heads} heads on {operator.grid.query_sizes} queries and {operator.grid.sizes} keys"
            requirement = f"must have the grid and the {len(self._mass)} heads of the first operator"
            raise ValueError(bad("operator", requirement, got, "Keep one accumulator per layer."))
        grid, reach = operator.grid, self._reach
        shape = [most - least + 1 for least, most in reach]
        everywhere = _Windows(operator.batch, operator.heads, shape, operator.device)
        inside = _Windows(operator.batch, operator.heads, shape, operator.device)
        for some in chosen.split(rows_at_once):
            rows = operator.rows(some).unflatten(-1, grid.sizes)
            positions = _positions(grid, some)
            for number, (position, inner) in enumerate(zip(positions.tolist(), _inner(grid, positions), strict=True)):
                keys, places = _window(grid, position, reach)
                row = rows[(slice(None), slice(None), number, *keys)].double()  # (b, h, some keys per axis)
                everywhere.add(row, places)
                if inner:
                    inside.add(row, places)
        self._images += operator.batch
        self._mass += everywhere.totals.sum(0)
        self._mass_squares += everywhere.squares
        self._counts += operator.batch * everywhere.counts
        explained = inside.totals.square() / inside.counts.clamp_min(1)
        self._explained += explained.flatten(2).sum((0, -1))
        self._squares += inside.squares.flatten(1).sum(-1)

    def result(self) -> ShiftProfile:
        """The profile of all operators so far.

        Raises:
            ValueError: None was added.
        """
        if self._grid is None:
            raise ValueError(bad("operator", "must be added before the result", "none", "Call add(operator) first."))
        constancy = self._explained / self._squares.where(self._squares > 0, math.nan)
        counts = self._counts.clamp_min(1)
        mass = self._mass / counts
        spread = (self._mass_squares / counts - mass.square()).clamp_min(0.0)
        return ShiftProfile(
            mass=mass,
            counts=self._counts.clone(),
            noise=spread / (counts / self._images - 1).clamp_min(1.0),
            constancy=constancy.clamp_max(1.0),  # rounding alone goes beyond
            reach=self._reach,
            middle=tuple(_middle(axis) for axis in self._grid.axes),
            key_count=self._grid.key_count,
        )

    def _start(self, operator: AttentionOperator) -> None:
        self._grid = operator.grid
        self._reach = tuple(_reach(axis) for axis in operator.grid.axes)
        shape = [most - least + 1 for least, most in self._reach]
        self._mass = torch.zeros(operator.heads, *shape, dtype=torch.float64, device=operator.device)
        self._counts = torch.zeros(shape, dtype=torch.int64, device=operator.device)
        self._mass_squares = torch.zeros_like(self._mass)
        self._images = 0
        self._explained = self._mass.new_zeros(operator.heads)
        self._squares = self._mass.new_zeros(operator.heads)


def at_shift(
    rows: Float[Tensor, "*lead n n"], grid: tuple[int, int], shift: tuple[int, int]
) -> Float[Tensor, "*lead q"]:
    """A[q, q + delta] for the queries q in Q(delta), from all rows of a small image at once.

    Args:
        rows: Queries by keys, both row-major.
        grid: Height and width of the image.
        shift: delta, rows and columns.

    Returns:
        One number per query whose shift stays inside; none where there is no such query. Their mean is p(delta).

    Example:
        >>> at_shift(
        ...     torch.arange(16.0).reshape(4, 4), (2, 2), (0, 1)
        ... ).tolist()  # from the left column to the right
        [1.0, 11.0]
    """
    (height, width), (down, right) = grid, shift
    index = torch.arange(height * width, device=rows.device).reshape(height, width)
    lines = slice(max(0, -down), max(0, height - max(0, down)))
    columns = slice(max(0, -right), max(0, width - max(0, right)))
    queries = index[lines, columns].flatten()
    return rows[..., queries, queries + down * width + right]


def checked(operator: AttentionOperator, queries: Queries | None, block: int | None) -> tuple[Tensor, int]:
    """The queries to look at and how many of their rows at a time.

    Raises:
        TypeError, ValueError: As `shift_profile`.
    """
    if block is not None:
        block = whole("block", block, 1)
    else:
        block = max(1, BLOCK // (operator.batch * operator.heads * operator.grid.lattice_count))
    if queries is None:
        return all_queries(operator.grid, operator.device), block
    queries = query_indices(queries, operator.grid, operator.device)
    if queries.numel() == 0:
        raise ValueError(bad("queries", "must hold at least one query", 0, "Pass None for all."))
    return queries.to(operator.device), block


@final
class _Windows:
    """Sums over queries of the windows of their rows, by shift and head; of the squares over images as well."""

    def __init__(self, batch: int, heads: int, shape: Sequence[int], device: torch.device) -> None:
        self.totals = torch.zeros(batch, heads, *shape, dtype=torch.float64, device=device)
        self.squares = self.totals.new_zeros(heads, *shape)
        self.counts = torch.zeros(*shape, dtype=torch.int64, device=device)

    def add(self, row: Tensor, places: tuple[slice, ...]) -> None:
        """One query's probabilities, (b, h, some keys per axis), at the shifts where they stand."""
        self.totals[(slice(None), slice(None), *places)] += row
        self.squares[(slice(None), *places)] += row.square().sum(0)
        self.counts[places] += 1


def _extent(axis: Axis) -> int:
    """Pixels from the first key to the last."""
    return axis.spacing * (axis.size - 1) + 1


def _reach(axis: Axis) -> tuple[int, int]:
    """The least and the largest shift that at least half as many queries can have as any shift."""
    extent, positions = _extent(axis), axis.query_positions()
    shifts = torch.arange(-int(positions[-1]), extent - int(positions[0]))
    ends = torch.searchsorted(positions, extent - 1 - shifts, right=True)  # queries from -shift to extent - 1 - shift
    counts = ends - torch.searchsorted(positions, -shifts)
    kept = shifts[2 * counts >= counts.max()]
    return int(kept[0]), int(kept[-1])


def _middle(axis: Axis) -> tuple[int, int]:
    """Between which shifts the middle of a query's field lies.

    Twice the middle is what queries leave over, key after key, less what they leave before. Of a stride up to
    stride - 1 of it may be pixels that no kernel reached; keys that stand apart hide as much the other way.
    """
    positions = axis.query_positions()
    twice = _extent(axis) - 1 - int(positions[0]) - int(positions[-1])
    least, most = -((axis.stride - 1 - twice) // 2), (twice + axis.spacing - 1) // 2
    if least > most:  # half a pixel: an even kernel, which has a tap on either side
        least = most = int(twice / 2)
    return least, most


def _positions(grid: Grid, queries: Tensor) -> Int[Tensor, "r dims"]:
    indices = zip(grid.axes, grid.unravel(queries), strict=True)
    return torch.stack([axis.stride * index + axis.offset for axis, index in indices], -1)


def _inner(grid: Grid, positions: Int[Tensor, "r dims"]) -> list[bool]:
    """Of which queries the field's middle is at least a quarter of every axis away from its ends."""
    inner: Bool[Tensor, "r"] = torch.ones(len(positions), dtype=torch.bool, device=positions.device)
    for axis, position in zip(grid.axes, positions.unbind(-1), strict=True):
        margin, (least, most) = _extent(axis) // 4, _middle(axis)
        middle = position + min(max(0, least), most)
        inner = inner & (middle >= margin) & (middle <= _extent(axis) - 1 - margin)
    return inner.tolist()


def _window(
    grid: Grid, position: Sequence[int], reach: Sequence[tuple[int, int]]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Per axis: the keys within reach of a query, and the places of their shifts; both empty where there is none."""
    keys, places = [], []
    for axis, here, (least, most) in zip(grid.axes, position, reach, strict=True):
        first = max(0, -((-least - here) // axis.spacing))  # the least k with spacing k - here >= least
        last = min(axis.size - 1, (here + most) // axis.spacing)
        count = max(0, last - first + 1)
        place = axis.spacing * first - here - least
        keys.append(slice(first, first + count))
        places.append(slice(place, place + axis.spacing * (count - 1) + 1, axis.spacing) if count else slice(0, 0))
    return tuple(keys), tuple(places)
