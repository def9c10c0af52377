"""Figures of an audit: the score of every layer, and each head's attention on the shifts around its query."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from attnconv._util.errors import bad
from attnconv.inspect.auditing import LayerAudit
from attnconv.inspect.shift_profiles import ShiftProfile
from attnconv.report.figure_style import FAINT, GRID, PanelGrid, colour_of, house_style, mark_query, printable

_BAR, _PANEL = 0.27, 1.25  # inches
_NAME_WIDTH = 44  # characters
_COLUMNS = 6
_LEAST_REACH, _MOST_REACH = 3, 7  # panels of 7 x 7 to 15 x 15 shifts
_NOTE = (
    "Each panel: shifts around the query (black frame), rows downwards. Colour: mean attention at a shift, from pale "
    "(0) to dark (the head's largest, printed below). Orange frame: the shift with the most."
)


@house_style()
def draw_scores(names: Sequence[str], scores: Sequence[float], *, title: str) -> Figure:
    """Draw the convolution score of each layer as a bar, the first layer on top.

    Args:
        names: Of the layers.
        scores: As many, from 0 to 1.
        title: Heading.

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
    """Draw the mean attention of each head on the shifts around the query, most mass on one shift first.

    Panels show 7 shifts per axis, or as many as show every head's best one, at most 15.

    Args:
        layer: Of one or two axes.
        title: Heading.

    Raises:
        ValueError: The layer has three axes.
    """
    profile = layer.statistics.profile
    if len(profile.reach) > 2:
        fix = "Sum its profile over one axis."
        raise ValueError(bad("layer", "must have one or two axes to be drawn", len(profile.reach), fix))
    best, mass = layer.statistics.best_shift.tolist(), layer.statistics.shift_mass.tolist()
    far = min(max(_LEAST_REACH, *(abs(step) for shift in best for step in shift)), _MOST_REACH)
    (top, bottom), (left, right) = [(max(-far, least), min(far, most)) for least, most in _two_axes(profile.reach)]
    order = sorted(range(len(mass)), key=lambda head: -mass[head])
    columns = min(_COLUMNS, len(order))
    height = _PANEL * min(1.0, (bottom - top + 1) / (right - left + 1))
    heights = [height] * math.ceil(len(order) / columns)
    grid = PanelGrid(
        [_PANEL] * columns, heights, title=title, note=_NOTE, gap=(0.3, 0.6), left=0.4, above=0.2, below=0.4
    )
    for place, head in enumerate(order):
        axes = grid.add(*divmod(place, columns))
        _draw_head(axes, profile, head, best[head], mass[head])
        axes.set(xlim=(left - 0.5, right + 0.5), ylim=(bottom + 0.5, top - 0.5))
        axes.set(xticks=sorted({left, 0, right}), yticks=sorted({top, 0, bottom}))
        axes.tick_params(labelsize=6.5, length=2.0, pad=1.5, labelleft=place % columns == 0)
    return grid.figure


def _two_axes(reach: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Least and largest shift of rows and columns; a single axis lies along columns."""
    return reach if len(reach) == 2 else ((0, 0), *reach)


def _draw_head(axes: Axes, profile: ShiftProfile, head: int, best: Sequence[int], mass: float) -> None:
    (top, bottom), (left, right) = _two_axes(profile.reach)
    shown = profile.mass[head].cpu().numpy().reshape(bottom - top + 1, right - left + 1)
    extent = (left - 0.5, right + 0.5, bottom + 0.5, top - 0.5)
    axes.imshow(shown, cmap="Blues", vmin=0, vmax=mass or 1.0, extent=extent)
    mark_query(axes, (0.0, 0.0))
    corner = (best[-1] - 0.36, (best[0] if len(best) == 2 else 0) - 0.36)
    axes.add_patch(Rectangle(corner, 0.72, 0.72, fill=False, edgecolor=colour_of(1), linewidth=1.3))
    axes.spines[:].set_linewidth(0.6)
    axes.set_title(f"head {head}", size=8.0, pad=2.5)
    axes.set_xlabel(f"{mass:.3g} at ({', '.join(map(str, best))})", size=7.0, color=FAINT, labelpad=1.5)


def _short(name: str) -> str:
    """A name of bounded length that keeps its end, where layers differ."""
    line = printable(name)
    return line if len(line) <= _NAME_WIDTH else f"...{line[3 - _NAME_WIDTH :]}"
