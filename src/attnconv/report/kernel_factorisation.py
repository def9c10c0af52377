"""Figure 11: one query's kernel positions as mixtures of attention rows, E_q = Phi A_q.

The three matrices stand side by side as in the product, with what Phi leaves of E_q below. Rows of E_q and Phi are
kernel positions, named by their shift (key minus query); rows of A_q and columns of Phi are heads; columns of E_q and
A_q are keys, with a thin line where a row of the image begins. E_q and the difference are coloured from 0 to 1 and from
-1 to 1, the others to their own largest number, which is printed. All is placed in inches, so that no texts can meet.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnconv.report.figure_style import FAINT, GRID, INK, house_style, printable
from attnconv.report.gaussian_contours import FloatArray
from attnconv.theory.expressibility import Factorisation

_TALLEST, _WIDEST = 4.6, 4.2  # inches, of one matrix
_CELL, _KEY = 0.24, 0.24  # largest height of a row, width of a key
_SLOT = 1.55  # least width that a matrix's two lines of heading need
_SIGN = 0.34  # between matrices, for = and the dot
_HEADING, _TICKS, _BETWEEN = 0.46, 0.34, 0.1
_RIGHT = 0.25
_LETTER = 0.06  # width of a letter of the tick labels
_LEAST_LABEL = 0.13  # height that a tick label needs
_SAME = 1e-5  # relative residual up to which the figure says "="
_POSITIVE, _SIGNED = "Blues", "RdBu_r"


def draw_factorisation(factorisation: Factorisation, *, title: str) -> Figure:
    """E_q = Phi A_q for one query, and what is left of E_q.

    Args:
        factorisation: What `attnconv.theory.factorise` returns.
        title: Heading, which names the attention and the kernel.

    Returns:
        The figure; `attnconv.report.save` writes it.

    Example:
        >>> import torch
        >>> from attnconv.theory.expressibility import factorise
        >>> one_pixel_each = torch.eye(2)[:, None].expand(2, 2, 2)
        >>> figure = draw_factorisation(
        ...     factorise(one_pixel_each, 1, query=(0,), sizes=(2,)), title="two pixels"
        ... )
        >>> [axes.get_label() for axes in figure.axes]
        ['indicators', 'phi', 'rows', 'difference']
    """
    indicators, phi, rows = (
        np.asarray(matrix.cpu(), dtype=np.float64)
        for matrix in (factorisation.indicators, factorisation.phi, factorisation.rows)
    )
    difference = indicators - phi @ rows
    page = _Page.plan(factorisation, title, (phi.shape[0], phi.shape[1], rows.shape[1]))
    taps = [_point(shift) for shift in factorisation.shifts]
    heads = [str(head) for head in range(1, rows.shape[0] + 1)]
    with house_style():
        figure = Figure(figsize=(page.width, page.height))
        _write(figure, page, page.width / 2, 0.14, page.title, fontsize=12.0, ha="center", va="top", linespacing=1.2)
        across = {"vmin": 0.0, "cmap": _POSITIVE}
        axes = _panel(figure, page, 0, indicators, label="indicators", vmax=1.0, **across)
        _ticks(axes, taps, None, page.cell)
        _heading(figure, page, 0, "E_q", f"kernel positions ({len(taps)}) x keys ({rows.shape[1]})")
        axes = _panel(figure, page, 1, phi, label="phi", **_symmetric(phi, 0.0))
        _ticks(axes, None, heads, page.cell)
        _numbers(axes, phi, page.cell)
        _heading(figure, page, 1, "Φ", _range(phi))
        axes = _panel(figure, page, 2, rows, label="rows", vmax=max(float(rows.max()), 1e-300), **across)
        _ticks(axes, heads, None, page.cell)
        _heading(figure, page, 2, "A_q", f"heads ({len(heads)}) x keys, up to {_number(float(rows.max()))}")
        axes = _panel(figure, page, 3, difference, label="difference", **_symmetric(difference, 1.0))
        _ticks(axes, taps, None, page.cell)
        largest = float(np.abs(difference).max())
        _heading(figure, page, 3, "E_q − Φ A_q", f"largest entry {_number(largest)}")
        for place in (0, 2, 3):
            _image_rows(figure.axes[place], factorisation.sizes, page.key)
        for place, what, gap in ((0, "keys", 0.06), (1, "heads", 0.2), (2, "keys", 0.06), (3, "keys", 0.06)):
            _write(figure, page, *page.below(place, gap), what, fontsize=7.5, color=FAINT, ha="center")
        equal = factorisation.residual <= _SAME
        for place, sign in ((1, "=" if equal else "≈"), (2, "·")):
            _write(figure, page, *page.before(place), sign, fontsize=20.0, ha="center", va="center")
        _write(figure, page, *page.note, page.text, fontsize=8.5, va="top", linespacing=1.45)
    return figure


@dataclass(frozen=True)
class _Page:
    """Where everything stands, in inches from the figure's upper left corner."""

    title: str
    text: str
    width: float
    height: float
    cell: float  # height of a row, of every matrix
    key: float  # width of a key
    corners: tuple[tuple[float, float], ...]  # upper left of the four matrices
    shapes: tuple[tuple[float, float], ...]  # their widths and heights
    middle: float  # of the product, from above
    note: tuple[float, float]

    @staticmethod
    def plan(factorisation: Factorisation, title: str, counts: tuple[int, int, int]) -> "_Page":
        taps, heads, keys = counts
        cell, key = min(_CELL, _TALLEST / max(taps, heads)), min(_KEY, _WIDEST / keys)
        shapes = tuple((m * key, n * cell) for m, n in ((keys, taps), (0, taps), (keys, heads), (keys, taps)))
        shapes = (shapes[0], (heads * cell, taps * cell), *shapes[2:])
        slots = [max(_SLOT, width) for width, _ in shapes[:3]]
        labels = max(len(_point(shift)) for shift in factorisation.shifts) * _LETTER + 0.1
        lefts = [labels, labels + slots[0] + _SIGN]
        lefts.append(lefts[1] + slots[1] + _SIGN + 0.22)
        width = lefts[2] + slots[2] + _RIGHT
        wrapped = printable(title, width=int((width - 0.4) * 10.5))
        top = 0.25 + 0.2 * (1 + wrapped.count("\n")) + _HEADING
        tall = max(height for _, height in shapes)
        middle = top + tall / 2
        lower = top + tall + _TICKS + _BETWEEN + _HEADING
        inner = [left + (slot - shape[0]) / 2 for left, slot, shape in zip(lefts, slots, shapes, strict=False)]
        corners = [(x, middle - shape[1] / 2) for x, shape in zip(inner, shapes, strict=False)]
        corners.append((inner[0], lower))
        text = _text(factorisation, int((width - lefts[1] - _RIGHT) * 14.5))
        high = max(shapes[3][1], 0.2 * (1 + text.count("\n")))
        return _Page(
            title=wrapped,
            text=text,
            width=width,
            height=lower + high + _TICKS + 0.05,
            cell=cell,
            key=key,
            corners=tuple(corners),
            shapes=shapes,
            middle=middle,
            note=(lefts[1], lower - 0.04),
        )

    def below(self, place: int, gap: float) -> tuple[float, float]:
        """Where the name of a matrix's columns stands."""
        (x, y), (width, height) = self.corners[place], self.shapes[place]
        return x + width / 2, y + height + gap

    def before(self, place: int) -> tuple[float, float]:
        """Where the sign before a matrix of the product stands."""
        slot = max(_SLOT, self.shapes[place][0])
        left = self.corners[place][0] - (slot - self.shapes[place][0]) / 2
        return left - _SIGN / 2 - (0.2 if place == 2 else 0.0), self.middle


