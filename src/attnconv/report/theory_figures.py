"""Figures 1 and 11: attention at one query, as a sum over heads and as the taps of a convolution.

Figure 1:   output_q = sum_h ( sum_k A^(h)_{q,k} X_k ) W^(h)

Figure 11:  E_q = Phi A_q. Rows of E_q and Phi are kernel taps, labelled by their shifts (key minus query). Rows of A_q
and columns of Phi are heads. Columns of E_q and A_q are keys, with a thin line at the start of each image row.
"""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure

from attnconv._util.errors import bad
from attnconv.report.figure_style import (
    FAINT,
    GRID,
    INK,
    FloatArray,
    PanelGrid,
    colour_of,
    house_style,
    mark_query,
)
from attnconv.theory.expressibility import Factorisation

_TALLEST, _WIDEST = 4.6, 4.2  # inches: maximum size of one matrix
_PALE = 4  # the darkest colour is at least this multiple of the uniform probability
_CELL = 0.24  # maximum height of a row, and maximum width of a key
_SLOT = 1.55  # minimum width of a matrix's column, for its title
_HEADING = 0.46
_LETTER, _LINE = 0.06, 0.13  # width and height of a character in a tick label
_SAME = 1e-5  # largest relative residual for which the figure shows "=" instead of "≈"
_IMAGE, _MAP, _MATRIX, _OUTPUT = 2.9, 0.82, 0.62, (0.28, 1.44)  # inches
_NOTE = (
    "Left: the positions to which the query (small frame) attends in each head. Each head averages the input with its "
    "attention A and multiplies the average by its matrix W. The output at the query is the sum over heads."
)


@house_style()
def draw_mixture(maps: Any, query: tuple[int, int], *, centres: Sequence[tuple[float, float]], title: str) -> Figure:
    """Draw a diagram of the layer's output at one query as a sum over heads, with the attention map of each head.

    Args:
        maps: Attention probabilities of the query over all keys, for each of 1 to 9 heads, (h, rows, columns).
        query: Row and column of the query, from 0.
        centres: Centre Delta of each head, (row shift, column shift) in positions.
        title: Title of the figure.

    Raises:
        ValueError: If there are no heads or more than nine, or the number of centres differs from the number of heads.
    """
    heads = np.asarray(maps, dtype=np.float64)
    if heads.ndim != 3 or not 1 <= len(heads) <= 9:
        raise ValueError(bad("maps", "must have the shape (heads, rows, columns) with 1 to 9 heads", heads.shape))
    if len(centres) != len(heads):
        raise ValueError(bad("centres", f"must contain one shift per head ({len(heads)})", len(centres)))
    widths, heights = [_IMAGE, _MAP, _MATRIX, 0.9], [max(_MAP, _IMAGE / len(heads) - 0.32)] * len(heads)
    grid = PanelGrid(widths, heights, title=title, note=_NOTE, gap=(0.9, 0.32), left=0.3, above=0.4, below=0.25)
    shares = heads / np.maximum(heads.max((1, 2)), _PALE / heads[0].size)[:, None, None]
    _draw_image(grid.add(slice(None), 0, (_IMAGE, _IMAGE)), shares, query)
    output = grid.add(slice(None), 3, _OUTPUT)  # the output's channels, with the summation sign to their left
    output.set(xlim=(0, 1), ylim=(0, 6), facecolor="#dfe6ee")
    output.hlines(range(1, 6), 0, 1, color=INK, linewidth=1.0)
    output.spines[:].set_edgecolor(INK)
    arrow = {"arrowstyle": "->", "color": INK, "shrinkB": 0.0}
    sign: dict[str, Any] = {"fontsize": 20.0, "ha": "center", "va": "center", "arrowprops": arrow}
    output.annotate("Σ", (0.0, 0.5), (-1.9, 0.5), "axes fraction", **sign)
    for head, share in enumerate(shares):
        attended = grid.add(head, 1, (_MAP, _MAP))
        shades = LinearSegmentedColormap.from_list(f"head {head}", ["white", colour_of(head)])
        attended.imshow(share, cmap=shades, vmin=0.0, vmax=1.0, aspect="auto")
        attended.spines[:].set_edgecolor(GRID)
        mark_query(attended, query)
        attended.set_ylabel(f"head {head}", fontsize=8.5, rotation=0, ha="right", va="center", labelpad=6.0)
        shift = f"Δ = ({centres[head][0]:g}, {centres[head][1]:g})".replace("-", "−")
        attended.set_xlabel(shift, fontsize=7.5, color=FAINT, labelpad=2.0)
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
    """Draw the attention of all heads in one image, where positions have the colours of heads that attend to them."""
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


