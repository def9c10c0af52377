"""Figures of an audit: the score of every layer, and each head's attention on the shifts around its query."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from attnconv._util.errors import bad
from attnconv.inspect.auditing import LayerAudit
from attnconv.inspect.shift_profiles import ShiftProfile
from attnconv.report.figure_style import FAINT, GRID, house_style, printable
from attnconv.report.gaussian_contours import FloatArray
from attnconv.report.palette import colour_of
from attnconv.report.panel_grid import PanelGrid, mark_query

_BAR, _PANEL = 0.27, 1.25  # inches
_NAME_WIDTH = 44  # characters
_COLUMNS = 6
_LEAST_REACH, _MOST_REACH = 3, 7  # panels of 7 x 7 to 15 x 15 shifts
_NOTE = (
    "Each panel: shifts around the query (black frame), rows downwards. Colour: mean attention at a shift, from pale "
    "(0) to dark (the largest of the panel). Orange frame: the best shift, where it lies within."
)


@house_style()
def draw_scores(names: Sequence[str], scores: Sequence[float], *, title: str) -> Figure:
    """The convolution score of each layer as a bar, the first layer on top.

    Args:
        names: Of the layers.
        scores: As many, from 0 to 1.
        title: Heading.

    Returns:
        The figure; `attnconv.report.save` writes it.

    Raises:
        ValueError: There is no layer, or not one score for each.
    """
    if not names or len(names) != len(scores):
        raise ValueError(bad("scores", "must hold one number for each of at least one layer", len(scores)))
    figure = Figure(figsize=(7.5, 1.3 + _BAR * len(names)), layout="constrained")
    figure.suptitle(printable(title, width=70))
    axes = figure.subplots()
    places = range(len(names))
    bars = axes.barh(places, scores, height=0.66, color=colour_of(0))
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8.0)
    axes.set_yticks(places, [_short(name) for name in names])
    axes.set(xlim=(0, 1), ylim=(len(names) - 0.5, -0.5), xlabel="convolution score", axisbelow=True)
    axes.tick_params(left=False)
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("0: uniform or random attention", loc="left", fontsize=8.0, color=FAINT)
    axes.set_title("1: a convolution", loc="right", fontsize=8.0, color=FAINT)
    return figure


@house_style()
def draw_profiles(layer: LayerAudit, *, title: str) -> Figure:
    """Mean attention of each head on the shifts around the query; heads with the most mass on one shift come first.

    Args:
        layer: Of one or two axes.
        title: Heading.

    Returns:
        The figure; `attnconv.report.save` writes it.

    Raises:
        ValueError: The layer has three axes.
    """
    profile = layer.statistics.profile
    if len(profile.reach) > 2:
        fix = "Sum its profile over one axis."
        raise ValueError(bad("layer", "must have one or two axes to be drawn", len(profile.reach), fix))
    best, mass = layer.statistics.best_shift.tolist(), layer.statistics.shift_mass.tolist()
    windows, reach = zoomed(profile, best)
    order = sorted(range(len(mass)), key=lambda head: -mass[head])
    columns = min(_COLUMNS, len(order))
    height = _PANEL * min(1.0, windows.shape[1] / windows.shape[2])
    rows = [height] * math.ceil(len(order) / columns)
    grid = PanelGrid([_PANEL] * columns, rows, title=title, note=_NOTE, gap=(0.3, 0.6), left=0.4, above=0.2, below=0.4)
    for place, head in enumerate(order):
        axes = grid.add(*divmod(place, columns))
        _draw_head(axes, windows[head], reach, best[head])
        axes.set_title(f"head {head}", size=8.0, pad=2.5)
        words = ", ".join(map(str, best[head]))
        axes.set_xlabel(f"{mass[head]:.3g} at ({words})", size=7.0, color=FAINT, labelpad=1.5)
        axes.tick_params(labelsize=6.5, length=2.0, pad=1.5, labelleft=place % columns == 0)
    return grid.figure


Reach = tuple[tuple[int, int], tuple[int, int]]  # least and largest shift of the rows, and of the columns


def zoomed(profile: ShiftProfile, best: Sequence[Sequence[int]]) -> tuple[FloatArray, Reach]:
    """Profiles near the query: 7 shifts per axis, or as many as show every head's best one, at most 15.

    Args:
        profile: Of one or two axes.
        best: The best shift of each head.

    Returns:
        Mass (heads, row shifts, column shifts) and the least and largest shift shown per axis; a single axis lies along
        columns.
    """
    wanted = max(abs(step) for shift in best for step in shift)
    wanted = min(max(_LEAST_REACH, wanted), _MOST_REACH)
    reach = [(max(-wanted, least), min(wanted, most)) for least, most in profile.reach]
    cut = [slice(here[0] - least, here[1] - least + 1) for (least, _), here in zip(profile.reach, reach, strict=True)]
    window: FloatArray = profile.mass.cpu().numpy()[(slice(None), *cut)]
    return (window[:, None], ((0, 0), reach[0])) if len(reach) == 1 else (window, (reach[0], reach[1]))


def _draw_head(axes: Axes, window: FloatArray, reach: Reach, best: Sequence[int]) -> None:
    (up, down), (left, right) = reach
    extent = (left - 0.5, right + 0.5, down + 0.5, up - 0.5)
    axes.imshow(window, cmap="Blues", vmin=0, vmax=float(window.max()) or 1.0, extent=extent)
    mark_query(axes, (0.0, 0.0))
    row, column = best if len(best) == 2 else (0, best[0])
    if up <= row <= down and left <= column <= right:
        corner = (column - 0.36, row - 0.36)
        axes.add_patch(Rectangle(corner, 0.72, 0.72, fill=False, edgecolor=colour_of(1), linewidth=1.3))
    axes.set(xticks=sorted({left, 0, right}), yticks=sorted({up, 0, down}))
    axes.spines[:].set_linewidth(0.6)


def _short(name: str) -> str:
    """A name of bounded length that keeps its end, where layers differ."""
    line = printable(name)
    return line if len(line) <= _NAME_WIDTH else f"...{line[3 - _NAME_WIDTH :]}"
