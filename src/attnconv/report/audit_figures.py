"""Figures of an audit: the score of every layer, and what each head of a layer puts on the shifts around its query.

Heads come ordered for reading, those with the most mass on one shift first, each with its own number. A panel is scaled
to its head's own largest mass, which is printed below it. All is placed in inches, so that no text meets another.
"""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import Normal, Stroke

from attnconv._util.errors import bad
from attnconv.inspect.auditing import LayerAudit
from attnconv.inspect.shift_profiles import ShiftProfile
from attnconv.report.figure_style import FAINT, GRID, INK, house_style, printable
from attnconv.report.gaussian_contours import FloatArray
from attnconv.report.palette import colour_of

_BAR, _NAME_WIDTH = 0.27, 44  # inches a bar, and the most characters of a layer's name
_PANEL, _BETWEEN, _ABOVE, _BELOW = 1.25, 0.3, 0.2, 0.38
_COLUMNS = 6
_LEAST_REACH, _MOST_REACH = 3, 7  # panels of 7 x 7 to 15 x 15 shifts
_LEGEND = (
    "Each panel: shifts around the query (black frame), rows downwards. Colour: mean attention at a shift, from pale "
    "(0) to dark (the largest of the panel). Orange frame: the best shift, where it lies within."
)


def draw_scores(names: Sequence[str], scores: Sequence[float], *, title: str) -> Figure:
    """The convolution score of each layer as a bar, the first layer on top, between the two anchors in words.

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
    shown = [_short(name) for name in names]
    left = 0.4 + 0.072 * max(map(len, shown))
    width, top, bottom = left + 5.6, 0.85, 0.55
    height = top + bottom + _BAR * len(shown)
    with house_style():
        figure = Figure(figsize=(width, height))
        figure.text(0.5, 1 - 0.22 / height, printable(title, width=int(width * 9)), ha="center", va="center", size=12.0)
        axes = figure.add_axes((left / width, bottom / height, 5.0 / width, _BAR * len(shown) / height))
        places = np.arange(len(shown))
        axes.barh(places, scores, height=0.66, color=colour_of(0))
        for place, score in zip(places, scores, strict=True):
            inside = score > 0.88
            axes.text(
                score - 0.012 if inside else score + 0.012,
                float(place),
                f"{score:.2f}",
                va="center",
                ha="right" if inside else "left",
                size=8.0,
                color="white" if inside else INK,
            )
        axes.set(xlim=(0, 1), ylim=(len(shown) - 0.5, -0.5), xlabel="convolution score")
        axes.set_yticks(places, shown)
        axes.tick_params(left=False)
        axes.grid(axis="x", color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        above = 1 - 0.62 / height
        figure.text(left / width, above, "0: uniform or random attention", size=8.0, color=FAINT, ha="left")
        figure.text((left + 5.0) / width, above, "1: a convolution", size=8.0, color=FAINT, ha="right")
    return figure


def draw_profiles(layer: LayerAudit, *, title: str) -> Figure:
    """Mean attention of each head on the shifts around the query, as small panels.

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
    windows, reach = zoomed(profile, best)
    order = sorted(range(len(mass)), key=lambda head: -mass[head])
    columns = min(_COLUMNS, len(order))
    rows = math.ceil(len(order) / columns)
    width = max(0.7 + columns * (_PANEL + _BETWEEN), 4.6)
    legend = printable(_LEGEND, width=int(width * 15.5))
    top, foot = 0.55, 0.25 + 0.14 * (legend.count("\n") + 1)
    height = top + rows * (_ABOVE + _PANEL + _BELOW) + foot
    indent = (width - columns * (_PANEL + _BETWEEN) + _BETWEEN) / 2
    with house_style():
        figure = Figure(figsize=(width, height))
        figure.text(0.5, 1 - 0.24 / height, printable(title, width=int(width * 9)), ha="center", va="center", size=12.0)
        for place, head in enumerate(order):
            x = indent + (place % columns) * (_PANEL + _BETWEEN)
            y = top + (place // columns) * (_ABOVE + _PANEL + _BELOW) + _ABOVE
            box = (x / width, 1 - (y + _PANEL) / height, _PANEL / width, _PANEL / height)
            axes = figure.add_axes(box)
            _draw_head(axes, windows[head], reach, tuple(best[head]))
            axes.set_title(f"head {head}", size=8.0, pad=2.5)
            words = ", ".join(map(str, best[head]))
            axes.set_xlabel(f"{mass[head]:.3g} at ({words})", size=7.0, color=FAINT, labelpad=1.5)
            axes.tick_params(labelsize=6.5, length=2.0, pad=1.5, labelleft=place % columns == 0)
        figure.text(0.5, 0.12 / height, legend, ha="center", va="bottom", size=7.5, color=FAINT, linespacing=1.25)
    return figure


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
    mass = profile.mass.cpu().numpy()
    far = max((abs(step) for shift in best for step in shift), default=0)
    wanted = min(max(_LEAST_REACH, far), _MOST_REACH)
    reach = [(max(-wanted, least), min(wanted, most)) for least, most in profile.reach]
    cut = [slice(here[0] - least, here[1] - least + 1) for (least, _), here in zip(profile.reach, reach, strict=True)]
    window: FloatArray = mass[(slice(None), *cut)]
    return (window[:, None], ((0, 0), reach[0])) if len(reach) == 1 else (window, (reach[0], reach[1]))


def _draw_head(axes: Axes, window: FloatArray, reach: Reach, best: tuple[int, ...]) -> None:
    """One head's panel, with its query and its best shift."""
    ((up, down), (left, right)), most = reach, float(window.max())
    extent = (left - 0.5, right + 0.5, down + 0.5, up - 0.5)
    axes.imshow(window, cmap="Blues", vmin=0, vmax=most if most > 0 else 1, extent=extent, interpolation="nearest")
    query = axes.add_patch(Rectangle((-0.5, -0.5), 1, 1, fill=False, edgecolor=INK, linewidth=0.9))
    query.set_path_effects([Stroke(linewidth=2.2, foreground="white"), Normal()])  # seen on dark cells too
    row, column = best if len(best) == 2 else (0, best[0])
    if up <= row <= down and left <= column <= right:
        corner = (column - 0.36, row - 0.36)
        axes.add_patch(Rectangle(corner, 0.72, 0.72, fill=False, edgecolor=colour_of(1), linewidth=1.3))
    axes.set_xticks(sorted({left, 0, right}))
    axes.set_yticks(sorted({up, 0, down}))
    for spine in axes.spines.values():
        spine.set_linewidth(0.6)


def _short(name: str) -> str:
    """A name of bounded length that keeps its end, where layers differ."""
    line = printable(name)
    return line if len(line) <= _NAME_WIDTH else f"...{line[3 - _NAME_WIDTH :]}"
