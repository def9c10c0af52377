"""Figure 1: what multi-head attention computes for one query pixel, drawn from a true layer's attention.

    output_q = sum_h ( sum_k A^(h)_{q,k} X_k ) W^(h)

Each head looks at a place at its own shift Delta^(h) from the query and multiplies what it finds by its own matrix; the
output is the sum. Heads keep one colour and one number throughout. All is placed in inches.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from attnconv._util.errors import bad
from attnconv.report.figure_style import FAINT, GRID, INK, house_style, printable
from attnconv.report.gaussian_contours import FloatArray
from attnconv.report.palette import colour_of

_IMAGE, _MAP, _MATRIX = 2.9, 0.82, 0.62  # inches, sides
_STEP = 1.14  # from one head's line to the next
_TOP, _LEFT, _WIDTH = 0.95, 0.3, 8.6
_MAPS, _MATRICES, _SUM, _OUTPUT = 4.05, 5.6, 7.05, 7.6  # left edges of the columns
_NOTE = (
    "Left: the image, coloured where each head attends for the query (black square). Each head mixes the pixels "
    "by its attention A, multiplies the mixture by its own matrix W, and the output at the query is the sum."
)


def draw_mixture(maps: Any, query: tuple[int, int], *, centres: Sequence[tuple[float, float]], title: str) -> Figure:
    """One query's output as a sum over heads that look at shifts.

    Args:
        maps: (h, rows, columns) attention probabilities of the query over the image's keys, 1 to 9 heads.
        query: Its row and column.
        centres: Delta of each head, row and column shift in pixels.
        title: Heading.

    Returns:
        The figure; `attnconv.report.save` writes it.

    Raises:
        ValueError: No head or more than nine, or not one centre per head.

    Example:
        >>> figure = draw_mixture(
        ...     np.full((2, 3, 3), 1 / 9), (1, 1), centres=[(0.0, 0.0), (0.0, 1.0)], title="two"
        ... )
        >>> [text.get_text() for text in figure.axes[0].texts if "Δ" in text.get_text()]
        ['Δ = (0, 0)', 'Δ = (0, 1)']
    """
    heads = np.asarray(maps, dtype=np.float64)
    if heads.ndim != 3 or not 1 <= len(heads) <= 9:
        raise ValueError(bad("maps", "must have the shape (heads, rows, columns) with 1 to 9 heads", heads.shape))
    if len(centres) != len(heads):
        raise ValueError(bad("centres", f"must have one shift for each of the {len(heads)} heads", len(centres)))
    lines = max(len(heads) * _STEP, _IMAGE + 0.2)
    height = _TOP + lines + 0.55
    with house_style():
        figure = Figure(figsize=(_WIDTH, height))
        page = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        page.set_axis_off()
        _headings(page, title)
        middle = _TOP + lines / 2
        _image(page, heads, query, top=middle - _IMAGE / 2)
        first = middle - len(heads) * _STEP / 2 + _STEP / 2
        for head, single in enumerate(heads):
            y = first + head * _STEP
            _line(page, single, query, head, y=y, centre=centres[head])
            _arrow(page, (_MATRICES + _MATRIX + 0.08, y), (_SUM - 0.16, middle), {"arrowstyle": "-", "color": FAINT})
        _sum(page, middle)
        page.text(_LEFT, height - 0.1, printable(_NOTE, width=128), fontsize=7.5, color=FAINT, va="bottom")
        page.set_xlim(0.0, _WIDTH)
        page.set_ylim(height, 0.0)
        page.set_aspect("auto")
    return figure


def _headings(page: Axes, title: str) -> None:
    page.text(_WIDTH / 2, 0.14, printable(title, width=80), fontsize=12.0, ha="center", va="top")
    for x, words in (
        (_LEFT + _IMAGE / 2, "input X"),
        (_MAPS + _MAP / 2, "attention A"),
        (_MATRICES + _MATRIX / 2, "matrix W"),
        (_OUTPUT + 0.2, "output at q"),
    ):
        page.text(x, _TOP - 0.2, words, fontsize=9.5, ha="center", va="bottom")


def _arrow(page: Axes, start: tuple[float, float], end: tuple[float, float], style: dict[str, Any]) -> None:
    page.annotate("", end, start, arrowprops=style)


def _sum(page: Axes, middle: float) -> None:
    """The sign of the sum, and the output's channels."""
    page.text(_SUM, middle, "Σ", fontsize=20.0, ha="center", va="center")
    _arrow(page, (_SUM + 0.17, middle), (_OUTPUT, middle), {"arrowstyle": "->", "color": INK, "shrinkB": 0})
    for step in range(6):
        corner = (_OUTPUT + 0.06, middle - 0.72 + 0.24 * step)
        page.add_patch(Rectangle(corner, 0.28, 0.24, facecolor="#dfe6ee", edgecolor=INK))


