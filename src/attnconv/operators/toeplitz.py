"""Toeplitz operator: scores that depend only on the shift but need not be a sum over axes.

    A_h[q, k] = softmax_k s_h(k - q)

If the problem is small, all rows are computed at once. Otherwise heads are computed one at a time by the cheaper of two
methods. *Windows*: each tile of neighbouring queries uses only a box of keys, outside which all weights are below eps^2
times the largest of their row. Tiles with the same relative box share probabilities. *Spectrum*: an FFT in float64,

    A V = correlation(V, exp s) / correlation(1, exp s)

Rows whose sum is a tiny part of the total (because their centre is far outside the image) are computed separately.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnconv.grid import Axis, Grid
from attnconv.operators.base import (
    Images,
    LatticeOperator,
    Outputs,
    Weights,
    all_queries,
    full_precision,
    has_values,
    product_dtype,
    score_dtype,
)
from attnconv.operators.dense import Dense
from attnconv.operators.kernels import block_sizes
from attnconv.operators.kernels.contractions import banded_softmax, project, project_heads
from attnconv.operators.kernels.recompute_in_backward import (
    Gradients,
    checkpointed,
    is_transformed,
    recomputing,
    recorded,
)

PRODUCT = 25e9  # flops per second of windows, including their softmax; compared with `SPECTRUM` to choose the method
SPECTRUM = 5e9  # flops per second of transforms in float64
TRUSTED = 1e-4  # minimum share of a row in the sum of all weights for which float64 rounds less than float32 would


@final
class Toeplitz(LatticeOperator):
    """Attention operator defined by a table of scores over shifts.

    Args:
        grid: Grid of queries and keys.
        table: Scores (h, *shifts) in float32 or float64, for the shifts `Axis.all_shifts` along each axis. Use
            float64 for sharp heads centred far from all keys, whose scores are large and differ little.
        dtype: Dtype of the probabilities; None for that of the table.
    """

    batch = 1

    def __init__(self, grid: Grid, table: Float[Tensor, "h *shifts"], *, dtype: torch.dtype | None = None) -> None:
        self.grid = grid
        self.table = table
        self.dtype = table.dtype if dtype is None else dtype
        self.heads = table.shape[0]
        self.device = table.device

    def contract(self, x: Images, weight: Weights, groups: int = 1) -> Outputs:
        if (dense := self._all_rows()) is not None:
            return dense.contract(x, weight, groups)
        dtype = product_dtype(x)

        def share(wide: Tensor, matrix: Tensor, table: Tensor) -> Tensor:  # in the order that mixes fewer channels
            values = wide.to(dtype)
            if matrix.shape[2] < values.shape[-1]:
                out = mix_by_shift(self.grid, project_heads(values, matrix, groups)[..., 0, :], table)
            else:
                out = project(mix_by_shift(self.grid, values, table)[..., None, :], matrix, groups)
            return out.to(wide.dtype)

        with full_precision(x.device):
            # Sums over heads, including those of gradients, are in at least float32.
            wide = _points_first(self.grid, x.to(dtype)).to(score_dtype(dtype))
            heads = zip(weight.to(dtype)[:, None], self.table, strict=True)
            shares = (checkpointed(share, wide, matrix, table) for matrix, table in heads)
            out = functools.reduce(torch.add, shares).to(dtype)
        return out.transpose(0, 1).unflatten(1, self.grid.query_sizes)

    def apply(self, values: Float[Tensor, "b h *sizes e"]) -> Float[Tensor, "b h *queries e"]:
        if (dense := self._all_rows()) is not None:
            return dense.apply(values)
        mix = functools.partial(mix_by_shift, self.grid)
        heads = zip(values.unbind(1), self.table, strict=True)
        mixed = [checkpointed(mix, _points_first(self.grid, head), table) for head, table in heads]
        return torch.stack(mixed).permute(2, 0, 1, 3).unflatten(2, self.grid.query_sizes)

    def lattice_rows(self, queries: Int[Tensor, "r"]) -> Float[Tensor, "1 h r lattice"]:
        return shift_rows(self.grid, self.table, queries, self.dtype)[None]

    def _all_rows(self) -> Dense | None:
        """Return the whole matrix if the problem is small, otherwise None."""
        count = self.heads * self.grid.query_count * self.grid.lattice_count
        if has_values(self.table) and count > block_sizes.ALL_ROWS:
            return None
        return Dense(self.grid, self.grid.fold(self.lattice_rows(all_queries(self.grid, self.device))))


@final
@dataclass(frozen=True)
class Tiles:
    """Tiles of neighbouring queries along an axis that use the same relative range of keys."""

    queries: int  # queries per tile
    keys: int  # keys per tile
    start: int  # first key minus stride * first query
    firsts: tuple[int, ...]  # first query of each tile


Box: TypeAlias = tuple[Tiles, ...]  # one element per axis
Cover: TypeAlias = tuple[tuple[Tiles, ...], ...]  # all tiles of each axis


def mix_by_shift(
    grid: Grid, values: Float[Tensor, "lattice *columns"], table: Float[Tensor, "*shifts"]
) -> Float[Tensor, "queries *columns"]:
    """Compute A V for one head from its scores of the shifts `Axis.all_shifts`, in float32 or float64.

    The spectrum saves intermediate results for the backward pass, unless the caller uses `checkpointed`.
    """
    if not has_values(table) or is_transformed():
        return mix_plainly(grid, values, table)
    flat = values.flatten(1)
    tiles = tiles_of(grid, table, values.dtype)
    if _prefers_spectrum(grid, tiles, flat, table):
        parts = flat.split(max(block_sizes.SPECTRUM_BLOCK // (8 * math.prod(_lengths(grid))), 1), 1)
        mix = functools.partial(_mix_spectrum, grid)
        mixed = [mix(part, table) if len(parts) == 1 else checkpointed(mix, part, table) for part in parts]
        return torch.cat(mixed, 1).unflatten(1, values.shape[1:])
    return _mix_windows(grid, tiles)(flat, table).unflatten(1, values.shape[1:])


def mix_plainly(
    grid: Grid, values: Float[Tensor, "lattice *columns"], table: Float[Tensor, "*shifts"]
) -> Float[Tensor, "queries *columns"]:
    """Compute `mix_by_shift` with the whole matrix of the head."""
    rows = shift_rows(grid, table[None], all_queries(grid, table.device), score_dtype(values.dtype))[0]
    return (rows.to(values.dtype) @ values.flatten(1)).unflatten(1, values.shape[1:])


def _points_first(grid: Grid, images: Float[Tensor, "b *sizes c"]) -> Float[Tensor, "lattice b c"]:
    return grid.extend(images).flatten(1, -2).transpose(0, 1).contiguous()


def _prefers_spectrum(grid: Grid, tiles: Cover, values: Tensor, table: Tensor) -> bool:
    """Return whether transforms are cheaper than windows; they need a float64 table and values of at most 32 bits."""
    if table.dtype != torch.float64 or values.dtype == torch.float64:
        return False
    columns, points = values.shape[1], math.prod(_lengths(grid))
    by_windows = 2 * work_of(tiles) * columns / PRODUCT
    by_spectrum = 5 * points * points.bit_length() * columns / SPECTRUM
    if by_windows <= by_spectrum:
        return False
    apart = int((~_weights(grid, table)[2]).sum())  # rows computed separately
    return by_windows > by_spectrum + 2 * apart * grid.lattice_count * columns / PRODUCT


def _mix_spectrum(
    grid: Grid, values: Float[Tensor, "lattice c"], table: Float[Tensor, "*shifts"]
) -> Float[Tensor, "queries c"]:
    """Compute A V by FFT with differentiable operations; the table is in float64."""
    weights, sums, trusted = _weights(grid, table)
    images = values.mT.unflatten(1, grid.lattice_sizes).to(table.dtype)
    out = (_correlate(grid, weights, images) / sums.where(trusted, 1)).where(trusted, 0)
    out = out.to(values.dtype).flatten(1).mT
    apart = (~trusted).flatten().nonzero().flatten()
    if len(apart):

        def rows(queries: Tensor) -> Tensor:
            return shift_rows(grid, table[None], queries, score_dtype(values.dtype))[0].to(values.dtype) @ values

        count = max(block_sizes.ROWS_BLOCK // (4 * grid.lattice_count), 1)
        out = out.index_copy(0, apart, torch.cat([checkpointed(rows, part) for part in apart.split(count)]))
    return out


def shift_rows(
    grid: Grid, table: Float[Tensor, "h *shifts"], queries: Int[Tensor, "r"], dtype: torch.dtype
) -> Float[Tensor, "h r lattice"]:
    """Return rows of A over the lattice; score differences use the table's dtype, which may be wider than `dtype`."""
    windows = torch.zeros((queries.shape[0], 1), dtype=torch.int64, device=table.device)
    for axis, index in zip(grid.axes, grid.unravel(queries), strict=True):
        windows = (windows[:, :, None] * axis.shift_count + axis.windows(index)[:, None, :]).flatten(1)
    return banded_softmax(table.flatten(1)[:, windows], dtype)


