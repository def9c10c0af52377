"""Style, colours and panels shared by all figures, and `save`, which writes figures as PNG, SVG and PDF files.

Figures are `matplotlib.figure.Figure` objects that are not created by pyplot, so they neither use nor change the user's
plots, backend or `matplotlibrc`. Files contain no date and a fixed salt, so that equal figures give identical files.
"""

import io
import textwrap
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import matplotlib.style
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.patches import Rectangle
from matplotlib.patheffects import Normal, Stroke
from matplotlib.transforms import Bbox

from attnconv._util.atomic_write import write_atomically

FloatArray: TypeAlias = npt.NDArray[np.float64]
Span: TypeAlias = int | slice
Size: TypeAlias = tuple[float, float]
Anchor: TypeAlias = Literal["C", "N", "W"]

INK = "#1b1f24"
FAINT = "#6a737d"
GRID = "#d9dde2"

ATTENTION = "cividis"  # colour map of attention
UNIFORM = 2  # threshold of `nearly_uniform`, as a multiple of the uniform probability

# Nine hues that are safe for colour-blind readers: blue, vermilion, green, pink, orange and sky (Okabe and Ito), wine,
# indigo and olive (Tol). Combined with eight marker shapes, they repeat after 72 heads.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#332288", "#999933")
_SHAPES = ("o", "s", "^", "D", "v", "P", "X", "h")

_DPI = 200
_NAME_WIDTH = 44  # characters
_NARROWEST, _RIGHT = 4.6, 0.2  # inches: minimum width of a `PanelGrid`, and its right margin
_STYLE: dict[str, object] = {
    "font.family": ["DejaVu Sans"],  # included in matplotlib
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.labelsize": 9.0,
    "axes.edgecolor": "#8b949e",
    "axes.linewidth": 0.8,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.fontsize": 9.0,
    "legend.frameon": False,
    "figure.titlesize": 12.0,
    "image.interpolation": "none",
    "text.parse_math": False,  # the name of a run may contain "$"
    "image.composite_image": False,
    "path.simplify": False,
    "pdf.fonttype": 42,  # embedded TrueType fonts, as journals require
    "svg.fonttype": "path",
    "svg.hashsalt": "attnconv",
}

house_style = partial(matplotlib.style.context, ["default", _STYLE])
"""Context manager and decorator that applies matplotlib's defaults and the style of the reports."""


def nearly_uniform(largest: float, keys: int) -> bool:
    """Return whether all probabilities of a map are below twice the uniform probability, 1 / keys."""
    return bool(largest < UNIFORM / keys)


def colour_of(index: int) -> str:
    """Return the colour of a head or run, given its index from 0."""
    return _COLOURS[index % len(_COLOURS)]


def shape_of(index: int) -> str:
    """Return the matplotlib marker of a head or run, given its index from 0."""
    return _SHAPES[index % len(_SHAPES)]


def printable(text: str, *, width: int | None = None) -> str:
    """Replace characters that the font lacks with "?", collapse white space, and wrap lines longer than `width`."""
    known = _letters()
    line = " ".join("".join(c if ord(c) in known or c.isspace() else "?" for c in text).split())
    return line if width is None else "\n".join(textwrap.wrap(line, width))


def shortened(name: str) -> str:
    """Return the name of a layer as a label; long names keep their ends, where layers differ."""
    line = printable(name)
    return line if len(line) <= _NAME_WIDTH else f"...{line[3 - _NAME_WIDTH :]}"


@lru_cache(maxsize=1)
def _letters() -> frozenset[int]:
    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


