"""Figures 5 to 10: attention probabilities of every head (columns) in every layer (rows), for one query."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.transforms import Bbox, BboxTransform

from attnconv._util.errors import bad
from attnconv.inspect.chosen_queries import QueryMaps
from attnconv.report.figure_style import (
    ATTENTION,
    FAINT,
    GRID,
    INK,
    FloatArray,
    PanelGrid,
    attention_scale,
    house_style,
    mark_query,
    printable,
)

_SIDE, _PICTURE = 0.74, 1.5  # inches: side of a square map, and of the image above the maps
_GAP, _LABEL = 0.12, 0.17
_NUMBERS = 0.5  # minimum width of a map, for the two labels above it
_WIDEST = 14.1  # maximum width of a line of maps
_QUERY = 0.05  # minimum side of the frame around the query, relative to the side of the map
_NOTE = (
    "Above each map: head index (from 0) and largest probability. Colours: probability times the number of positions, "
    "on a logarithmic scale; nearly uniform heads are dark. Small frame: the query."
)
_SORTED = " Heads are sorted by their largest probability."


class LayerMaps:
    """Attention maps of one query in one layer.

    Attributes:
        title: Label of the layer's maps, such as `layer 0`.
        maps: Attention probabilities of the query over all keys, for each head, (h, rows, columns).
        query: Row and column of the query on the grid of keys, from 0; may be fractional.

    Raises:
        ValueError: If `maps` is not three-dimensional, or is empty.
    """

    def __init__(self, title: str, maps: Any, query: tuple[float, float]) -> None:
        self.title, self.query = title, query
        self.maps: FloatArray = np.asarray(maps, dtype=np.float64)
        if self.maps.ndim != 3 or 0 in self.maps.shape:
            raise ValueError(bad("maps", "must have the shape (heads, rows, columns), all above 0", self.maps.shape))


def reading_order(maps: FloatArray) -> list[int]:
    """Return the heads of maps (h, rows, columns) in descending order of largest probability; heads with NaN last."""
    return [int(i) for i in np.argsort(-maps.max((1, 2)), kind="stable")]  # NaN is sorted last


@house_style()
def draw_attention_maps(
    layers: Sequence[LayerMaps],
    *,
    title: str,
    zoom: int | None = None,
    orders: Sequence[Sequence[int]] | None = None,
    picture: FloatArray | None = None,
) -> Figure:
    """Draw the attention maps of one query for every head, layer by layer.

    Args:
        layers: Maps of each layer, in order; layers may differ in their numbers of heads and positions.
        title: Title of the figure.
        zoom: Odd side, in positions, of a window around the query; None for all.
        orders: Head indices of each layer in the order to show; None sorts heads by largest probability, descending.
        picture: Image to show above the maps, (height, width, 3) with values in [0, 1]; None for no image.

    Raises:
        ValueError: If there is no layer, `zoom` is even or not positive, `orders` is invalid, or `picture` is not RGB.
    """
    if not layers:
        raise ValueError(bad("layers", "must contain the maps of at least one layer", "none"))
    if zoom is not None and (zoom < 1 or zoom % 2 == 0):
        raise ValueError(bad("zoom", "must be an odd number of positions, at least 1", zoom))
    if picture is not None and (picture.ndim != 3 or picture.shape[2] != 3):
        raise ValueError(bad("picture", "must have the shape (height, width, 3)", picture.shape))
    by_peak = [reading_order(layer.maps) for layer in layers]
    chosen = by_peak if orders is None else [list(order) for order in orders]
    if [sorted(order) for order in chosen] != [list(range(len(layer.maps))) for layer in layers]:
        raise ValueError(bad("orders", "must contain each head of each layer exactly once", repr(chosen)))
    sizes = [_map_size(_window(layer, zoom)) for layer in layers]
    width = max(size[0] for size in sizes)
    most = max(map(len, chosen))
    columns = math.ceil(most / math.ceil(most / max(1, int(_WIDEST / (width + _GAP)))))
    lines = [
        (layer, order[start : start + columns], size, layer.title if start == 0 else "")
        for layer, order, size in zip(layers, chosen, sizes, strict=True)
        for start in range(0, len(order), columns)
    ]
    above = [] if picture is None else [_PICTURE]
    widths, heights, gap = [width] * columns, [*above, *(size[1] for _, _, size, _ in lines)], (_GAP, _LABEL + _GAP)
    note = _NOTE + _SORTED * (chosen == by_peak)
    note += "" if zoom is None else f" Blank map: the head attends outside these {zoom} x {zoom} positions."
    grid = PanelGrid(widths, heights, title=title, note=note, gap=gap, left=0.72, above=_LABEL, below=0.5)
    scale = attention_scale(max(layer.maps[0].size for layer in layers))
    # All maps are artists of one Axes: an Axes for each map would take three times as long.
    page = grid.figure.add_axes((0.0, 0.0, 1.0, 1.0), autoscale_on=False)
    page.set_axis_off()
    if picture is not None:
        box = grid.box(0, 0, (_PICTURE, _PICTURE), anchor="W")
        _show(page, np.clip(picture, 0.0, 1.0), layers[0], None, box)
        _label(page, "image", box)
    at: dict[str, Any] = {"xycoords": "data", "textcoords": "offset points", "fontsize": 7.0}
    for row, (layer, order, size, name) in enumerate(lines, start=len(above)):
        boxes = [grid.box(row, column, size, anchor="W") for column in range(len(order))]
        for head, box in zip(order, boxes, strict=True):
            largest = float(layer.maps[head].max())  # NaN if any probability is NaN
            shown = layer.maps[head] * layer.maps[head].size if math.isfinite(largest) else None
            _show(page, shown, layer, zoom, box, cmap=ATTENTION, norm=scale)
            page.annotate(str(head), (box.x0, box.y1), (0.0, 3.0), color=INK, **at)
            peak = "NaN" if shown is None else f"{largest:.0%}" if largest >= 0.0995 else f"{largest:.1%}"
            page.annotate(peak, (box.x1, box.y1), (0.0, 3.0), color=FAINT, ha="right", **at)
        _label(page, name, boxes[0])
    grid.add_legend(scale)
    return grid.figure


def draw_query(layers: Sequence[QueryMaps], index: int, *, title: str, **options: Any) -> Figure:
    """Draw the maps of one query from `mean_query_maps`, with the heads in the order of the first query's maps."""
    maps = [LayerMaps(f"layer {i}", layer.maps[index], layer.positions[index]) for i, layer in enumerate(layers)]
    orders = [reading_order(layer.maps[0].numpy()) for layer in layers]
    return draw_attention_maps(maps, title=title, orders=orders, **options)


