"""Select queries: samples spread over the grid, blocks that fit in memory, and attention maps of given queries."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import whole
from attnconv.grid import Grid
from attnconv.inspect.capture import visit_attention
from attnconv.operators.base import AttentionOperator, Queries, all_queries, query_indices

BLOCK = 2**20  # maximum number of probabilities per block: 8 MiB in float64 for each of a few temporary tensors


def sample_queries(
    grid: Grid, count: int, *, seed: int | None = 0, device: torch.device | None = None
) -> Int[Tensor, "r"]:
    """Select at most `count` queries, one in each cell of the grid; return their flat indices in ascending order.

    Cells have nearly equal sizes. Regular spacing would select the same few positions in every attention window.

    Args:
        grid: The grid of queries.
        count: Maximum number of queries, at least 1. If the grid has no more queries than that, all are returned.
        seed: Seed for the random position of the query in each cell; None selects the middle of each cell.
        device: Device of the indices, such as `operator.device`.

    Raises:
        ValueError: If `count` is below 1.

    Example:
        >>> sample_queries(Grid.make((4, 6)), 6).tolist()  # cells of 2 x 2
        [5, 6, 8, 18, 20, 22]
    """
    counts, flat = _cells(grid, whole("count", count, 1)), torch.zeros((), dtype=torch.int64)
    generator = torch.Generator().manual_seed(seed or 0)
    for axis, (size, taken) in enumerate(zip(grid.query_sizes, counts, strict=True)):
        edges = torch.div(torch.arange(taken + 1) * size, taken, rounding_mode="floor")
        along = [1] * grid.dims
        along[axis] = taken
        first, length = edges[:-1].reshape(along), edges.diff().reshape(along)
        random = torch.rand(counts, generator=generator, dtype=torch.float64)
        flat = flat * size + first + (length // 2 if seed is None else (random * length).long())
    return flat.flatten().sort().values.to(device)


def query_blocks(operator: AttentionOperator, queries: Queries | None = None) -> Sequence[Int[Tensor, "_"]]:
    """Check queries (None for all) and split them into blocks whose rows fit in memory."""
    grid = operator.grid
    chosen = all_queries(grid, operator.device) if queries is None else query_indices(queries, grid, operator.device)
    if chosen.numel() == 0:
        raise ValueError(bad("queries", "must contain at least one query", 0, "Pass None for all queries."))
    return chosen.split(max(1, BLOCK // (operator.batch * operator.heads * grid.lattice_count)))


def _cells(grid: Grid, count: int) -> list[int]:
    """Return the number of cells per axis, at most `count` in total, by repeatedly refining the coarsest axis."""
    sizes, counts = grid.query_sizes, [1] * grid.dims
    while room := [
        axis
        for axis in range(grid.dims)
        if counts[axis] < sizes[axis] and math.prod(counts) // counts[axis] * (counts[axis] + 1) <= count
    ]:
        counts[min(room, key=lambda axis: counts[axis] / sizes[axis])] += 1
    return counts


@final
@dataclass(frozen=True, eq=False)
class QueryMaps:
    """Attention maps of r queries in one layer, as in Figures 5, 6 and 7 of the paper.

    Attributes:
        name: The layer's name in the model.
        positions: Row and column of each query on the grid of keys, from 0; fractional for queries between keys.
        maps: Attention probabilities over the grid of keys, averaged over images, (r, h, rows, columns) float64.
    """

    name: str
    positions: tuple[tuple[float, float], ...]
    maps: Float[Tensor, "r h rows columns"]


def mean_query_maps(
    model: nn.Module, images: Tensor, *, places: Sequence[tuple[float, float]], batch_size: int = 10
) -> list[QueryMaps]:
    """Compute attention maps of given queries, averaged over images, for each layer in the order of execution.

    Args:
        model: Any module that `visit_attention` can read. If a layer runs several times, its last call is used.
        images: Input of the model, (n, c, height, width) with n at least 1.
        places: Queries as (row, column), in fractions of the image's height and width, each in [0, 1).
        batch_size: Number of images per forward pass, at least 1.

    Raises:
        ValueError: If there are no images or places, a place is outside the image, or a layer is not two-dimensional.
    """
    if images.ndim != 4 or not len(images):
        raise ValueError(bad("images", "must have shape (n, c, height, width) with n >= 1", tuple(images.shape)))
    if not places or not all(0.0 <= part < 1.0 for place in places for part in place):
        raise ValueError(bad("places", "must be a list of pairs (row, column) in [0, 1)", repr(list(places))))
    sums: dict[str, QueryMaps] = {}
    for batch in images.split(whole("batch_size", batch_size, 1)):
        maps: dict[str, QueryMaps] = {}

        def visit(name: str, operator: AttentionOperator, maps: dict[str, QueryMaps] = maps) -> None:
            maps[name] = _maps_of(name, operator, places)

        visit_attention(model, batch, visit)
        for name, found in maps.items():
            share = len(batch) / len(images) * found.maps
            sums[name] = QueryMaps(name, found.positions, sums[name].maps + share if name in sums else share)
    return list(sums.values())


def _maps_of(name: str, operator: AttentionOperator, places: Sequence[tuple[float, float]]) -> QueryMaps:
    grid = operator.grid
    if grid.dims != 2:
        raise ValueError(bad("model", f"layer {name!r} must be two-dimensional", f"a grid of {grid.sizes} positions"))
    indices = [[int(part * size) for part, size in zip(place, grid.query_sizes, strict=True)] for place in places]
    rows = operator.rows([row * grid.query_sizes[1] + column for row, column in indices]).double().mean(0)  # h r m
    lines = (
        [int(axis.query_positions()[index]) / axis.spacing for index in along]
        for axis, along in zip(grid.axes, zip(*indices, strict=True), strict=True)
    )
    positions = tuple(zip(*lines, strict=True))
    return QueryMaps(name, positions, rows.transpose(0, 1).unflatten(-1, grid.sizes).cpu())