class PanelGrid:
    """A figure with a grid of cells, a title, and a note in small print at the bottom; lengths are in inches.

    `gap` is the space between columns and between rows; `left`, `above` and `below` are margins for labels.
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
        self.footer = 0.2 + 0.15 * (1 + footer.count("\n"))  # height of the note
        top = 0.25 + 0.2 * (1 + heading.count("\n")) + above
        bottom = below + (self.footer if note else 0.1)
        height = top + sum(heights) + gap[1] * (len(heights) - 1) + bottom
        self.figure = Figure(figsize=(width, height))
        self.figure.suptitle(heading, y=1.0 - 0.14 / height, va="top", linespacing=1.2)
        self.figure.text(0.5, 0.1 / height, footer, fontsize=7.5, color=FAINT, ha="center", linespacing=1.3)
        start = (width + left - _RIGHT - inner) / 2
        self.figure.subplots_adjust(start / width, bottom / height, (start + inner) / width, 1.0 - top / height)
        between = gap[0] * len(widths) / sum(widths), gap[1] * len(heights) / sum(heights)
        self.figure.subplots_adjust(wspace=between[0], hspace=between[1])
        self.cells = self.figure.add_gridspec(len(heights), len(widths), width_ratios=widths, height_ratios=heights)

    def box(self, row: Span, column: Span, size: Size | None = None, *, anchor: Anchor = "C") -> Bbox:
        """Return the box of a cell, in fractions of the figure, or a box of `size` inches anchored in the cell."""
        box = self.cells[row, column].get_position(self.figure)
        if size is None:
            return box
        width, height = self.figure.get_size_inches()
        return Bbox.from_bounds(0.0, 0.0, size[0] / width, size[1] / height).anchored(anchor, box)

    def add(self, row: Span, column: Span, size: Size | None = None, *, anchor: Anchor = "C") -> Axes:
        """Add axes without ticks to a cell; see `box`."""
        return self.figure.add_axes(self.box(row, column, size, anchor=anchor).bounds, xticks=[], yticks=[])

    def add_legend(self, scale: LogNorm) -> None:
        """Draw the colours of attention above the note, in a margin (`below`) of at least 0.45 inches."""
        width, height = self.figure.get_size_inches()
        axes = self.figure.add_axes((0.5 - 1.0 / width, (self.footer + 0.2) / height, 2.0 / width, 0.11 / height))
        axes.imshow(np.linspace(0, 1, 256)[None], cmap=ATTENTION, aspect="auto", extent=(0, 1, 0, 1))
        times = [4**power for power in range(12) if 4**power <= scale.vmax]
        axes.set_xticks([float(scale(value)) for value in times], [f"{value}x" for value in times])
        axes.set_yticks([0.5], ["times uniform"])
        axes.tick_params(length=0, pad=2, labelsize=7.0)


def attention_scale(keys: int) -> LogNorm:
    """Return the scale of probabilities times `keys`, from 1 (uniform or less) to `keys` (all on one key)."""
    return LogNorm(1.0, max(keys, 2), clip=True)


def mark_query(axes: Axes, query: Sequence[float | int], size: Sequence[float] = (1.0, 1.0), **options: Any) -> None:
    """Draw a black frame with a white rim around the query (row, column); `size` is (height, width) in positions."""
    corner = (query[1] - size[1] / 2, query[0] - size[0] / 2)
    rim = [Stroke(linewidth=1.9, foreground="white"), Normal()]
    frame = Rectangle(corner, size[1], size[0], fill=False, linewidth=0.9, zorder=2.0, path_effects=rim, **options)
    axes.add_patch(frame)


def save(figure: Figure, stem: Path, *, publication: bool = False) -> tuple[Path, ...]:
    """Write a figure as `stem.png` and `stem.svg`; create the folder if it does not exist.

    Args:
        figure: The figure.
        stem: Path of the files without suffix; a dot in its name does not start a suffix.
        publication: Also write `stem.pdf`, remove the title, crop the margins, and keep text in the SVG editable.

    Returns:
        The paths of the files: PNG, SVG and, for a publication, PDF.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    formats: dict[str, dict[str, Any]] = {
        "png": {"dpi": _DPI, "metadata": {"Software": "attnconv"}},
        "svg": {"metadata": {"Date": None, "Creator": "attnconv"}},
    }
    if publication:
        figure.suptitle("")
        formats["pdf"] = {"metadata": {"CreationDate": None, "Creator": "attnconv"}}
    paths = []
    with house_style(), matplotlib.rc_context({"svg.fonttype": "none"} if publication else {}):
        for kind, options in formats.items():
            content = io.BytesIO()
            figure.savefig(content, format=kind, bbox_inches="tight" if publication else None, **options)
            paths.append(stem.with_name(f"{stem.name}.{kind}"))
            write_atomically(paths[-1], content.getvalue())
    return tuple(paths)
