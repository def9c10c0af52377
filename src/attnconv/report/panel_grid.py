"""Figures made of panels: a grid of cells whose sizes are given in inches, a heading above it and a note below it."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.patches import Rectangle
from matplotlib.patheffects import Normal, Stroke
from matplotlib.transforms import Bbox

from attnconv.report.figure_style import FAINT, printable

Anchor: TypeAlias = Literal["C", "N", "W"]

_NARROWEST, _RIGHT = 4.6, 0.2  # inches: least width of a figure, its right margin


class PanelGrid:
    """A figure with a grid of cells, a heading, and a note in small letters at its lower edge; lengths are in inches.

    `gap` is between columns and between rows; `left`, `above` and `below` leave room for labels outside the cells.
    """

    def __init__(
        self,
        widths: Sequence[float],
        heights: Sequence[float],
        *,
        title: str,
        note: str = "",
        gap: tuple[float, float],
        left: float,
        above: float = 0.0,
        below: float = 0.0,
    ) -> None:
        inner = sum(widths) + gap[0] * (len(widths) - 1)
        width = max(left + inner + _RIGHT, _NARROWEST)
        heading, footer = printable(title, width=int(10.5 * width - 4)), printable(note, width=int(17 * width - 5))
        top = 0.25 + 0.2 * (1 + heading.count("\n")) + above
        bottom = below + (0.2 + 0.15 * (1 + footer.count("\n")) if note else 0.1)
        height = top + sum(heights) + gap[1] * (len(heights) - 1) + bottom
        self.figure = Figure(figsize=(width, height))
        self.figure.suptitle(heading, y=1.0 - 0.14 / height, va="top", linespacing=1.2)
        self.figure.text(0.5, 0.1 / height, footer, fontsize=7.5, color=FAINT, ha="center", linespacing=1.3)
        start = (width + left - _RIGHT - inner) / 2
        self.cells = GridSpec(
            len(heights),
            len(widths),
            figure=self.figure,
            left=start / width,
            right=(start + inner) / width,
            top=1.0 - top / height,
            bottom=bottom / height,
            wspace=gap[0] * len(widths) / sum(widths),
            hspace=gap[1] * len(heights) / sum(heights),
            width_ratios=widths,
            height_ratios=heights,
        )

    def box(
        self, row: int | slice, column: int | slice, size: tuple[float, float] | None = None, *, anchor: Anchor = "C"
    ) -> Bbox:
        """The box of a cell, in fractions of the figure; or one of `size` inches, anchored in the cell."""
        box = self.cells[row, column].get_position(self.figure)
        if size is None:
            return box
        width, height = self.figure.get_size_inches()
        return Bbox.from_bounds(0.0, 0.0, size[0] / width, size[1] / height).anchored(anchor, box)

    def add(
        self, row: int | slice, column: int | slice, size: tuple[float, float] | None = None, *, anchor: Anchor = "C"
    ) -> Axes:
        """Add axes without ticks to a cell; see `box`."""
        return self.figure.add_axes(self.box(row, column, size, anchor=anchor).bounds, xticks=[], yticks=[])


def mark_query(axes: Axes, query: Sequence[float | int], size: Sequence[float] = (1.0, 1.0), **options: Any) -> None:
    """Draw a black frame around the query pixel, with a white rim that is visible on dark pixels.

    `query` and `size` are (row, column) and (height, width) in the units of the axes.
    """
    corner = (query[1] - size[1] / 2, query[0] - size[0] / 2)
    rim = [Stroke(linewidth=1.9, foreground="white"), Normal()]
    frame = Rectangle(corner, size[1], size[0], fill=False, linewidth=0.9, zorder=2.0, path_effects=rim, **options)
    axes.add_patch(frame)
