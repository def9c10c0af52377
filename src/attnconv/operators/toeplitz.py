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
from dataclasses import dataclass, replace
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
from attnconv.operators.kernels.contractions import banded_softmax, below_largest, project, project_heads
from attnconv.operators.kernels.recompute_in_backward import Gradients, checkpointed, recomputing, recorded

PRODUCT = 60e9  # flops per second of the products of windows; compared with `SPECTRUM` to choose the method
SPECTRUM = 2.5e9  # flops per second of transforms in float64
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
            wide = self.grid.extend(x.to(dtype)).to(score_dtype(dtype))
            heads = zip(weight.to(dtype)[:, None], self.table, strict=True)
            shares = (checkpointed(share, wide, matrix, table) for matrix, table in heads)
            return functools.reduce(torch.add, shares).to(dtype)

    def apply(self, values: Float[Tensor, "b h *sizes e"]) -> Float[Tensor, "b h *queries e"]:
        if (dense := self._all_rows()) is not None:
            return dense.apply(values)
        shown = self.grid.extend(values)
        return torch.stack([mix_by_shift(self.grid, shown[:, h], self.table[h]) for h in range(self.heads)], 1)

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
class Run:
    """Neighbouring tiles along an axis that use the same relative range of keys."""

    first: int  # first query
    tiles: int  # number of tiles
    queries: int  # queries per tile
    start: int  # first key of the first tile; each following tile starts stride * queries later
    keys: int  # keys per tile


Runs: TypeAlias = Sequence[Sequence[Run]]


def mix_by_shift(
    grid: Grid, values: Float[Tensor, "b *lattice c"], table: Float[Tensor, "*shifts"]
) -> Float[Tensor, "b *queries c"]:
    """Compute A V for one head from its scores of the shifts `Axis.all_shifts`, in float32 or float64."""
    return _mixing(grid)(values, table)


@functools.lru_cache(maxsize=64)
def _mixing(grid: Grid) -> Callable[..., Tensor]:
    partial = functools.partial
    return recomputing(partial(mix_plainly, grid), partial(_forward, grid), partial(_gradients, grid))


def mix_plainly(grid: Grid, values: Tensor, table: Tensor) -> Tensor:
    """Compute `mix_by_shift` with the whole matrix of the head."""
    queries = torch.arange(grid.query_count, device=table.device)
    rows = shift_rows(grid, table[None], queries, score_dtype(values.dtype))[0]
    return (rows.to(values.dtype) @ values.flatten(1, -2)).unflatten(1, grid.query_sizes)


def _forward(grid: Grid, values: Tensor, table: Tensor) -> Tensor:
    runs = runs_of(grid, table, values.dtype)
    if not _prefers_spectrum(grid, runs, values, table):
        return mix_windows(grid, runs, values, table)
    out = values.new_empty((values.shape[0], *grid.query_sizes, values.shape[-1]))
    for images, channels in _columns(grid, values):
        out[images, ..., channels] = _mix_spectrum(grid, values[images, ..., channels], table)
    return out


def _gradients(grid: Grid, inputs: Sequence[Tensor], gradient: Tensor, wanted: Sequence[bool]) -> Gradients:
    values, table = inputs
    runs = runs_of(grid, table, values.dtype)
    if not _prefers_spectrum(grid, runs, values, table):
        return window_gradients(grid, runs, values, table, gradient, wanted)
    totals = [torch.zeros_like(tensor) for tensor in inputs]
    for images, channels in _columns(grid, values):
        part = values[images, ..., channels]
        out, leaves = recorded(functools.partial(_mix_spectrum, grid), (part, table), (True, True))
        totals[0][images, ..., channels], to_table = torch.autograd.grad(out, leaves, gradient[images, ..., channels])
        totals[1] += to_table
    return tuple(total if want else None for total, want in zip(totals, wanted, strict=True))