def _weights(grid: Grid, table: Tensor) -> tuple[Tensor, Float[Tensor, "*queries"], Bool[Tensor, "*queries"]]:
    """Return exp s, its sum over each row, and a mask of the sums that are accurate."""
    weights = torch.exp(table - table.amax().detach())
    sums = _correlate(grid, weights, table.new_ones((1, *grid.lattice_sizes)))[0]
    return weights, sums, sums.detach() > TRUSTED * weights.detach().sum()


def _correlate(
    grid: Grid, weights: Float[Tensor, "*shifts"], images: Float[Tensor, "c *lattice"]
) -> Float[Tensor, "c *queries"]:
    """Compute sum_l w[l + start of the query's window] images[l], a convolution with the reversed weights."""
    lengths, axes = _lengths(grid), tuple(range(-grid.dims, 0))
    product = torch.fft.rfftn(weights.flip(axes), lengths, axes) * torch.fft.rfftn(images, lengths, axes)
    # Transforms of this length wrap around only to points before the first query.
    queries = (slice(axis.lattice_size - 1, axis.shift_count, axis.stride) for axis in grid.axes)
    out: Tensor = torch.fft.irfftn(product, lengths, axes)[(..., *queries)]
    return out


def fast_length(least: int) -> int:
    """Return the smallest length of a fast transform: 1, or an even number without prime factors above 5."""
    # These numbers divide a high power of 30. Importing `scipy.fft.next_fast_len` would use 15 MiB.
    return next(n for n in itertools.count(least) if n == 1 or (n % 2 == 0 and pow(30, 64, n) == 0))