def _image(page: Axes, heads: FloatArray, query: tuple[int, int], *, top: float) -> None:
    """All heads over one picture of the pixels; a pixel takes the colours of those that attend it."""
    _, rows, columns = heads.shape
    width, height = _IMAGE / columns, _IMAGE / rows
    for head, single in enumerate(heads):
        for row, column in np.ndindex(rows, columns):
            share = float(single[row, column] / max(single.max(), 1e-300))
            if share > 0.01:
                corner = (_LEFT + column * width, top + row * height)
                page.add_patch(
                    Rectangle(corner, width, height, facecolor=colour_of(head), alpha=0.9 * share, linewidth=0)
                )
    _grid(page, (_LEFT, top), (_IMAGE, _IMAGE), (rows, columns))
    corner = (_LEFT + query[1] * width, top + query[0] * height)
    page.add_patch(Rectangle(corner, width, height, fill=False, edgecolor="black", linewidth=1.8))
    page.text(corner[0] + width / 2, corner[1] + height / 2, "q", fontsize=9.0, ha="center", va="center")


def _line(
    page: Axes, single: FloatArray, query: tuple[int, int], head: int, *, y: float, centre: tuple[float, float]
) -> None:
    """One head: its map, its shift, its matrix."""
    rows, columns = single.shape
    top = y - _MAP / 2
    shades = LinearSegmentedColormap.from_list(f"head {head}", ["white", colour_of(head)])
    extent = (_MAPS, _MAPS + _MAP, top + _MAP, top)
    page.imshow(single, cmap=shades, vmin=0.0, vmax=max(float(single.max()), 1e-300), extent=extent)
    page.add_patch(Rectangle((_MAPS, top), _MAP, _MAP, fill=False, edgecolor=GRID))
    corner = (_MAPS + query[1] * _MAP / columns, top + query[0] * _MAP / rows)
    page.add_patch(Rectangle(corner, _MAP / columns, _MAP / rows, fill=False, edgecolor="black", linewidth=1.0))
    page.text(_MAPS - 0.1, y, f"head {head}", fontsize=8.5, color=INK, ha="right", va="center")
    shift = f"Δ = ({centre[0]:g}, {centre[1]:g})".replace("-", "−")
    page.text(_MAPS + _MAP / 2, top + _MAP + 0.03, shift, fontsize=7.5, color=FAINT, ha="center", va="top")
    page.text(_MATRICES - 0.16, y, "·", fontsize=14.0, ha="center", va="center")
    corner = (_MATRICES, y - _MATRIX / 2)
    page.add_patch(Rectangle(corner, _MATRIX, _MATRIX, facecolor=colour_of(head), alpha=0.25, edgecolor="none"))
    page.add_patch(Rectangle(corner, _MATRIX, _MATRIX, fill=False, edgecolor=colour_of(head), linewidth=1.2))
    page.text(_MATRICES + _MATRIX / 2, y, f"W {head}", fontsize=8.5, ha="center", va="center")


def _grid(page: Axes, corner: tuple[float, float], sides: tuple[float, float], counts: tuple[int, int]) -> None:
    rows, columns = counts
    for row in range(rows + 1):
        y = corner[1] + row * sides[1] / rows
        page.plot((corner[0], corner[0] + sides[0]), (y, y), color=GRID, linewidth=0.6)
    for column in range(columns + 1):
        x = corner[0] + column * sides[0] / columns
        page.plot((x, x), (corner[1], corner[1] + sides[1]), color=GRID, linewidth=0.6)
