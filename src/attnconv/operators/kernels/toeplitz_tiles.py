"""Windows: mixing by scores of shifts, A[q, k] = softmax_k s(k - q), where a head attends to a part of the image.

A tile of neighbouring queries meets only the box of keys that holds its weights (all above eps^2 of their row's
largest), and tiles with the same relative box share their probabilities.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import torch
from jaxtyping import Float
from torch import Tensor

from attnconv.grid import Axis, Grid
from attnconv.operators.base import score_dtype
from attnconv.operators.kernels import block_sizes
from attnconv.operators.kernels.contractions import banded_softmax, below_largest


@final
@dataclass(frozen=True)
class Run:
    """Neighbouring tiles along an axis with the same keys relative to them."""

    first: int  # the first query
    tiles: int  # number of tiles
    queries: int  # queries of each
    start: int  # the first key of the first tile; that of the next is stride * queries further
    keys: int  # keys of each


Runs: TypeAlias = Sequence[Sequence[Run]]


def runs_of(grid: Grid, table: Float[Tensor, "*shifts"], dtype: torch.dtype) -> Runs:
    """Per axis, its tiles with the ranges of keys that hold all weights in `dtype` of their queries."""
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
        found.append(_axis_runs(axis, _columns(reach, dim), _columns(floors, dim), length))
    return found


def work_of(runs: Runs) -> int:
    """Products of a query with a key that tiles compute, for each column of values."""
    return math.prod(sum(run.tiles * run.queries * run.keys for run in along) for along in runs)


def mix_windows(grid: Grid, runs: Runs, values: Tensor, table: Tensor) -> Float[Tensor, "b *queries c"]:
    """A V, tile by tile."""
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
    """Gradients of the values and of the table, with dA = G V^T tile by tile."""
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
    """The probabilities of a box's first tile, and so of all its tiles, over its keys."""
    scores = table[_places(grid, box, table.device)].flatten(grid.dims).flatten(0, grid.dims - 1)
    return banded_softmax(below_largest(scores).to(score_dtype(dtype))).to(dtype)  # differences in the table's dtype


def _places(grid: Grid, box: Sequence[Run], device: torch.device) -> tuple[Tensor, ...]:
    """Indices of a tile's scores in the table: per axis (.., queries, .., keys, ..), to be broadcast."""
    found = []
    for dim, (axis, run) in enumerate(zip(grid.axes, box, strict=True)):
        queries = torch.arange(run.first, run.first + run.queries, device=device)
        keys = torch.arange(run.start, run.start + run.keys, device=device)
        shape = [1] * (2 * grid.dims)
        shape[dim], shape[grid.dims + dim] = run.queries, run.keys
        found.append((axis.stride * (axis.queries - 1 - queries)[:, None] + keys).view(shape))
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
    """The keys of every tile's box, for all images, tiles and channels."""
    dims = grid.dims
    view = values
    for dim, (axis, run) in enumerate(zip(grid.axes, box, strict=True), start=1):
        step = axis.stride * run.queries
        view = view.narrow(dim, run.start, step * (run.tiles - 1) + run.keys).unfold(dim, run.keys, step)
    keys = tuple(range(dims + 2, 2 * dims + 2))
    return view.permute(*keys, *range(dims + 2)).reshape(math.prod(run.keys for run in box), -1)


def _scatter(grid: Grid, total: Tensor, box: Sequence[Run], part: Float[Tensor, "keys points"]) -> None:
    """The adjoint of `_gathered`, added to `total`: one after the other, pieces of the boxes that do not overlap."""
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
    """A view of the queries of all tiles: (b, *queries, c) -> (*queries of a tile, b, *tiles, c)."""
    for dim, run in enumerate(box, start=1):
        image = image.narrow(dim, run.first, run.tiles * run.queries).unfold(dim, run.queries, run.queries)
    dims = len(box)
    return image.permute(*range(dims + 2, 2 * dims + 2), *range(dims + 2))


def _axis_runs(
    axis: Axis, reach: Float[Tensor, "shifts others"], floors: Float[Tensor, "tiles others"], length: int
) -> list[Run]:
    """The tiles of an axis, neighbours with the same relative keys joined.

    `reach` is the largest score of each shift for every tile of the other axes, `floors` the least score with a weight.
    """
    runs: list[Run] = []
    for tile, floor in enumerate(floors):
        first = tile * length
        queries = min(length, axis.queries - first)
        low = axis.stride * (axis.queries - first - queries)  # the windows of the table that its last and
        high = axis.stride * (axis.queries - 1 - first)  # its first query see begin here
        held = (~(reach[low : high + axis.lattice_size] < floor)).any(1).nonzero()  # NaN counts as weight
        start = max(int(held[0]) + low - high, 0)
        stop = min(int(held[-1]) + 1, axis.lattice_size)
        made = Run(first, 1, queries, start, stop - start)
        last = runs[-1] if runs else None
        move = 0 if last is None else first - last.first
        if last is not None and made == replace(last, first=first, tiles=1, start=last.start + axis.stride * move):
            runs[-1] = replace(last, tiles=last.tiles + 1)
        else:
            runs.append(made)
    return runs


def _columns(table: Tensor, dim: int) -> Tensor:
    """An axis first, all others in one."""
    return table.movedim(dim, 0).reshape(table.shape[dim], -1)


def _per_query(table: Tensor, dim: int, axis: Axis) -> Tensor:
    """Along an axis of the table, the largest of the window that each query sees."""
    reach = 1
    while reach < axis.lattice_size:
        step = min(reach, axis.lattice_size - reach)
        count = table.shape[dim] - step
        table = torch.maximum(table.narrow(dim, 0, count), table.narrow(dim, step, count))
        reach += step
    starts = axis.stride * torch.arange(axis.queries - 1, -1, -1, device=table.device)
    return table.index_select(dim, starts)


def _per_tile(table: Tensor, dim: int, length: int, sign: int) -> Tensor:
    """Along an axis of queries, the largest (sign 1) or the least (sign -1) of each tile."""
    return sign * torch.stack([(sign * part).amax(dim) for part in table.split(length, dim)], dim)