@house_style()
def draw_factorisation(factorisation: Factorisation, *, title: str) -> Figure:
    """Draw E_q, Phi and A_q of the approximation E_q ~ Phi A_q for one query, and the difference E_q - Phi A_q.

    The colour scale of E_q ends at 1; that of Phi covers its entries, and that of the difference at least -1 to 1.

    Args:
        factorisation: Result of `attnconv.theory.factorise`.
        title: Title of the figure.

    Example:
        >>> import torch
        >>> from attnconv.theory import factorise
        >>> found = factorise(torch.eye(2)[:, None].expand(2, 2, 2), 1, query=(0,), sizes=(2,))
        >>> figure = draw_factorisation(found, title="two pixels")
    """
    indicators, phi, rows = (
        np.asarray(matrix.cpu(), dtype=np.float64)
        for matrix in (factorisation.indicators, factorisation.phi, factorisation.rows)
    )
    difference = indicators - phi @ rows
    (taps, heads), keys = phi.shape, rows.shape[1]
    cell, key = min(_CELL, _TALLEST / max(taps, heads)), min(_CELL, _WIDEST / keys)
    shifts, numbers = [_point(shift) for shift in factorisation.shifts], [str(head) for head in range(heads)]
    widths = [max(_SLOT, width) for width in (keys * key, heads * cell, keys * key)]
    heights, gap = [max(taps, heads) * cell, max(taps * cell, 1.2)], (0.5, 0.4 + _HEADING)
    left = 0.1 + _LETTER * max(map(len, shifts))
    grid = PanelGrid(widths, heights, title=title, gap=gap, left=left, above=_HEADING, below=0.3)
    between = f"from {_number(float(phi.min()))} to {_number(float(phi.max()))}"
    axes = grid.add(0, 1, (heads * cell, taps * cell))
    _draw(axes, "phi", phi, "Φ", between, float(np.abs(phi).max()))
    _name(axes.xaxis, "heads", numbers, cell, _LETTER * len(numbers[-1]) + 0.05)
    _write_entries(axes, phi, cell)
    _write_sign(axes, "=" if factorisation.residual <= _SAME else "≈", 0.17)
    peak, rest = float(rows.max()), float(np.abs(difference).max())
    over_keys = (
        ("indicators", indicators, (0, 0), shifts, "E_q", f"kernel taps ({taps}) x keys ({keys})", 1.0),
        (
            "rows",
            rows,
            (0, 2),
            numbers,
            "A_q",
            f"heads ({heads}) x keys, up to {_number(peak)}",
            max(peak, _PALE / keys),
        ),
        ("difference", difference, (1, 0), shifts, "E_q − Φ A_q", f"largest entry {_number(rest)}", max(rest, 1.0)),
    )
    for label, matrix, (row, column), names, heading, detail, largest in over_keys:
        axes = grid.add(row, column, (keys * key, len(matrix) * cell), anchor="N" if row else "C")
        _draw(axes, label, matrix, heading, detail, largest)
        _name(axes.yaxis, "", names, cell, _LINE)
        _name(axes.xaxis, "keys", [], cell, _LINE)
        _mark_rows(axes, factorisation.sizes, cell, key)
    _write_sign(grid.figure.axes[2], "·", 0.3)
    _write_text(grid, factorisation)
    return grid.figure