def _lengths(grid: Grid) -> tuple[int, ...]:
    """Return, per axis, the length of a transform that covers all shifts."""
    return tuple(fast_length(axis.shift_count) for axis in grid.axes)


def tiles_of(grid: Grid, table: Float[Tensor, "*shifts"], dtype: torch.dtype) -> Cover:
    """Return, per axis, the tiles with the ranges of keys that contain all non-zero weights in `dtype`."""
    cut = 2 * math.log(torch.finfo(score_dtype(dtype)).eps)
    length = max(round(block_sizes.WINDOW_TILE ** (1 / grid.dims)), 1)
    tallest = functools.reduce(lambda peaks, dim: _per_query(peaks, dim, grid.axes[dim]), range(grid.dims), table)
    floors = cut + functools.reduce(lambda part, dim: _per_tile(part, dim, length, -1), range(grid.dims), tallest)
    found = []
    for dim, axis in enumerate(grid.axes):
        reach = table
        for other in range(grid.dims):
            if other != dim:
                reach = _per_tile(_per_query(reach, other, grid.axes[other]), other, length, 1)
        along = (part.movedim(dim, 0).reshape(part.shape[dim], -1) for part in (reach, floors))
        found.append(_along_axis(axis, *along, length=length))
    return tuple(found)


def work_of(tiles: Cover) -> int:
    """Return the number of query-key products in all tiles, per channel of the values."""
    return math.prod(sum(len(some.firsts) * some.queries * some.keys for some in along) for along in tiles)


@functools.lru_cache(maxsize=64)
def _mix_windows(grid: Grid, tiles: Cover) -> Callable[..., Tensor]:
    boxes = tuple(itertools.product(*tiles))
    forward, gradients = functools.partial(_forward, grid, boxes), functools.partial(_gradients, grid, boxes)
    return recomputing(functools.partial(mix_plainly, grid), forward, gradients)


def _forward(grid: Grid, boxes: Sequence[Box], values: Tensor, table: Tensor) -> Float[Tensor, "queries c"]:
    out = values.new_empty((grid.query_count, values.shape[1]))
    for box in boxes:
        weights = _weights_of(grid, box, values.dtype, _piece(grid, box, table)).to(values.dtype)
        for queries, keys in _portions(grid, box, values):
            mixed = weights @ _gathered(values, keys)
            out.index_copy_(0, queries.flatten(), mixed.view(queries.numel(), values.shape[1]))
    return out


def _gradients(
    grid: Grid, boxes: Sequence[Box], inputs: Sequence[Tensor], gradient: Tensor, wanted: Sequence[bool]
) -> Gradients:
    """Compute the gradients of values and table, with dA = G V^T some tiles at a time."""
    values, table = inputs
    to_values, to_table = torch.zeros_like(values), torch.zeros_like(table)
    for box in boxes:
        make = functools.partial(_weights_of, grid, box, values.dtype)
        weights, leaves = recorded(make, (_piece(grid, box, table),), (True,))
        cast, slopes = weights.detach().to(values.dtype), torch.zeros_like(weights)
        for queries, keys in _portions(grid, box, values):
            back = _gathered(gradient, queries)
            if wanted[0]:
                to_values.index_add_(0, keys.flatten(), (cast.mT @ back).view(keys.numel(), values.shape[1]))
            if wanted[1]:
                slopes += back @ _gathered(values, keys).mT
        if wanted[1]:
            _piece(grid, box, to_table).add_(torch.autograd.grad(weights, leaves, slopes)[0])
    return to_values if wanted[0] else None, to_table if wanted[1] else None


