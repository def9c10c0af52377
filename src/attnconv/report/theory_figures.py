"""Figure 11: one query's kernel positions as mixtures of attention rows, E_q = Phi A_q.

Rows of E_q and Phi are kernel positions, named by their shift (key minus query); rows of A_q and columns of Phi are
heads; columns of E_q and A_q are keys, with a thin line where a row of the image begins.
"""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from attnconv.report.figure_style import FAINT, GRID, INK, FloatArray, PanelGrid, house_style, printable
from attnconv.theory.expressibility import Factorisation

_TALLEST, _WIDEST = 4.6, 4.2  # inches, of one matrix
_CELL = 0.24  # largest height of a row, width of a key
_SLOT = 1.55  # least width that the heading of a matrix needs
_HEADING = 0.46
_LETTER, _LINE = 0.06, 0.13  # width and height of a tick label's letter
_SAME = 1e-5  # relative residual up to which the figure says "="


@house_style()
def draw_factorisation(factorisation: Factorisation, *, title: str) -> Figure:
    """Draw E_q = Phi A_q for one query, and the difference that remains.

    E_q is coloured from 0 to 1, the difference from -1 to 1, the others to their own largest number, which is printed.

    Args:
        factorisation: Result of `attnconv.theory.factorise`.
        title: Heading, which names the attention and the kernel.

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
    shifts, numbers = [_point(shift) for shift in factorisation.shifts], [str(head + 1) for head in range(heads)]
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
        ("indicators", indicators, (0, 0), shifts, "E_q", f"kernel positions ({taps}) x keys ({keys})", 1.0),
        ("rows", rows, (0, 2), numbers, "A_q", f"heads ({heads}) x keys, up to {_number(peak)}", peak),
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
    """A matrix in colours up to `largest`, below two lines of heading."""
    largest = max(largest, 1e-300)
    cmap, least = ("RdBu_r", -largest) if label in ("phi", "difference") else ("Blues", 0.0)
    axes.imshow(matrix, aspect="auto", cmap=cmap, vmin=least, vmax=largest)
    axes.tick_params(length=0, pad=2, labelsize=7.0)
    axes.set_label(label)
    axes.set_title(name, fontsize=11.0, pad=14.0)
    middle, above = (0.5, 1.0), (0.0, 4.0)
    axes.annotate(detail, middle, above, "axes fraction", "offset points", fontsize=7.5, color=FAINT, ha="center")


def _name(axis: Axis, name: str, names: Sequence[str], cell: float, room: float) -> None:
    """Name an axis and its rows or columns, which are `cell` inches apart; names that have no room are left out."""
    places = range(0, len(names), math.ceil(room / cell))
    axis.set_ticks(places, [names[place] for place in places])
    axis.set_label_text(name, fontsize=7.5, color=FAINT)


def _mark_rows(axes: Axes, sizes: Sequence[int], cell: float, key: float) -> None:
    """Lines between rows of the matrix and where each row of the image begins, unless they are too dense."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    if cell >= _LINE:
        axes.hlines(np.arange(0.5, bottom), left, right, color=GRID, linewidth=0.4)
    if len(sizes) > 1 and sizes[-1] * key > 0.05:
        axes.vlines(np.arange(sizes[-1] - 0.5, right, sizes[-1]), bottom, top, color=FAINT, linewidth=0.4)


def _write_entries(axes: Axes, matrix: FloatArray, cell: float) -> None:
    """Entries, in cells that are large enough."""
    largest = float(np.abs(matrix).max())
    if cell < 0.2 or largest >= 999.5:
        return
    for (row, column), value in np.ndenumerate(matrix):
        text = f"{value:.1f}" if largest < 9.95 else f"{value:.0f}"
        if float(text) != 0.0:
            colour = "white" if abs(value) > 0.6 * largest else INK
            axes.text(column, row, text, fontsize=5.5, color=colour, ha="center", va="center")


def _write_sign(axes: Axes, sign: str, distance: float) -> None:
    """The sign to the left of a matrix of the product, at a distance in inches."""
    left, offset = (0.0, 0.5), (-72.0 * distance, 0.0)
    axes.annotate(sign, left, offset, "axes fraction", "offset points", fontsize=20.0, ha="center", va="center")


def _write_text(grid: PanelGrid, factorisation: Factorisation) -> None:
    """The residual and how to read the matrices, to the right of the difference."""
    pixels = " x ".join(map(str, factorisation.sizes))
    lines = (
        f"Relative residual |E_q − Φ A_q| / |E_q| = {_number(factorisation.residual)}",
        f"Query {_point(factorisation.query)} over {pixels} pixels; keys row by row.",
        "Each row of E_q marks the pixel that one kernel position sees, named by its shift from the query; an empty "
        "row sees a zero outside the image. A row of Φ mixes the heads' attention A_q into it.",
    )
    axes = grid.add(1, slice(1, None))
    axes.set_label("text")
    axes.set_axis_off()
    width = int(14.5 * axes.get_position().width * grid.figure.get_figwidth())
    text = "\n".join(printable(line, width=width) for line in lines)
    axes.text(0.0, 1.0, text, fontsize=8.5, va="top", linespacing=1.45)


def _point(place: Sequence[int]) -> str:
    return f"({', '.join(map(str, place))})"


def _number(value: float) -> str:
    """Two digits; very small and very large values in scientific notation."""
    return f"{value:.2f}" if 0.01 <= abs(value) < 100 else "0" if value == 0 else f"{value:.1e}"