def _draw(axes: Axes, label: str, matrix: FloatArray, name: str, detail: str, largest: float) -> None:
    """Draw a matrix in colours that end at `largest`, with a title of two lines above it."""
    largest = max(largest, 1e-300)
    cmap, least = ("RdBu_r", -largest) if label in ("phi", "difference") else ("Blues", 0.0)
    axes.imshow(matrix, aspect="auto", cmap=cmap, vmin=least, vmax=largest)
    axes.tick_params(length=0, pad=2, labelsize=7.0)
    axes.set_label(label)
    axes.set_title(name, fontsize=11.0, pad=14.0)
    middle, above = (0.5, 1.0), (0.0, 4.0)
    axes.annotate(detail, middle, above, "axes fraction", "offset points", fontsize=7.5, color=FAINT, ha="center")


def _name(axis: Axis, name: str, names: Sequence[str], cell: float, room: float) -> None:
    """Label an axis and its rows or columns, which are `cell` inches apart; omit labels that need more room."""
    places = range(0, len(names), math.ceil(room / cell))
    axis.set_ticks(places, [names[place] for place in places])
    axis.set_label_text(name, fontsize=7.5, color=FAINT)


def _mark_rows(axes: Axes, sizes: Sequence[int], cell: float, key: float) -> None:
    """Draw lines between the rows of a matrix and at the start of each image row, unless they are too dense."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    if cell >= _LINE:
        axes.hlines(np.arange(0.5, bottom), left, right, color=GRID, linewidth=0.4)
    if len(sizes) > 1 and sizes[-1] * key > 0.05:
        axes.vlines(np.arange(sizes[-1] - 0.5, right, sizes[-1]), bottom, top, color=FAINT, linewidth=0.4)


def _write_entries(axes: Axes, matrix: FloatArray, cell: float) -> None:
    """Write the entries of a matrix into its cells if these are large enough."""
    largest = float(np.abs(matrix).max())
    if cell < 0.2 or largest >= 999.5:
        return
    for (row, column), value in np.ndenumerate(matrix):
        text = f"{round(value, 2):g}" if largest < 9.95 else f"{value:.0f}"
        if float(text) != 0.0:
            colour = "white" if abs(value) > 0.6 * largest else INK
            axes.text(column, row, text, fontsize=5.5, color=colour, ha="center", va="center")


def _write_sign(axes: Axes, sign: str, distance: float) -> None:
    left, offset = (0.0, 0.5), (-72.0 * distance, 0.0)
    axes.annotate(sign, left, offset, "axes fraction", "offset points", fontsize=20.0, ha="center", va="center")


def _write_text(grid: PanelGrid, factorisation: Factorisation) -> None:
    positions = " x ".join(map(str, factorisation.sizes))
    lines = (
        f"Relative residual |E_q − Φ A_q| / |E_q| = {_number(factorisation.residual)}",
        f"Query {_point(factorisation.query)} on {positions} positions, keys in row-major order; indices are from 0.",
        "Each row of E_q marks the position that one kernel tap reads, labelled with its shift from the query, in "
        "positions. It is empty if the position is outside the image. The same row of Φ has the weights of the heads.",
    )
    axes = grid.add(1, slice(1, None))
    axes.set_label("text")
    axes.set_axis_off()
    width = int(14.5 * axes.get_position().width * grid.figure.get_figwidth())
    text = "\n".join(textwrap.fill(line, width) for line in lines)
    axes.text(0.0, 1.0, text, fontsize=8.5, va="top", linespacing=1.45)


def _point(place: Sequence[int]) -> str:
    return f"({', '.join(map(str, place))})"


def _number(value: float) -> str:
    """Format a value with two decimals, or in scientific notation if it is very small or very large."""
    return f"{value:.2f}" if 0.01 <= abs(value) < 100 else "0" if value == 0 else f"{value:.1e}"
