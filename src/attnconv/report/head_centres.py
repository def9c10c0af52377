"""Figures 3, 4, 12 and 14: the centres of heads as shifts from the query pixel, one panel per layer or epoch.

Rows grow downwards as in an image. A head whose centre is outside the view has a hollow mark at the edge of its panel.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Ellipse, Rectangle
from matplotlib.ticker import MaxNLocator

from attnconv._util.errors import bad
from attnconv.report.figure_style import GRID, colour_of, house_style, printable, shape_of
from attnconv.report.gaussian_contours import FloatArray, HeadGaussians, choose_view, contour, is_broken, why_hidden
from attnconv.report.panel_grid import PanelGrid

_PANEL, _GAP, _TITLE, _LINE = 2.3, 0.22, 0.3, 0.16  # inches
_ENTRY_WIDTH, _ENTRY_HEIGHT = 0.42, 0.21  # of a head in the legend
_EPOCHS = 6  # panels of Figure 3
_UNSEEN = 15.5  # largest shift on the paper's 16 x 16 positions, where no sizes are known
_CONTOURS = ((0.5, "-", 1.4), (0.9, ":", 1.2))  # mass, line style, line width
_NOTE = (
    "Black square: the query pixel. Solid and dotted lines: contours that hold 50% and 90% of a head's attention. "
    "Hollow mark: centre outside the view."
)


def draw_centres(layers: Sequence[HeadGaussians], *, title: str, sizes: tuple[int, int] | None = None) -> Figure:
    """Draw head centres with 50 % and 90 % contours: circles for isotropic heads, ellipses for full covariances.

    Args:
        layers: The heads of each layer, first layer first; their numbers may differ.
        title: Heading, which names the run.
        sizes: Rows and columns of positions in the image; no shift beyond them is shown.

    Raises:
        ValueError: No layer.
    """
    if not layers:
        raise ValueError(bad("layers", "must hold the heads of at least one layer", "none"))
    panels = {f"layer {index}": heads for index, heads in enumerate(layers, start=1)}
    return draw_panels(panels, title=title, sizes=sizes)


def draw_centres_over_training(
    history: Sequence[tuple[int, HeadGaussians]], *, title: str, sizes: tuple[int, int] | None = None
) -> Figure:
    """Draw head centres with 50 % and 90 % contours at six epochs, all at one scale.

    Args:
        history: (epoch, heads of the layer at its end), epochs increasing; epoch 0 is the initialisation.
        title: Heading, which names the run and the layer.
        sizes: Rows and columns of positions in the image; no shift beyond them is shown.

    Raises:
        ValueError: An empty history, or epochs that do not increase.
    """
    epochs = [epoch for epoch, _ in history]
    if not epochs or any(a >= b for a, b in pairwise(epochs)):
        raise ValueError(bad("history", "must hold at least one epoch, and epochs that increase", repr(epochs)))
    heads = dict(history)
    panels = {f"epoch {epoch}": heads[epoch] for epoch in choose_epochs(epochs, _EPOCHS)}
    return draw_panels(panels, title=title, sizes=sizes)


def choose_epochs(epochs: Sequence[int], count: int) -> list[int]:
    """At most `count` increasing epochs in geometric steps, as heads move most at the start; 1 chooses the last."""
    if len(epochs) <= count:
        return list(epochs)
    if count == 1:
        return [epochs[-1]]
    places, rank = np.round(np.geomspace(1.0, len(epochs), count) - 1.0), np.arange(count)
    distinct = np.maximum.accumulate(places - rank) + rank
    return [epochs[int(place)] for place in distinct]


@house_style()
def draw_panels(panels: Mapping[str, HeadGaussians], *, title: str, sizes: tuple[int, int] | None) -> Figure:
    """Draw heading -> heads as panels of one scale, with one legend; see `draw_centres`."""
    view = choose_view(panels.values(), limit=_UNSEEN if sizes is None else max(sizes) - 0.5)
    hidden = [_hidden(heads, view) for heads in panels.values()]
    labels = 0.22 + _LINE * max(map(len, hidden))  # with the tick labels
    count = len(panels)
    columns = count if count <= 3 else math.ceil(math.sqrt(count))
    most = max(len(heads.centres) for heads in panels.values())
    entries = int(columns * (_PANEL + _GAP) / _ENTRY_WIDTH)  # of the legend, per line
    grid = PanelGrid(
        [_PANEL] * columns,
        [_PANEL] * math.ceil(count / columns),
        title=title,
        note=_NOTE,
        gap=(_GAP, labels + _TITLE),
        left=0.75,
        above=_TITLE,
        below=labels + _LINE + 0.15 + _ENTRY_HEIGHT * math.ceil(most / entries),
    )
    for index, ((name, heads), note) in enumerate(zip(panels.items(), hidden, strict=True)):
        axes = grid.add(*divmod(index, columns))
        _draw_panel(axes, heads, view)
        axes.set_title(printable(name, width=30))
        left, lowest = index % columns == 0, index + columns >= count
        axes.tick_params(labelleft=left, labelbottom=lowest)
        axes.set_ylabel("row shift (pixels, downwards)" if left else "")
        axes.set_xlabel("\n".join([*note, "column shift (pixels)"] if lowest else note))
    top = grid.box(-1, 0).y0 - (labels + _LINE + 0.15) / grid.figure.get_figheight()
    _legend(grid.figure, most, min(most, entries), top)
    return grid.figure


def _draw_panel(axes: Axes, heads: HeadGaussians, view: float) -> None:
    edges = np.arange(math.ceil(-view - 0.5), math.floor(view - 0.5) + 1) + 0.5
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(edges, minor=True)
        axis.set_major_locator(MaxNLocator(nbins=6, integer=True, symmetric=True, steps=[1, 2, 5, 10]))
    axes.grid(which="minor", color=GRID, linewidth=0.6 if view < 8 else 0.35)
    axes.tick_params(which="minor", length=0)
    axes.set(xlim=(-view, view), ylim=(view, -view), axisbelow=True)
    axes.add_patch(Rectangle((-0.5, -0.5), 1.0, 1.0, facecolor="black", edgecolor="none", zorder=1.5))
    for index, (centre, covariance) in enumerate(zip(heads.centres, heads.covariances, strict=True)):
        if not is_broken(centre, covariance):
            if np.isfinite(covariance).all():
                _draw_contours(axes, centre, covariance, colour_of(index), view)
            _draw_centre(axes, centre, index, view)


def _draw_contours(axes: Axes, centre: FloatArray, covariance: FloatArray, colour: str, view: float) -> None:
    if np.abs(centre).max() > 10.0 * view:
        return  # too far for renderers; the head counts as outside
    for mass, style, width in _CONTOURS:
        major, minor, angle = contour(covariance, mass, longest=50.0 * view)
        ellipse = Ellipse((centre[1], centre[0]), 2.0 * major, 2.0 * minor, angle=math.degrees(angle), fill=False)
        ellipse.set(edgecolor=colour, linestyle=style, linewidth=width, zorder=2.0)
        axes.add_patch(ellipse)


def _draw_centre(axes: Axes, centre: FloatArray, index: int, view: float) -> None:
    row, column = np.clip(centre, -view, view)
    mark = axes.plot(column, row, shape_of(index), color=colour_of(index), markersize=5.6, zorder=3.0)[0]
    if np.abs(centre).max() > view:
        mark.set(markerfacecolor="white", markeredgewidth=1.2, clip_on=False)
    else:
        mark.set(markeredgecolor="white", markeredgewidth=0.5)


def _hidden(heads: HeadGaussians, view: float) -> list[str]:
    """Lines on heads that a panel does not show: `2 heads outside the view`, `1 head wider than the view`."""
    reasons = Counter(why_hidden(*head, view) for head in zip(heads.centres, heads.covariances, strict=True))
    return [
        f"{count} {'head' if count == 1 else 'heads'} {reason}" for reason, count in sorted(reasons.items()) if reason
    ]


def _legend(figure: Figure, heads: int, columns: int, top: float) -> None:
    """Marks and numbers of the heads, row by row, with the upper edge at `top`, a fraction of the figure's height."""
    order = [head for column in range(columns) for head in range(column, heads, columns)]  # legends fill columns
    figure.legend(
        [Line2D([], [], ls="", marker=shape_of(i), markersize=6.6, color=colour_of(i)) for i in order],
        [f"head {i}" if i == 0 else str(i) for i in order],
        loc="upper center",
        bbox_to_anchor=(0.5, top),
        ncols=max(columns, 1),
        borderaxespad=0.0,
        columnspacing=1.2,
        handletextpad=0.4,
        handlelength=0.8,
    )
