"""Figures 5 to 10: the attention probabilities of every head at every layer, for one query pixel.

Layers are rows and heads columns of a grid of small maps. Within a layer the heads are ordered for reading, from the
most concentrated to the most spread (by the entropy of their map), with their own number beside each. Every map is
scaled to its own largest probability, which is printed above it: a head on a single pixel and one that sees the whole
image could not share a scale. A single image can stand above its maps. All is laid out in inches on a single axes, so
that nothing can overlap.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import Normal, Stroke

from attnconv._util.errors import bad
from attnconv.report.figure_style import FAINT, GRID, INK, house_style, printable
from attnconv.report.gaussian_contours import FloatArray

_SIDE = 0.74  # inches, side of a square map
_GAP = 0.12
_LABEL, _NUMBERS = 0.17, 0.5  # height of the line above each map, and the least width of its two numbers
_LEFT = 0.72
_RIGHT = 0.15
_NARROWEST, _WIDEST = 4.6, 15.0
_PICTURE = 1.5  # side of the image above the maps
_COLOURS = "Blues"
_LEGEND = (
    "Above each map: the head's number, from 0, and its largest probability, to which the colours of the map are "
    "scaled. "
    "Black square: the query pixel. Within a layer the most concentrated heads come first."
)


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """Where one query of one layer attends.

    Attributes:
        title: What stands beside the row, for instance `layer 1`.
        maps: (h, rows, columns) attention probabilities over the image's keys.
        query: Row and column of the query, in keys.

    Raises:
        ValueError: Maps that are not three-dimensional or hold no pixel.
    """

    title: str
    maps: FloatArray
    query: tuple[float, float]

    def __post_init__(self) -> None:
        if self.maps.ndim != 3 or 0 in self.maps.shape:
            raise ValueError(
                bad("maps", "must have the shape (heads, rows, columns), each at least 1", self.maps.shape)
            )

    @staticmethod
    def of(title: str, maps: Any, query: tuple[float, float]) -> "LayerMaps":
        """From nested lists, arrays or tensors."""
        return LayerMaps(title, np.asarray(maps, dtype=np.float64), query)


def reading_order(maps: FloatArray) -> list[int]:
    """Heads from the most concentrated map to the most spread, by entropy; maps with a broken number come last.

    Args:
        maps: (h, rows, columns) probabilities.

    Example:
        >>> reading_order(np.array([[[0.5, 0.5]], [[1.0, 0.0]]]))
        [1, 0]
    """
    flat = maps.reshape(len(maps), -1)
    broken = ~np.isfinite(flat).all(1)
    safe = np.clip(np.where(np.isfinite(flat), flat, 1.0), 1e-300, None)
    entropy = np.where(broken, np.inf, -(safe * np.log(safe)).sum(1))
    return [int(i) for i in np.argsort(entropy, kind="stable")]


def draw_attention_maps(
    layers: Sequence[LayerMaps],
    *,
    title: str,
    zoom: int | None = None,
    orders: Sequence[Sequence[int]] | None = None,
    picture: FloatArray | None = None,
) -> Figure:
    """The grid of maps.

    Args:
        layers: First layer first; numbers of heads and sizes may differ.
        title: Heading, which names the run and what is averaged.
        zoom: Side of the window of pixels around the query that is shown, odd; None shows the whole image. Colours stay
            scaled to the whole map: a head that looks elsewhere is pale.
        orders: The heads of each layer in the order of their columns, so that figures of several queries can be
            compared; None takes the `reading_order` of these maps.
        picture: (height, width, 3) colours in 0 .. 1 of the image that is attended, shown above with the query marked;
            None for maps that belong to no single image.

    Returns:
        The figure; `attnconv.report.save` writes it.

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
    columns = _columns(layers, orders)
    page = _Page.plan(layers, title, zoom, above=0.0 if picture is None else _PICTURE + _GAP)
    with house_style():
        figure = Figure(figsize=(page.width, page.height))
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        axes.text(page.width / 2, 0.14, page.title, fontsize=12.0, ha="center", va="top", linespacing=1.2)
        axes.text(0.15, page.height - 0.1, page.legend, fontsize=7.5, color=FAINT, va="bottom", linespacing=1.3)
        if picture is not None:
            _draw_picture(axes, picture, layers[0], top=page.tops[0] - _LABEL - _GAP - _PICTURE)
        for layer, order, shape, top in zip(layers, columns, page.shapes, page.tops, strict=True):
            axes.text(0.15, top + shape[1] / 2, printable(layer.title, width=9), fontsize=9.0, va="center")
            for index, head in enumerate(order):
                line, column = divmod(index, page.columns)
                corner = (_LEFT + column * page.step, top + line * (shape[1] + _LABEL + _GAP))
                _draw_map(axes, layer, head, corner=corner, shape=shape, zoom=zoom)
        axes.set_xlim(0.0, page.width)
        axes.set_ylim(page.height, 0.0)
        axes.set_aspect("auto")
    return figure


def _columns(layers: Sequence[LayerMaps], orders: Sequence[Sequence[int]] | None) -> list[list[int]]:
    columns = [reading_order(layer.maps) for layer in layers] if orders is None else [list(order) for order in orders]
    if [sorted(order) for order in columns] != [list(range(len(layer.maps))) for layer in layers]:
        raise ValueError(bad("orders", "must hold every head of every layer once", repr(columns)))
    return columns


