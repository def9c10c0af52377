"""Panels of head centres: the drawing that Figures 3, 4, 12 and 14 share.

Each panel shows the shifts around one query pixel, rows downwards as in an image: the pixel grid, the query as a black
square, and per head its centre (own colour, own mark), a solid contour around 50 % and a dotted one around 90 % of its
mass. A head whose centre lies outside is shown by its mark, hollow, at the edge of the panel, and counted below it.
Everything is placed in inches, so that no text can meet another.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Ellipse, Rectangle
from matplotlib.ticker import MaxNLocator

from attnconv._util.errors import bad
from attnconv.report.figure_style import FAINT, GRID, INK, house_style, printable
from attnconv.report.gaussian_contours import Fate, FloatArray, HeadGaussians, choose_view, contour, fates
from attnconv.report.palette import colour_of, shape_of, size_of

_PANEL = 2.3  # inches
_LEFT, _RIGHT, _BETWEEN = 0.75, 0.2, 0.22
_HEADING, _TICKS, _NOTE, _AXIS, _ENTRY = 0.3, 0.2, 0.15, 0.32, 0.21
_NOTE_WIDTH = 40  # characters below a panel
_UNSEEN = 15.5  # largest shift on the paper's 16 x 16 positions, where no sizes are known
_CONTOURS: tuple[tuple[float, Literal["-", ":"], float], ...] = ((0.5, "-", 1.4), (0.9, ":", 1.2))


@dataclass(frozen=True, eq=False)
class Panel:
    """One panel: its heading and its heads."""

    title: str
    heads: HeadGaussians


def draw_panels(
    panels: Sequence[Panel], *, title: str, sizes: tuple[int, int] | None = None, view: float | None = None
) -> Figure:
    """All panels at one scale, row by row, with one legend.

    Args:
        panels: At least one.
        title: Heading of the figure.
        sizes: Rows and columns of the image that the heads look at; limits the view.
        view: Half the side of a panel in pixels; None chooses it from the heads.

    Raises:
        ValueError: No panel, or a view that is not positive.
    """
    if not panels:
        raise ValueError(bad("panels", "must hold at least one layer or epoch", "none"))
    half = _half_side(panels, sizes, view)
    notes = [_unseen(fates(panel.heads, half)) for panel in panels]
    page = _Page.plan(panels, notes, title)
    with house_style():
        figure = Figure(figsize=(page.width, page.height))
        _write(figure, page, page.width / 2, 0.14, page.title, fontsize=12.0, linespacing=1.2)
        for index, (panel, note) in enumerate(zip(panels, notes, strict=True)):
            x, y = page.corner(index)
            axes = figure.add_axes(
                (x / page.width, 1.0 - (y + _PANEL) / page.height, _PANEL / page.width, _PANEL / page.height)
            )
            _draw_panel(axes, panel, half)
            axes.tick_params(labelbottom=index + page.columns >= len(panels), labelleft=index % page.columns == 0)
            _write(figure, page, x + _PANEL / 2, y + _PANEL + _TICKS + 0.02, note, fontsize=7.5, color=FAINT)
        middle = page.left + (page.columns * (_PANEL + _BETWEEN) - _BETWEEN) / 2
        _write(figure, page, middle, page.bottom + 0.05, "column shift (pixels)")
        aside = {"rotation": 90, "ha": "right", "va": "center"}
        _write(
            figure, page, page.left - 0.45, (page.tops[0] + page.bottom) / 2, "row shift (pixels, downwards)", **aside
        )
        _legend(figure, page.entries, bottom=0.1 / page.height, step=_ENTRY / page.height)
    return figure


def _half_side(panels: Sequence[Panel], sizes: tuple[int, int] | None, view: float | None) -> float:
    limit = _UNSEEN if sizes is None else max(sizes) - 0.5
    half = choose_view([panel.heads for panel in panels], limit=limit) if view is None else view
    if not (half > 0.0 and math.isfinite(half)):
        raise ValueError(bad("view", "must be a positive number of pixels", half))
    return half


@dataclass(frozen=True)
class _Page:
    """Where everything stands, in inches from the figure's upper left corner."""

    title: str
    columns: int
    left: float
    width: float
    height: float
    tops: tuple[float, ...]  # upper edge of the panels of each row
    bottom: float  # lower edge of the last row with its tick labels and notes
    entries: list[list[tuple[Line2D, str]]]

    @staticmethod
    def plan(panels: Sequence[Panel], notes: Sequence[str], title: str) -> "_Page":
        columns = _columns(len(panels))
        width = _LEFT + max(columns, 2) * (_PANEL + _BETWEEN) - _BETWEEN + _RIGHT
        wrapped = printable(title, width=int((width - 0.4) * 10.5))
        y = 0.25 + 0.2 * (1 + wrapped.count("\n"))
        tops = []
        for start in range(0, len(panels), columns):
            tops.append(y + _HEADING)
            lines = max(note.count("\n") + 1 if note else 0 for note in notes[start : start + columns])
            y += _HEADING + _PANEL + _TICKS + _NOTE * lines
        entries = _entries(max(panel.heads.count for panel in panels), width)
        return _Page(
            title=wrapped,
            columns=columns,
            left=(width - columns * (_PANEL + _BETWEEN) + _BETWEEN + _LEFT - _RIGHT) / 2,  # one panel: in the middle
            width=width,
            height=y + _AXIS + _ENTRY * len(entries) + 0.15,
            tops=tuple(tops),
            bottom=y,
            entries=entries,
        )

    def corner(self, index: int) -> tuple[float, float]:
        row, column = divmod(index, self.columns)
        return self.left + column * (_PANEL + _BETWEEN), self.tops[row]