def _columns(grid: Grid, values: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of images and of channels with about `SPECTRUM_BLOCK` bytes of values in float64."""
    most = max(block_sizes.SPECTRUM_BLOCK // (8 * math.prod(_lengths(grid))), 1)
    for images in block_sizes.spans(values.shape[0], max(most // values.shape[-1], 1)):
        for channels in block_sizes.spans(values.shape[-1], most):
            yield images, channels


def _prefers_spectrum(grid: Grid, runs: Runs, values: Tensor, table: Tensor) -> bool:
    """Return whether transforms are cheaper than windows; they need a float64 table and values of at most 32 bits."""
    if table.dtype != torch.float64 or values.dtype == torch.float64:
        return False
    columns = values.shape[0] * values.shape[-1]
    by_windows = 2 * work_of(runs) * columns / PRODUCT
    points = math.prod(_lengths(grid))
    by_spectrum = 5 * points * points.bit_length() * columns / SPECTRUM
    if by_windows <= by_spectrum:
        return False
    apart = int((~_weights(grid, table)[2]).sum())  # rows computed separately
    return by_windows > by_spectrum + 2 * apart * grid.lattice_count * columns / PRODUCT


def _mix_spectrum(
    grid: Grid, values: Float[Tensor, "b *lattice c"], table: Float[Tensor, "*shifts"]
) -> Float[Tensor, "b *queries c"]:
    """Compute A V by FFT with differentiable operations; the table is in float64."""
    weights, sums, trusted = _weights(grid, table)
    images = values.movedim(-1, 1).to(table.dtype)
    out = _correlate(grid, weights, images) / sums.where(trusted, 1)
    out = out.where(trusted, 0).to(values.dtype).movedim(1, -1).flatten(1, -2)  # (b, queries, c)
    apart = (~trusted).flatten().nonzero().flatten()
    if len(apart):
        flat = values.flatten(1, -2)

        def rows(queries: Tensor) -> Tensor:
            return shift_rows(grid, table[None], queries, score_dtype(flat.dtype))[0].to(flat.dtype) @ flat

        count = max(block_sizes.ROWS_BLOCK // (4 * grid.lattice_count), 1)
        parts = [checkpointed(rows, part) for part in apart.split(count)]
        out = out.index_copy(1, apart, torch.cat(parts, 1))
    return out.unflatten(1, grid.query_sizes)


def shift_rows(
    grid: Grid, table: Float[Tensor, "h *shifts"], queries: Int[Tensor, "r"], dtype: torch.dtype
) -> Float[Tensor, "h r lattice"]:
    """Return rows of A over the lattice; score differences use the table's dtype, which may be wider than `dtype`."""
    windows = torch.zeros((queries.shape[0], 1), dtype=torch.int64, device=table.device)
    for axis, index in zip(grid.axes, grid.unravel(queries), strict=True):
        windows = (windows[:, :, None] * axis.shift_count + axis.windows(index)[:, None, :]).flatten(1)
    return banded_softmax(below_largest(table.flatten(1)[:, windows]).to(dtype))


def _weights(grid: Grid, table: Tensor) -> tuple[Tensor, Float[Tensor, "*queries"], Bool[Tensor, "*queries"]]:
    """Return exp s, its sum over each row, and a mask of the sums that are accurate."""
    weights = torch.exp(table - table.amax().detach())
    sums = _correlate(grid, weights, table.new_ones((1, 1, *grid.lattice_sizes)))[0, 0]
    return weights, sums, sums.detach() > TRUSTED * weights.detach().sum()


def _correlate(
    grid: Grid, weights: Float[Tensor, "*shifts"], images: Float[Tensor, "b c *lattice"]
) -> Float[Tensor, "b c *queries"]:
    """Compute sum_l w[l + start of the query's window] images[l], with transforms long enough to avoid wraparound."""
    lengths, axes = _lengths(grid), tuple(range(-grid.dims, 0))
    product = torch.fft.rfftn(weights, lengths, axes) * torch.fft.rfftn(images, lengths, axes).conj()
    out: Tensor = torch.fft.irfftn(product, lengths, axes)
    for dim, axis in enumerate(grid.axes, start=2):
        starts = axis.stride * torch.arange(axis.queries - 1, -1, -1, device=out.device)
        out = out.index_select(dim, starts)
    return out


def _lengths(grid: Grid) -> tuple[int, ...]:
    """Return, per axis, the smallest transform length that covers all shifts and has no prime factor above 5."""
    # These numbers divide a high power of 30. Importing `scipy.fft.next_fast_len` would use 15 MiB.
    return tuple(next(n for n in itertools.count(axis.shift_count) if pow(30, 64, n) == 0) for axis in grid.axes)


def runs_of(grid: Grid, table: Float[Tensor, "*shifts"], dtype: torch.dtype) -> Runs:
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
        found.append(_axis_runs(axis, *along, length=length))
    return found


def work_of(runs: Runs) -> int:
    """Return the number of query-key products in all tiles, per channel of the values."""
    return math.prod(sum(run.tiles * run.queries * run.keys for run in along) for along in runs)


def mix_windows(grid: Grid, runs: Runs, values: Tensor, table: Tensor) -> Float[Tensor, "b *queries c"]:
    """Compute A V one tile at a time."""
    out = values.new_empty((values.shape[0], *grid.query_sizes, values.shape[-1]))
    for box in itertools.product(*runs):
        weights = tile_weights(grid, table, box, values.dtype)
        for images, some in _portions(grid, box, values):
            view = _tiled(out[images], some)
            view.copy_((weights @ _gathered(grid, values[images], some)).view(view.shape))
    return out


def window_gradients(
    grid: Grid, runs: Runs, values: Tensor, table: Tensor, gradient: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of values and table, with dA = G V^T one tile at a time."""
    to_values = torch.zeros_like(values) if wanted[0] else None
    to_table = torch.zeros_like(table) if wanted[1] else None
    for box in itertools.product(*runs):
        weights = tile_weights(grid, table, box, score_dtype(values.dtype))
        cast, slopes = weights.to(values.dtype), torch.zeros_like(weights)
        for images, some in _portions(grid, box, values):
            back = _tiled(gradient[images], some).reshape(weights.shape[0], -1)
            if to_values is not None:
                _scatter(grid, to_values[images], some, cast.mT @ back)
            if to_table is not None:
                slopes += back @ _gathered(grid, values[images], some).mT
        if to_table is not None:
            scores = torch.ops.aten._softmax_backward_data(slopes, weights, -1, slopes.dtype)
            places = _places(grid, box, table.device)
            shape = torch.broadcast_shapes(*(place.shape for place in places))
            to_table.index_put_(places, scores.view(shape).to(table.dtype), accumulate=True)
    return to_values, to_table


def tile_weights(grid: Grid, table: Tensor, box: Sequence[Run], dtype: torch.dtype) -> Float[Tensor, "queries keys"]:
    """Compute the probabilities of a box's first tile over its keys; all tiles of the box share them."""
    scores = table[_places(grid, box, table.device)].flatten(grid.dims).flatten(0, grid.dims - 1)
    return banded_softmax(below_largest(scores).to(score_dtype(dtype))).to(dtype)  # subtract in the table's dtype


def _places(grid: Grid, box: Sequence[Run], device: torch.device) -> tuple[Tensor, ...]:
    """Return the indices of a tile's scores in the table; per axis (.., queries, .., keys, ..), to be broadcast."""
    found = []
    for dim, (axis, run) in enumerate(zip(grid.axes, box, strict=True)):
        windows = axis.windows(torch.arange(run.first, run.first + run.queries, device=device))
        shape = [1] * (2 * grid.dims)
        shape[dim], shape[grid.dims + dim] = run.queries, run.keys
        found.append(windows[:, run.start : run.start + run.keys].view(shape))
    return tuple(found)


def _portions(grid: Grid, box: tuple[Run, ...], values: Tensor) -> Iterator[tuple[slice, tuple[Run, ...]]]:
    run, *others = box
    row = math.prod(other.tiles for other in others) * math.prod(each.keys for each in box) * values.shape[-1]
    most = block_sizes.WINDOW_BLOCK // (values.element_size() * row)
    height = min(max(most, 1), run.tiles)
    images = max(most // height, 1) if height == run.tiles else 1
    for tile in range(0, run.tiles, height):
        move = tile * run.queries
        first, start = run.first + move, run.start + grid.axes[0].stride * move
        part = replace(run, first=first, tiles=min(height, run.tiles - tile), start=start)
        for image in range(0, values.shape[0], images):
            yield slice(image, image + images), (part, *others)


def _gathered(grid: Grid, values: Tensor, box: Sequence[Run]) -> Float[Tensor, "keys points"]:
    """Gather the values at the keys of each tile, for all images, tiles and channels."""
    dims = grid.dims
    view = values
    for dim, (axis, run) in enumerate(zip(grid.axes, box, strict=True), start=1):
        step = axis.stride * run.queries
        view = view.narrow(dim, run.start, step * (run.tiles - 1) + run.keys).unfold(dim, run.keys, step)
    keys = tuple(range(dims + 2, 2 * dims + 2))
    return view.permute(*keys, *range(dims + 2)).reshape(math.prod(run.keys for run in box), -1)


def _scatter(grid: Grid, total: Tensor, box: Sequence[Run], part: Float[Tensor, "keys points"]) -> None:
    """Add the adjoint of `_gathered` to `total`, one set of non-overlapping pieces of the boxes at a time."""
    sizes = [run.keys for run in box]
    part = part.view(*sizes, total.shape[0], *(run.tiles for run in box), total.shape[-1])
    steps = [axis.stride * run.queries for axis, run in zip(grid.axes, box, strict=True)]
    for corner in itertools.product(*(range(0, size, step) for size, step in zip(sizes, steps, strict=True))):
        view, piece = total, part
        for dim, (low, run, step) in enumerate(zip(corner, box, steps, strict=True)):
            width = min(step, run.keys - low)
            view = view.narrow(dim + 1, run.start + low, step * (run.tiles - 1) + width).unfold(dim + 1, width, step)
            piece = piece.narrow(dim, low, width)
        keys = range(grid.dims + 2, 2 * grid.dims + 2)
        view.permute(*keys, *range(grid.dims + 2)).add_(piece)


def _tiled(image: Tensor, box: Sequence[Run]) -> Tensor:
    """Return a view by tiles: (b, *queries, c) -> (*queries of a tile, b, *tiles, c)."""
    for dim, run in enumerate(box, start=1):
        image = image.narrow(dim, run.first, run.tiles * run.queries).unfold(dim, run.queries, run.queries)
    dims = len(box)
    return image.permute(*range(dims + 2, 2 * dims + 2), *range(dims + 2))


def _axis_runs(
    axis: Axis, reach: Float[Tensor, "shifts others"], floors: Float[Tensor, "tiles others"], *, length: int
) -> list[Run]:
    """Return the tiles of an axis, merging neighbours with the same relative range of keys.

    `reach` is the largest score of each shift for each tile of the other axes; scores below `floors` have weight 0.
    """
    runs: list[Run] = []
    for tile, floor in enumerate(floors):
        first = tile * length
        queries = min(length, axis.queries - first)
        low = axis.stride * (axis.queries - first - queries)  # start of the window of the tile's last query
        high = axis.stride * (axis.queries - 1 - first)  # start of the window of its first query
        held = (~(reach[low : high + axis.lattice_size] < floor)).any(1).nonzero()  # NaN counts as a weight
        start = max(int(held[0]) + low - high, 0)
        stop = min(int(held[-1]) + 1, axis.lattice_size)
        made = Run(first, 1, queries, start, stop - start)
        last = runs[-1] if runs else made
        joins = replace(last, first=first, tiles=1, start=last.start + axis.stride * (first - last.first))
        if runs and made == joins:
            runs[-1] = replace(last, tiles=last.tiles + 1)
        else:
            runs.append(made)
    return runs


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