def _text(factorisation: Factorisation, width: int) -> str:
    pixels = " x ".join(map(str, factorisation.sizes))
    lines = (
        f"Relative residual |E_q − Φ A_q| / |E_q| = {_number(factorisation.residual)}",
        f"Query {_point(factorisation.query)} over {pixels} pixels; keys row by row.",
        "Each row of E_q marks the pixel that one kernel position sees, named by its shift from the query; an empty "
        "row sees a zero outside the image. A row of Φ mixes the heads' attention A_q into it.",
    )
    return "\n".join(printable(line, width=max(width, 20)) for line in lines)


def _point(place: Sequence[int]) -> str:
    return f"({', '.join(map(str, place))})"


def _write(figure: Figure, page: _Page, x: float, y: float, text: str, **style: Any) -> None:
    figure.text(x / page.width, 1.0 - y / page.height, text, **{"ha": "left", "va": "top", **style})


def _panel(figure: Figure, page: _Page, place: int, matrix: FloatArray, *, label: str, **scale: Any) -> Axes:
    (x, y), (width, height) = page.corners[place], page.shapes[place]
    box = (x / page.width, 1.0 - (y + height) / page.height, width / page.width, height / page.height)
    axes = figure.add_axes(box, label=label)
    axes.imshow(matrix, aspect="auto", interpolation="none", **scale)
    axes.set_xticks([])
    axes.set_yticks([])
    if page.cell >= _LEAST_LABEL:
        axes.hlines(np.arange(1, len(matrix)) - 0.5, -0.5, matrix.shape[1] - 0.5, color=GRID, linewidth=0.4)
    return axes


