"""Figure 1: what multi-head attention computes for one query pixel q, drawn from a layer's attention.

output_q = sum_h ( sum_k A^(h)_{q,k} X_k ) W^(h)
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure

from attnconv._util.errors import bad
from attnconv.report.figure_style import FAINT, GRID, INK, FloatArray, PanelGrid, colour_of, house_style, mark_query

_IMAGE, _MAP, _MATRIX, _OUTPUT = 2.9, 0.82, 0.62, (0.28, 1.44)  # inches
_NOTE = (
    "Left: the image, coloured where each head attends for the query (black square). Each head mixes the pixels "
    "by its attention A, multiplies the mixture by its own matrix W, and the output at the query is the sum."
)


@house_style()
def draw_mixture(maps: Any, query: tuple[int, int], *, centres: Sequence[tuple[float, float]], title: str) -> Figure:
    """Draw one query's output as a sum over heads that attend at shifts.

    Args:
        maps: (h, rows, columns) attention probabilities of the query over the image's keys, 1 to 9 heads.
        query: Its row and column.
        centres: Delta of each head, row and column shift in pixels.
        title: Heading.

    Raises:
        ValueError: No head or more than nine, or not one centre per head.
    """
    heads = np.asarray(maps, dtype=np.float64)
    if heads.ndim != 3 or not 1 <= len(heads) <= 9:
        raise ValueError(bad("maps", "must have the shape (heads, rows, columns) with 1 to 9 heads", heads.shape))
    if len(centres) != len(heads):
        raise ValueError(bad("centres", f"must have one shift for each of the {len(heads)} heads", len(centres)))
    widths, heights = [_IMAGE, _MAP, _MATRIX, 0.9], [max(_MAP, _IMAGE / len(heads) - 0.32)] * len(heads)
    grid = PanelGrid(widths, heights, title=title, note=_NOTE, gap=(0.9, 0.32), left=0.3, above=0.4, below=0.25)
    shares = heads / np.maximum(heads.max((1, 2), keepdims=True), 1e-300)
    _draw_image(grid.add(slice(None), 0, (_IMAGE, _IMAGE)), shares, query)
    output = grid.add(slice(None), 3, _OUTPUT)
    _draw_output(output)
    for head, share in enumerate(shares):
        _draw_map(grid.add(head, 1, (_MAP, _MAP)), head, share, query, centres[head])
        matrix = grid.add(head, 2, (_MATRIX, _MATRIX))
        matrix.set_facecolor(to_rgba(colour_of(head), 0.25))
        matrix.spines[:].set(edgecolor=colour_of(head), linewidth=1.2)
        matrix.text(0.5, 0.5, f"W {head}", fontsize=8.5, ha="center", va="center")
        matrix.text(-0.8, 0.5, "·", fontsize=14.0, ha="center", va="center")
        line = {"arrowstyle": "-", "color": FAINT, "shrinkA": 3.0, "shrinkB": 8.0}
        output.annotate("", (-1.9, 0.5), (1.0, 0.5), "axes fraction", matrix.transAxes, arrowprops=line)
    for column, words in enumerate(("input X", "attention A", "matrix W", "output at q")):
        box = grid.box(0, column)
        grid.figure.text((box.x0 + box.x1) / 2, box.y1, f"{words}\n", ha="center", fontsize=9.5)
    return grid.figure


def _draw_image(axes: Axes, shares: FloatArray, query: tuple[int, int]) -> None:
    """All heads over one picture of the pixels: a pixel takes the colours of the heads that attend to it."""
    for head, share in enumerate(shares):
        colours = np.broadcast_to(to_rgba(colour_of(head)), (*share.shape, 4)).copy()
        colours[..., 3] = np.where(share > 0.01, 0.9 * share, 0.0)
        axes.imshow(colours, aspect="auto")
    rows, columns = shares.shape[1:]
    axes.hlines(np.arange(rows + 1) - 0.5, -0.5, columns - 0.5, color=GRID, linewidth=0.6)
    axes.vlines(np.arange(columns + 1) - 0.5, -0.5, rows - 0.5, color=GRID, linewidth=0.6)
    axes.spines[:].set_visible(False)
    mark_query(axes, query)
    axes.text(query[1], query[0], "q", fontsize=9.0, ha="center", va="center")


def _draw_map(axes: Axes, head: int, share: FloatArray, query: tuple[int, int], centre: tuple[float, float]) -> None:
    shades = LinearSegmentedColormap.from_list(f"head {head}", ["white", colour_of(head)])
    axes.imshow(share, cmap=shades, vmin=0.0, vmax=1.0, aspect="auto")
    axes.spines[:].set_edgecolor(GRID)
    mark_query(axes, query)
    axes.set_ylabel(f"head {head}", fontsize=8.5, rotation=0, ha="right", va="center", labelpad=6.0)
    shift = f"Δ = ({centre[0]:g}, {centre[1]:g})".replace("-", "−")
    axes.set_xlabel(shift, fontsize=7.5, color=FAINT, labelpad=2.0)


def _draw_output(axes: Axes) -> None:
    """The output's channels, with the sign of the sum to their left."""
    axes.set(xlim=(0, 1), ylim=(0, 6), facecolor="#dfe6ee")
    axes.hlines(range(1, 6), 0, 1, color=INK, linewidth=1.0)
    axes.spines[:].set_edgecolor(INK)
    sign: dict[str, Any] = {"fontsize": 20.0, "ha": "center", "va": "center"}
    sign["arrowprops"] = {"arrowstyle": "->", "color": INK, "shrinkB": 0.0}
    axes.annotate("Σ", (0.0, 0.5), (-1.9, 0.5), "axes fraction", **sign)