def _window(layer: LayerMaps, zoom: int | None) -> Bbox:
    """Return the range of positions that the maps of a layer show; row 0 is at the top."""
    _, rows, columns = layer.maps.shape
    if zoom is None:
        return Bbox([[-0.5, rows - 0.5], [columns - 0.5, -0.5]])
    row, column = (round(place) for place in layer.query)
    return Bbox([[column - zoom / 2, row + zoom / 2], [column + zoom / 2, row - zoom / 2]])


def _map_size(window: Bbox) -> tuple[float, float]:
    """Return width and height in inches: larger for more positions, and in proportion while both are legible."""
    rows, columns = -window.height, window.width
    side = _SIDE * min(max((rows * columns) ** 0.25 / 4.0, 1.0), 1.3)
    stretch = min(max((columns / rows) ** 0.5, 0.4), 2.5)
    return max(side * stretch, _NUMBERS), side / stretch


def _show(page: Axes, image: FloatArray | None, layer: LayerMaps, zoom: int | None, box: Bbox, **options: Any) -> None:
    """Draw an image of a layer's positions, or the part around the query, in a box of the figure; mark the query."""
    window = _window(layer, zoom)
    pixels = BboxTransform(window, box) + page.transData
    frame = Rectangle(box.p0, box.width, box.height, facecolor="#eef0f2", edgecolor=GRID, linewidth=1.2, zorder=0.5)
    page.add_patch(frame)  # its face colour is visible outside the image
    if image is not None:
        (left, bottom), (right, top) = _window(layer, None).get_points()
        options |= {"extent": (left, right, bottom, top), "aspect": "auto", "zorder": 1.0}
        page.imshow(image, transform=pixels, **options).set_clip_path(frame)
    width, height = np.maximum(1.0, _QUERY * np.abs(window.size))
    mark_query(page, layer.query, (height, width), transform=pixels)


def _label(page: Axes, text: str, box: Bbox) -> None:
    text, place = printable(text, width=9), (box.x0, (box.y0 + box.y1) / 2)
    page.annotate(text, place, (-6.0, 0.0), "data", "offset points", ha="right", va="center")