def _piece(grid: Grid, box: Box, table: Float[Tensor, "*shifts"]) -> Float[Tensor, "*piece"]:
    """Return a view of the scores of a tile, which are the same for all tiles of the box."""
    for dim, (axis, tiles) in enumerate(zip(grid.axes, box, strict=True)):
        start = axis.stride * (axis.queries - tiles.queries) + tiles.start
        table = table.narrow(dim, start, axis.stride * (tiles.queries - 1) + tiles.keys)
    return table


def _weights_of(
    grid: Grid, box: Box, dtype: torch.dtype, piece: Float[Tensor, "*piece"]
) -> Float[Tensor, "queries keys"]:
    """Compute the probabilities of a tile, in at least float32; the last query is first along each axis."""
    for dim, (axis, tiles) in enumerate(zip(grid.axes, box, strict=True)):
        piece = piece.unfold(dim, tiles.keys, axis.stride)
    return banded_softmax(piece.flatten(grid.dims).flatten(0, -2), score_dtype(dtype))


def _portions(grid: Grid, box: Box, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield indices of queries (queries, tiles) and keys (keys, tiles), for some tiles at a time."""
    arange = functools.partial(torch.arange, device=values.device)
    queries = keys = arange(1)[:, None]
    for axis, tiles in zip(grid.axes, box, strict=True):
        firsts = torch.tensor(tiles.firsts, device=values.device)
        queries = _extended(queries, axis.queries, firsts + arange(tiles.queries - 1, -1, -1)[:, None])
        keys = _extended(keys, axis.lattice_size, axis.stride * firsts + tiles.start + arange(tiles.keys)[:, None])
    count = max(block_sizes.WINDOW_BLOCK // (values.element_size() * max(keys.shape[0] * values.shape[1], 1)), 1)
    yield from zip(queries.split(count, 1), keys.split(count, 1), strict=True)


def _extended(points: Int[Tensor, "i t"], size: int, along: Int[Tensor, "j s"]) -> Int[Tensor, "i_j t_s"]:
    """Extend flat indices of tiles by an axis of `size` points."""
    return (points[:, None, :, None] * size + along[None, :, None, :]).flatten(2).flatten(0, 1)


def _gathered(rows: Float[Tensor, "points c"], places: Int[Tensor, "k tiles"]) -> Float[Tensor, "k tiles_c"]:
    return rows.index_select(0, places.flatten()).view(places.shape[0], places.shape[1] * rows.shape[1])


def _along_axis(
    axis: Axis, reach: Float[Tensor, "shifts others"], floors: Float[Tensor, "tiles others"], *, length: int
) -> tuple[Tiles, ...]:
    """Return the tiles of an axis.

    `reach` is the largest score of each shift for each tile of the other axes; scores below `floors` have weight 0.
    """
    found = dict[tuple[int, int, int], list[int]]()
    for tile, floor in enumerate(floors):
        first = tile * length
        queries = min(length, axis.queries - first)
        low = axis.stride * (axis.queries - first - queries)  # start of the window of the tile's last query
        high = axis.stride * (axis.queries - 1 - first)  # start of the window of its first query
        held = (~(reach[low : high + axis.lattice_size] < floor)).any(1).nonzero()  # NaN counts as a weight
        start = max(int(held[0]) + low - high, 0)
        stop = min(int(held[-1]) + 1, axis.lattice_size)
        found.setdefault((queries, stop - start, start - axis.stride * first), []).append(first)
    return tuple(Tiles(*same, tuple(firsts)) for same, firsts in found.items())


def _per_query(table: Tensor, dim: int, axis: Axis) -> Tensor:
    """Return the maximum over the window of each query along an axis of the table."""
    reach = 1
    while reach < axis.lattice_size:
        step = min(reach, axis.lattice_size - reach)
        count = table.shape[dim] - step
        table = torch.maximum(table.narrow(dim, 0, count), table.narrow(dim, step, count))
        reach += step
    starts = axis.stride * torch.arange(axis.queries - 1, -1, -1, device=table.device)
    return table.index_select(dim, starts)


def _per_tile(table: Tensor, dim: int, length: int, sign: int) -> Tensor:
    """Return the maximum (sign 1) or minimum (sign -1) over each tile along an axis of queries."""
    return sign * torch.stack([(sign * part).amax(dim) for part in table.split(length, dim)], dim)