def _heading(figure: Figure, page: _Page, place: int, name: str, detail: str) -> None:
    (x, y), (width, _) = page.corners[place], page.shapes[place]
    middle = x + width / 2
    _write(figure, page, middle, y - 0.2, name, fontsize=11.0, ha="center", va="bottom")
    _write(figure, page, middle, y - 0.05, detail, fontsize=7.5, color=FAINT, ha="center", va="bottom")


def _ticks(axes: Axes, rows: Sequence[str] | None, columns: Sequence[str] | None, cell: float) -> None:
    """Names of rows and of columns, every so many where they would meet."""
    if rows is not None:
        places = range(0, len(rows), math.ceil(_LEAST_LABEL / cell))
        axes.set_yticks(places, [rows[place] for place in places])
    if columns is not None:
        room = _LETTER * len(columns[-1]) + 0.05
        places = range(0, len(columns), math.ceil(room / cell))
        axes.set_xticks(places, [columns[place] for place in places])
    axes.tick_params(length=0, pad=2, labelsize=7.0)


def _image_rows(axes: Axes, sizes: Sequence[int], key: float) -> None:
    """A line where each row of the image begins, unless they would be a grey area."""
    if len(sizes) > 1 and sizes[-1] * key > 0.05:
        keys = math.prod(sizes)
        bottom, top = axes.get_ylim()
        axes.vlines(np.arange(sizes[-1], keys, sizes[-1]) - 0.5, bottom, top, color=FAINT, linewidth=0.4)


def _numbers(axes: Axes, matrix: FloatArray, cell: float) -> None:
    """The entries, written into cells that are large enough."""
    largest = float(np.abs(matrix).max())
    if cell < 0.2 or largest >= 999.5:
        return
    for (row, column), value in np.ndenumerate(matrix):
        text = f"{value:.1f}" if largest < 9.95 else f"{value:.0f}"
        if float(text) != 0.0:
            colour = "white" if abs(value) > 0.6 * largest else INK
            axes.text(column, row, text, fontsize=5.5, color=colour, ha="center", va="center")


def _symmetric(matrix: FloatArray, least: float) -> dict[str, Any]:
    largest = max(float(np.abs(matrix).max()), least, 1e-300)
    return {"vmin": -largest, "vmax": largest, "cmap": _SIGNED}


def _range(matrix: FloatArray) -> str:
    return f"from {_number(float(matrix.min()))} to {_number(float(matrix.max()))}"


def _number(value: float) -> str:
    """Two digits; what rounding leaves of zero is zero where numbers are of order one."""
    return f"{value:.2f}" if 0.01 <= abs(value) < 100 else "0" if value == 0 else f"{value:.1e}"