@dataclass(frozen=True)
class _Page:
    """Where everything stands, in inches from the figure's upper left corner."""

    title: str
    legend: str
    width: float
    height: float
    columns: int  # maps per line; more heads than that take several lines
    step: float  # from one map to the next in a line
    shapes: list[tuple[float, float]]  # width and height of a map, per layer
    tops: list[float]  # upper edge of the first line of maps, per layer

    @staticmethod
    def plan(layers: Sequence[LayerMaps], title: str, zoom: int | None, *, above: float = 0.0) -> "_Page":
        """Where all of it stands; `above` is left free between the heading and the maps."""
        shapes = [_map_size(*(layer.maps.shape[1:] if zoom is None else (zoom, zoom))) for layer in layers]
        step = max(_NUMBERS, *(width for width, _ in shapes)) + _GAP
        most = max(len(layer.maps) for layer in layers)
        lines = -(-most // max(1, int((_WIDEST - _LEFT - _RIGHT) / step)))
        columns = -(-most // lines)
        width = max(_LEFT + columns * step + _RIGHT, _NARROWEST)
        wrapped = printable(title, width=int((width - 0.4) * 10.5))
        note = (
            _LEGEND if zoom is None else f"{_LEGEND} A blank map: the head looks beyond these {zoom} x {zoom} pixels."
        )
        legend = printable(note, width=int((width - 0.3) * 17.0))
        y = 0.22 + 0.2 * (1 + wrapped.count("\n")) + above
        tops = []
        for layer, (_, height) in zip(layers, shapes, strict=True):
            tops.append(y + _LABEL)
            y += -(-len(layer.maps) // columns) * (_LABEL + height + _GAP)
        return _Page(
            title=wrapped,
            legend=legend,
            width=width,
            height=y + 0.2 + 0.15 * (1 + legend.count("\n")),
            columns=columns,
            step=step,
            shapes=shapes,
            tops=tops,
        )


def _map_size(rows: int, columns: int) -> tuple[float, float]:
    """Width and height in inches: larger for more pixels, the sides in proportion as far as both stay legible."""
    side = _SIDE * min(max((rows * columns) ** 0.25 / 4.0, 1.0), 1.3)
    stretch = min(max((columns / rows) ** 0.5, 0.4), 2.5)
    return side * stretch, side / stretch


def _draw_map(
    page: Axes,
    layer: LayerMaps,
    head: int,
    *,
    corner: tuple[float, float],
    shape: tuple[float, float],
    zoom: int | None,
) -> None:
    left, top = corner
    width, height = shape
    shown, first_row, first_column = _window(layer.maps[head], layer.query, zoom)
    rows, columns = shown.shape
    whole = np.isfinite(layer.maps[head]).all()
    largest = float(layer.maps[head].max()) if whole else float("nan")
    box = Rectangle((left, top), width, height, facecolor="#eef0f2", edgecolor="none", zorder=0.5)
    page.add_patch(box)  # what lies outside the image
    if whole:
        page.imshow(
            np.ma.masked_invalid(shown),
            cmap=_COLOURS,
            vmin=0.0,
            vmax=largest if largest > 0.0 else 1.0,
            extent=(left, left + width, top + height, top),
            interpolation="none",
            zorder=1.0,
        )
    page.add_patch(Rectangle((left, top), width, height, fill=False, edgecolor=GRID, linewidth=0.6, zorder=1.5))
    _draw_query(
        page,
        (left + (layer.query[1] - first_column + 0.5) * width / columns, width / columns),
        (top + (layer.query[0] - first_row + 0.5) * height / rows, height / rows),
    )
    page.text(left, top - 0.03, str(head), fontsize=7.0, color=INK, ha="left", va="bottom")
    page.text(
        left + max(width, _NUMBERS), top - 0.03, _percent(largest), fontsize=7.0, color=FAINT, ha="right", va="bottom"
    )


def _draw_picture(page: Axes, picture: FloatArray, layer: LayerMaps, *, top: float) -> None:
    """The attended image with the first layer's query on it."""
    extent = (_LEFT, _LEFT + _PICTURE, top + _PICTURE, top)
    page.imshow(np.clip(picture, 0.0, 1.0), extent=extent, interpolation="none", zorder=1.0)
    rows, columns = layer.maps.shape[1:]
    _draw_query(
        page,
        (_LEFT + (layer.query[1] + 0.5) * _PICTURE / columns, _PICTURE / columns),
        (top + (layer.query[0] + 0.5) * _PICTURE / rows, _PICTURE / rows),
    )
    page.text(0.15, top + _PICTURE / 2, "image", fontsize=9.0, va="center")


def _draw_query(page: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    """A hollow black square on the query: (middle, size of a pixel) per direction. On large images it is enlarged."""
    width, height = max(x[1], 0.03) + 0.014, max(y[1], 0.03) + 0.014  # the line runs just outside
    square = Rectangle(
        (x[0] - width / 2, y[0] - height / 2), width, height, fill=False, edgecolor="black", linewidth=0.9
    )
    square.set(
        zorder=2.0, path_effects=[Stroke(linewidth=1.7, foreground="white"), Normal()]
    )  # seen on dark pixels too
    page.add_patch(square)


def _window(
    single: FloatArray, query: tuple[float, float], zoom: int | None
) -> tuple[npt.NDArray[np.float64], int, int]:
    """The shown part of one map and the row and column of its corner; not a number outside the image."""
    if zoom is None:
        return single, 0, 0
    first_row, first_column = round(query[0]) - zoom // 2, round(query[1]) - zoom // 2
    shown = np.full((zoom, zoom), np.nan)
    rows, columns = single.shape
    top, left = max(first_row, 0), max(first_column, 0)
    part = single[top : max(top, min(first_row + zoom, rows)), left : max(left, min(first_column + zoom, columns))]
    shown[top - first_row :, left - first_column :][: part.shape[0], : part.shape[1]] = part
    return shown, first_row, first_column


def _percent(probability: float) -> str:
    if not np.isfinite(probability):
        return "NaN"
    return f"{probability:.0%}" if probability >= 0.0995 else f"{probability:.1%}"
