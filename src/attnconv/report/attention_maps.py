"""Figures 5 to 10: attention probabilities of every head (columns) of every layer (rows), for one query pixel.

Concentrated and spread heads cannot share a colour scale: each map is scaled to its largest probability, printed above.
"""

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
from attnconv.report.figure_style import FAINT, GRID, INK, FloatArray, PanelGrid, house_style, mark_query, printable

_SIDE, _PICTURE = 0.74, 1.5  # inches, sides of a square map and of the image above the maps
_GAP, _LABEL = 0.12, 0.17
_NUMBERS = 0.5  # least width of a map's two numbers
_WIDEST = 14.1  # all maps of a line
_QUERY = 0.05  # least side of the frame around the query, as a part of the map's
_NOTE = (
    "Above each map: the head's number, from 0, and its largest probability, to which the colours of the map are "
    "scaled. Black square: the query pixel. Within a layer the most concentrated heads come first."
)


class LayerMaps:
    """Attention of one query in one layer.

    Attributes:
        title: Label of the layer's row, for instance `layer 1`.
        maps: (h, rows, columns) attention probabilities over the image's keys.
        query: Row and column of the query, in keys.

    Raises:
        ValueError: Maps that are not three-dimensional or hold no pixel.
    """

    def __init__(self, title: str, maps: Any, query: tuple[float, float]) -> None:
        self.title, self.query = title, query
        self.maps: FloatArray = np.asarray(maps, dtype=np.float64)
        if self.maps.ndim != 3 or 0 in self.maps.shape:
            raise ValueError(
                bad("maps", "must have the shape (heads, rows, columns), each at least 1", self.maps.shape)
            )


def reading_order(maps: FloatArray) -> list[int]:
    """Heads from the most concentrated map (h, rows, columns) to the most spread, by entropy; NaN comes last."""
    flat = maps.reshape(len(maps), -1)
    entropy = -(flat * np.log(np.clip(flat, 1e-300, None))).sum(1)
    return [int(i) for i in np.argsort(entropy, kind="stable")]  # NaN is sorted last


def draw_attention_maps(
    layers: Sequence[LayerMaps],
    *,
    title: str,
    zoom: int | None = None,
    orders: Sequence[Sequence[int]] | None = None,
    picture: FloatArray | None = None,
) -> Figure:
    """Draw the attention maps of one query.

    Args:
        layers: First layer first; numbers of heads and sizes may differ.
        title: Heading, which names the run and the images that are averaged.
        zoom: Side of the window of pixels around the query, odd; None shows the whole image. Colours stay scaled to the
            whole map: a head that attends elsewhere is pale.
        orders: The heads of each layer in the order of their columns; None uses the `reading_order` of these maps.
        picture: (height, width, 3) colours in 0 .. 1 of the attended image, shown above the maps; None for no image.

    Raises:
        ValueError: No layer, a zoom that is even or below 1, an order that does not name every head of its layer, or a
            picture of another shape.
    """
    if not layers:
        raise ValueError(bad("layers", "must hold the maps of at least one layer", "none"))
    if zoom is not None and (zoom < 1 or zoom % 2 == 0):
        raise ValueError(bad("zoom", "must be an odd number of pixels, at least 1", zoom))
    if picture is not None and (picture.ndim != 3 or picture.shape[2] != 3):
        raise ValueError(bad("picture", "must have the shape (height, width, 3)", picture.shape))
    chosen = [reading_order(layer.maps) for layer in layers] if orders is None else [list(order) for order in orders]
    if [sorted(order) for order in chosen] != [list(range(len(layer.maps))) for layer in layers]:
        raise ValueError(bad("orders", "must hold every head of every layer once", repr(chosen)))
    return _draw(layers, chosen, title, zoom, picture)


def draw_query(layers: Sequence[QueryMaps], index: int, *, title: str, **options: Any) -> Figure:
    """Draw the maps of one query of `mean_query_maps`, with the heads in the order of the first query's."""
    maps = [LayerMaps(f"layer {i}", layer.maps[index], layer.positions[index]) for i, layer in enumerate(layers, 1)]
    orders = [reading_order(layer.maps[0].numpy()) for layer in layers]
    return draw_attention_maps(maps, title=title, orders=orders, **options)


