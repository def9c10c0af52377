"""The style of all figures, their colours and texts, and saving them as PNG and SVG.

Figures are `matplotlib.figure.Figure` objects, never pyplot's: they neither use nor change a user's plots, backend and
`matplotlibrc`. SVG files have no date and a fixed salt, so that the same run gives the same bytes.
"""

import io
import textwrap
from functools import lru_cache, partial
from pathlib import Path

import matplotlib.style
from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font

from attnconv._util.atomic_write import write_atomically

INK = "#1b1f24"
FAINT = "#6a737d"
GRID = "#d9dde2"

# Nine hues that readers with any form of colour vision can tell apart (Okabe and Ito's without yellow and black; wine,
# indigo and olive of Tol's set) and eight shapes: their pair repeats after 72 heads.
COLOURS: tuple[str, ...] = (
    "#0072b2",  # blue
    "#d55e00",  # vermilion
    "#009e73",  # green
    "#cc79a7",  # pink
    "#e69f00",  # orange
    "#56b4e9",  # sky
    "#882255",  # wine
    "#332288",  # indigo
    "#999933",  # olive
)
SHAPES: tuple[str, ...] = ("o", "s", "^", "D", "v", "P", "X", "h")

_DPI = 200
_STYLE: dict[str, object] = {
    "font.family": ["DejaVu Sans"],  # ships with matplotlib: the same letters on every machine
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
    "figure.facecolor": "white",
    "figure.titlesize": 12.0,
    "image.interpolation": "none",
    "text.parse_math": False,  # a run may be called "50$"
    "image.composite_image": False,
    "path.simplify": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "attnconv",
}


house_style = partial(matplotlib.style.context, ["default", _STYLE])
"""Context and decorator, `@house_style()`: matplotlib's defaults with the style of the report."""


def colour_of(index: int) -> str:
    """Colour of a head or run, counted from 0."""
    return COLOURS[index % len(COLOURS)]


def shape_of(index: int) -> str:
    """Matplotlib marker of a head or run, counted from 0."""
    return SHAPES[index % len(SHAPES)]


def printable(text: str, *, width: int | None = None) -> str:
    """Replace letters that the font lacks by "?", collapse white space, and wrap lines longer than `width`."""
    known = _letters()
    line = " ".join("".join(c if ord(c) in known or c.isspace() else "?" for c in text).split())
    return line if width is None else "\n".join(textwrap.wrap(line, width))


@lru_cache(maxsize=1)
def _letters() -> frozenset[int]:
    path = font_manager.findfont(font_manager.FontProperties(family="DejaVu Sans"))
    return frozenset(FT2Font(path).get_charmap())


def save(figure: Figure, stem: Path) -> tuple[Path, Path]:
    """Write a figure as `stem.png` and `stem.svg`; create the folder if it does not exist.

    Args:
        figure: The figure.
        stem: Path without a suffix; a dot in its name is kept.

    Returns:
        The two files, PNG first.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    png, svg = stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")
    with house_style():
        bitmap, drawing = io.BytesIO(), io.BytesIO()
        figure.savefig(bitmap, format="png", dpi=_DPI, metadata={"Software": "attnconv"})
        figure.savefig(drawing, format="svg", metadata={"Date": None, "Creator": "attnconv"})
    write_atomically(png, bitmap.getvalue())
    write_atomically(svg, drawing.getvalue())
    return png, svg
