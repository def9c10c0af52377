"""Where chosen query pixels attend, on average over images, as in Figures 5, 6 and 7 of the paper."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv.inspect.capture import visit_attention
from attnconv.operators.base import AttentionOperator


@final
@dataclass(frozen=True, eq=False)
class QueryMaps:
    """Attention probabilities of some queries of one layer.

    Attributes:
        name: The layer's name in the model.
        positions: Row and column of each query, counted in keys.
        maps: (r, h, rows, columns) mean probabilities over the image's keys, float64.
    """

    name: str
    positions: tuple[tuple[float, float], ...]
    maps: Float[Tensor, "r h rows columns"]


def mean_query_maps(
    model: nn.Module, images: Tensor, *, places: Sequence[tuple[float, float]], batch_size: int = 10
) -> list[QueryMaps]:
    """Compute mean attention probabilities of chosen queries over images, for every layer.

    Only the rows of these queries are computed, for a few images at a time.

    Args:
        model: Any module with attention over images that `visit_attention` reads.
        images: (n, c, height, width), n at least 1.
        places: Queries as fractions of the image's height and width, each at least 0 and below 1.
        batch_size: Images at once, at least 1.

    Returns:
        One entry per layer, in the order in which the layers run; of a layer that runs several times, the last.

    Raises:
        ValueError: No image, a place outside the image, a batch size below 1, or a layer that is not two-dimensional.
    """
    if images.ndim != 4 or not len(images):
        requirement = "must have the shape (n, c, height, width) with n at least 1"
        raise ValueError(bad("images", requirement, tuple(images.shape)))
    if not places or not all(0.0 <= part < 1.0 for place in places for part in place):
        requirement = "must be at least one (row, column), each at least 0 and below 1"
        raise ValueError(bad("places", requirement, repr(list(places))))
    if batch_size < 1:
        raise ValueError(bad("batch_size", "must be at least 1", batch_size))
    sums: dict[str, QueryMaps] = {}
    for batch in images.split(batch_size):
        maps: dict[str, QueryMaps] = {}

        def visit(name: str, operator: AttentionOperator, maps: dict[str, QueryMaps] = maps) -> None:
            maps[name] = _maps_of(name, operator, places)

        visit_attention(model, batch, visit)
        for name, found in maps.items():
            share = len(batch) / len(images) * found.maps
            sums[name] = QueryMaps(name, found.positions, sums[name].maps + share if name in sums else share)
    return list(sums.values())


def _maps_of(name: str, operator: AttentionOperator, places: Sequence[tuple[float, float]]) -> QueryMaps:
    """The mean over the images of one operator."""
    grid = operator.grid
    if grid.dims != 2:
        raise ValueError(bad("model", f"layer {name!r} must be two-dimensional", f"{grid.dims} axes"))
    indices = [[int(part * size) for part, size in zip(place, grid.query_sizes, strict=True)] for place in places]
    rows = operator.rows([row * grid.query_sizes[1] + column for row, column in indices]).double().mean(0)  # h r m
    lines = (
        [(axis.stride * index + axis.offset) / axis.spacing for index in along]
        for axis, along in zip(grid.axes, zip(*indices, strict=True), strict=True)
    )
    positions = tuple(zip(*lines, strict=True))
    return QueryMaps(name, positions, rows.transpose(0, 1).unflatten(-1, grid.sizes).cpu())