def _write(figure: Figure, page: _Page, x: float, y: float, text: str, **style: Any) -> None:
    figure.text(x / page.width, 1.0 - y / page.height, text, **{"fontsize": 9.0, "ha": "center", "va": "top", **style})


def _columns(count: int) -> int:
    """Panels per row: full rows where that is possible, at most four."""
    return count if count <= 3 else 2 if count == 4 else 3 if count in (5, 6, 9) else 4


def _draw_panel(axes: Axes, panel: Panel, view: float) -> None:
    edges = np.arange(math.ceil(-view - 0.5), math.floor(view - 0.5) + 1) + 0.5
    axes.set_xticks(edges, minor=True)
    axes.set_yticks(edges, minor=True)
    axes.grid(which="minor", color=GRID, linewidth=0.6 if view < 8 else 0.35)
    axes.tick_params(which="minor", length=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=6, integer=True, symmetric=True, steps=[1, 2, 5, 10]))
    axes.set_axisbelow(True)
    axes.set_xlim(-view, view)
    axes.set_ylim(view, -view)
    axes.add_patch(Rectangle((-0.5, -0.5), 1.0, 1.0, facecolor="black", edgecolor="none", zorder=1.5))
    for index, fate in enumerate(fates(panel.heads, view)):
        centre, covariance = panel.heads.centres[index], panel.heads.covariances[index]
        if fate is not Fate.BROKEN and np.isfinite(covariance).all():
            _draw_contours(axes, centre, covariance, colour_of(index), view)
        if fate is not Fate.BROKEN:
            _draw_centre(axes, centre, index, view)
    axes.set_title(printable(panel.title, width=30))


def _draw_contours(axes: Axes, centre: FloatArray, covariance: FloatArray, colour: str, view: float) -> None:
    if np.abs(centre).max() > 10.0 * view:
        return  # too far for renderers; the head counts as outside
    for mass, style, width in _CONTOURS:
        outline = contour(centre, covariance, mass, longest=50.0 * view)
        row, column = outline.centre
        major, minor = outline.semi_axes
        ellipse = Ellipse((column, row), 2.0 * major, 2.0 * minor, angle=math.degrees(outline.angle), fill=False)
        ellipse.set(edgecolor=colour, linestyle=style, linewidth=width, zorder=2.0)
        axes.add_patch(ellipse)


def _draw_centre(axes: Axes, centre: FloatArray, index: int, view: float) -> None:
    row, column = np.clip(centre, -view, view)
    outside = bool(np.abs(centre).max() > view)
    axes.plot(
        [column],
        [row],
        marker=shape_of(index),
        markersize=size_of(index),
        markerfacecolor="white" if outside else colour_of(index),
        markeredgecolor=colour_of(index) if outside else "white",
        markeredgewidth=1.2 if outside else 0.5,
        clip_on=not outside,
        zorder=3.0,
    )


def _unseen(decided: Sequence[Fate]) -> str:
    """What a panel cannot show, in words: `2 heads outside the view, 1 wider than the view`."""
    counts = Counter(decided)
    hidden = [(counts[fate], fate.value) for fate in (Fate.OUTSIDE, Fate.WIDE, Fate.BROKEN) if counts[fate]]
    if not hidden:
        return ""
    (first, what), *others = hidden
    words = ", ".join((f"{first} {'head' if first == 1 else 'heads'} {what}", *(f"{n} {fate}" for n, fate in others)))
    return printable(words, width=_NOTE_WIDTH)


def _entries(heads: int, width: float) -> list[list[tuple[Line2D, str]]]:
    """The legend's rows: the heads, as many per row as fit, and what lines and square mean."""
    each = [
        Line2D([], [], linestyle="none", marker=shape_of(i), markersize=size_of(i) + 1.0, color=colour_of(i))
        for i in range(heads)
    ]
    named = [(line, f"head {index}" if index == 0 else str(index)) for index, line in enumerate(each)]
    fitting = int((width - 0.8) / 0.42)
    rows = [named[start : start + fitting] for start in range(0, heads, fitting)]
    lines = [(Line2D([], [], color=INK, linestyle=s, linewidth=w), f"{m:.0%} of the mass") for m, s, w in _CONTOURS]
    square = Line2D([], [], linestyle="none", marker="s", markersize=7.0, color="black")
    return [*rows, [*lines, (square, "query pixel")]]


def _legend(figure: Figure, rows: Sequence[Sequence[tuple[Line2D, str]]], *, bottom: float, step: float) -> None:
    for above, row in enumerate(reversed(rows)):
        figure.legend(
            [line for line, _ in row],
            [label for _, label in row],
            loc="lower center",
            bbox_to_anchor=(0.5, bottom + above * step),
            ncols=len(row),
            borderpad=0.0,
            borderaxespad=0.0,
            columnspacing=1.2,
            handletextpad=0.4,
            handlelength=1.6 if above == 0 else 0.8,
        )