@house_style()
def _draw(
    layers: Sequence[LayerMaps], orders: list[list[int]], title: str, zoom: int | None, picture: FloatArray | None
) -> Figure:
    sizes = [_map_size(_window(layer, zoom)) for layer in layers]
    width = max(size[0] for size in sizes)
    most = max(map(len, orders))
    columns = math.ceil(most / math.ceil(most / max(1, int(_WIDEST / (width + _GAP)))))
    lines = [
        (layer, order[start : start + columns], size, layer.title if start == 0 else "")
        for layer, order, size in zip(layers, orders, sizes, strict=True)
        for start in range(0, len(order), columns)
    ]
    above = [] if picture is None else [_PICTURE]
    widths, heights, gap = [width] * columns, [*above, *(size[1] for _, _, size, _ in lines)], (_GAP, _LABEL + _GAP)
    note = _NOTE if zoom is None else f"{_NOTE} A blank map: the head attends beyond these {zoom} x {zoom} pixels."
    grid = PanelGrid(widths, heights, title=title, note=note, gap=gap, left=0.72, above=_LABEL)
    # All maps are artists of one axes, in parts of the figure: axes of their own would take three times as long.
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
            largest = float(layer.maps[head].max())  # NaN if any probability is
            shown = layer.maps[head] if math.isfinite(largest) else None
            _show(page, shown, layer, zoom, box, cmap="Blues", vmin=0.0, vmax=largest or 1.0)
            page.annotate(str(head), (box.x0, box.y1), (0.0, 3.0), color=INK, **at)
            peak = "NaN" if shown is None else f"{largest:.0%}" if largest >= 0.0995 else f"{largest:.1%}"
            page.annotate(peak, (box.x1, box.y1), (0.0, 3.0), color=FAINT, ha="right", **at)
        _label(page, name, boxes[0])
    return grid.figure


def _window(layer: LayerMaps, zoom: int | None) -> Bbox:
    """The pixels that the maps of a layer show; row 0 is at the top."""
    _, rows, columns = layer.maps.shape
    if zoom is None:
        return Bbox([[-0.5, rows - 0.5], [columns - 0.5, -0.5]])
    row, column = (round(place) for place in layer.query)
    return Bbox([[column - zoom / 2, row + zoom / 2], [column + zoom / 2, row - zoom / 2]])


def _map_size(window: Bbox) -> tuple[float, float]:
    """Width and height in inches: larger for more pixels, in proportion while both stay legible."""
    rows, columns = -window.height, window.width
    side = _SIDE * min(max((rows * columns) ** 0.25 / 4.0, 1.0), 1.3)
    stretch = min(max((columns / rows) ** 0.5, 0.4), 2.5)
    return max(side * stretch, _NUMBERS), side / stretch


def _show(page: Axes, image: FloatArray | None, layer: LayerMaps, zoom: int | None, box: Bbox, **options: Any) -> None:
    """Show an image of a layer's pixels, or the part around the query, in a box of the figure; mark the query."""
    window = _window(layer, zoom)
    pixels = BboxTransform(window, box) + page.transData
    frame = Rectangle(box.p0, box.width, box.height, facecolor="#eef0f2", edgecolor=GRID, linewidth=1.2, zorder=0.5)
    page.add_patch(frame)  # its face is seen outside the image
    if image is not None:
        (left, bottom), (right, top) = _window(layer, None).get_points()
        shown = page.imshow(
            image, extent=(left, right, bottom, top), transform=pixels, aspect="auto", zorder=1.0, **options
        )
        shown.set_clip_path(frame)
    width, height = np.maximum(1.0, _QUERY * np.abs(window.size))
    mark_query(page, layer.query, (height, width), transform=pixels)


def _label(page: Axes, text: str, box: Bbox) -> None:
    """The name of a row, to the left of its first map."""
    text, place = printable(text, width=9), (box.x0, (box.y0 + box.y1) / 2)
    page.annotate(text, place, (-6.0, 0.0), "data", "offset points", ha="right", va="center")
