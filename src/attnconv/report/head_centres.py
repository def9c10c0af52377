"""Figures 3, 4, 12 and 14: the centres of heads as shifts from the query pixel, one panel per layer or epoch.

Rows grow downwards as in an image. A head whose centre is outside the view has a hollow mark at the edge of its panel.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Ellipse, Rectangle
from matplotlib.ticker import MaxNLocator

from attnconv._util.errors import bad
from attnconv.report.figure_style import GRID, FloatArray, PanelGrid, colour_of, house_style, shape_of
from attnconv.training.run_folder import choose_epochs

_PANEL, _GAP, _TITLE, _LINE = 2.3, 0.22, 0.3, 0.16  # inches
_ENTRY_WIDTH, _ENTRY_HEIGHT = 0.42, 0.21  # of a head in the legend
_EPOCHS = 6  # panels of Figure 3
_UNSEEN = 15.5  # largest shift on the paper's 16 x 16 positions, where no sizes are known
_CONTOURS = ((0.5, "-", 1.4), (0.9, ":", 1.2))  # mass, line style, line width
_BROKEN = "not a number"
_NOTE = (
    "Black square: the query pixel. Solid and dotted lines: contours that hold 50% and 90% of a head's attention. "
    "Hollow mark: centre outside the view."
)


class HeadGaussians:
    """The heads of one layer as Gaussians over the shift delta = key - query.

    A quadratic head's probabilities are those of a Gaussian with centre Delta and covariance Sigma, sampled at the
    pixels and renormalised (equation 18: Sigma = I / (2 alpha); equation 19: any Sigma).

    Attributes:
        centres: (h, 2), row shift and column shift in pixels; None in a list becomes NaN.
        covariances: (h, 2, 2), in pixels squared. Infinite for a head without any preference.

    Raises:
        ValueError: The shapes are not (h, 2) and (h, 2, 2).

    Example:
        >>> heads = HeadGaussians([[0, 1]], [[[0.5, 0], [0, 0.5]]])
        >>> heads.covariances.shape
        (1, 2, 2)
    """

    def __init__(self, centres: Any, covariances: Any) -> None:
        self.centres: FloatArray = np.asarray(centres, dtype=np.float64)
        self.covariances: FloatArray = np.asarray(covariances, dtype=np.float64)
        if self.centres.ndim != 2 or self.centres.shape[1] != 2:
            raise ValueError(bad("centres", "must have the shape (heads, 2)", self.centres.shape))
        wanted = (len(self.centres), 2, 2)
        if self.covariances.shape != wanted:
            raise ValueError(bad("covariances", f"must have the shape {wanted}", self.covariances.shape))


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
    return _draw_panels(panels, title, sizes)


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
    return _draw_panels(panels, title, sizes)


@house_style()
def _draw_panels(panels: Mapping[str, HeadGaussians], title: str, sizes: tuple[int, int] | None) -> Figure:
    """Draw heading -> heads as panels of one scale, with one legend."""
    view = choose_view(panels.values(), limit=_UNSEEN if sizes is None else max(sizes) - 0.5)
    hidden = [_hidden(heads, view) for heads in panels.values()]
    labels = 0.22 + _LINE * max(map(len, hidden))  # with the tick labels
    count, most = len(panels), max(len(heads.centres) for heads in panels.values())
    columns = count if count <= 3 else math.ceil(math.sqrt(count))
    entries = int(columns * (_PANEL + _GAP) / _ENTRY_WIDTH)  # of the legend, per line
    widths, heights, gap = [_PANEL] * columns, [_PANEL] * math.ceil(count / columns), (_GAP, labels + _TITLE)
    legend = labels + _LINE + 0.15  # from the lowest panels to the legend
    below = legend + _ENTRY_HEIGHT * math.ceil(most / entries)
    grid = PanelGrid(widths, heights, title=title, note=_NOTE, gap=gap, left=0.75, above=_TITLE, below=below)
    for index, ((name, heads), note) in enumerate(zip(panels.items(), hidden, strict=True)):
        axes = grid.add(*divmod(index, columns))
        edges = np.arange(math.ceil(-view - 0.5), math.floor(view - 0.5) + 1) + 0.5  # of pixels
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(edges, minor=True)
            axis.set_major_locator(MaxNLocator(nbins=6, integer=True, symmetric=True, steps=[1, 2, 5, 10]))
        axes.grid(which="minor", color=GRID, linewidth=0.6 if view < 8 else 0.35)
        axes.tick_params(which="minor", length=0)
        axes.set(xlim=(-view, view), ylim=(view, -view), axisbelow=True)
        axes.add_patch(Rectangle((-0.5, -0.5), 1.0, 1.0, facecolor="black", edgecolor="none", zorder=1.5))
        for number, head in enumerate(zip(heads.centres, heads.covariances, strict=True)):
            _draw_head(axes, *head, number, view)
        axes.set_title(name)
        left, lowest = index % columns == 0, index + columns >= count
        axes.tick_params(labelleft=left, labelbottom=lowest)
        axes.set_ylabel("row shift (pixels, downwards)" if left else "")
        axes.set_xlabel("\n".join([*note, "column shift (pixels)"] if lowest else note))
    _legend(grid.figure, most, min(most, entries), grid.box(-1, 0).y0 - legend / grid.figure.get_figheight())
    return grid.figure


def _draw_head(axes: Axes, centre: FloatArray, covariance: FloatArray, index: int, view: float) -> None:
    hidden, distance = why_hidden(centre, covariance, view), np.abs(centre).max()
    if hidden == _BROKEN:
        return
    if np.isfinite(covariance).all() and distance <= 10.0 * view:  # renderers lose their precision beyond
        for mass, style, width in _CONTOURS:
            major, minor, angle = contour(covariance, mass, longest=50.0 * view)
            ellipse = Ellipse((centre[1], centre[0]), 2.0 * major, 2.0 * minor, angle=math.degrees(angle), fill=False)
            ellipse.set(edgecolor=colour_of(index), linestyle=style, linewidth=width, zorder=2.0)
            axes.add_patch(ellipse)
    row, column = np.clip(centre, -view, view)
    mark = axes.plot(column, row, shape_of(index), color=colour_of(index), markersize=5.6, zorder=3.0)[0]
    if distance > view:
        mark.set(markerfacecolor="white", markeredgewidth=1.2, clip_on=False)
    else:
        mark.set(markeredgecolor="white", markeredgewidth=0.5)


def _hidden(heads: HeadGaussians, view: float) -> list[str]:
    """Lines on heads that a panel does not show: `2 heads outside the view`, `1 head wider than the view`."""
    reasons = Counter(why_hidden(*head, view) for head in zip(heads.centres, heads.covariances, strict=True))
    counts = sorted((reason, count) for reason, count in reasons.items() if reason)
    return [f"{count} {'head' if count == 1 else 'heads'} {reason}" for reason, count in counts]


def _legend(figure: Figure, heads: int, columns: int, top: float) -> None:
    """Marks and numbers of the heads, row by row, with the upper edge at `top`, a fraction of the figure's height."""
    order = [head for column in range(columns) for head in range(column, heads, columns)]  # legends fill columns
    handles = [Line2D([], [], ls="", marker=shape_of(i), markersize=6.6, color=colour_of(i)) for i in order]
    names, place = [f"head {i}" if i == 0 else str(i) for i in order], (0.5, top)
    spacing: dict[str, Any] = {"borderaxespad": 0.0, "columnspacing": 1.2, "handletextpad": 0.4, "handlelength": 0.8}
    figure.legend(handles, names, loc="upper center", bbox_to_anchor=place, ncols=max(columns, 1), **spacing)


def percentile_radius(mass: float) -> float:
    """Mahalanobis radius that holds the part `mass` of a two-dimensional Gaussian: sqrt(-2 ln(1 - mass))."""
    return math.sqrt(-2.0 * math.log1p(-mass))  # in two dimensions the squared distance is exponential with mean 2


def contour(covariance: FloatArray, mass: float, *, longest: float = math.inf) -> tuple[float, float, float]:
    """The ellipse that holds `mass`: long and short semi-axis, and the long one's angle from columns towards rows."""
    variances, directions = np.linalg.eigh((covariance + covariance.T) / 2.0)
    lengths = percentile_radius(mass) * np.sqrt(np.clip(variances, 0.0, None))
    minor, major = (min(float(length), longest) for length in lengths)
    row, column = directions[:, 1]
    return major, minor, math.atan2(float(row), float(column))


def why_hidden(centre: FloatArray, covariance: FloatArray, view: float) -> str:
    """Why a panel over [-view, view]^2 hides a head's centre or lies inside its 50 % contour; empty if neither."""
    if not np.isfinite(centre).all() or np.isnan(np.diagonal(covariance)).any():
        return _BROKEN
    if np.abs(centre).max() > view:
        return "outside the view"
    if not np.isfinite(covariance).all():  # the head attends to all pixels alike
        return "wider than the view"
    variances, directions = np.linalg.eigh((covariance + covariance.T) / 2.0)
    corners = np.array([(-view, -view), (-view, view), (view, -view), (view, view)]) - centre
    lengths = percentile_radius(0.5) * np.sqrt(np.clip(variances, 1e-300, None))
    surrounded = (np.hypot(*((corners @ directions) / lengths).T) < 1.0).all()
    return "wider than the view" if surrounded else ""


def choose_view(layers: Collection[HeadGaussians], *, limit: float) -> float:
    """Half the side, in pixels, of a square panel for the heads of all layers; it ends on the edge of a pixel.

    Holds 97 % of the centres and the 50 % contour of three heads in four, at least 5 x 5 pixels, and at most `limit`.
    """
    centres = np.concatenate([heads.centres for heads in layers])
    covariances = np.concatenate([heads.covariances for heads in layers])
    finite = np.isfinite(centres).all(1) & np.isfinite(covariances).all((1, 2))
    if not finite.any():
        return max(2.5, min(limit, 7.5))
    far = np.abs(centres[finite]).max(1)
    deviation = np.sqrt(np.clip(np.diagonal(covariances[finite], axis1=1, axis2=2).max(1), 0.0, None))
    wanted = max(np.quantile(far, 0.97), np.quantile(far + percentile_radius(0.5) * deviation, 0.75))
    return max(2.5, min(limit, math.ceil(float(wanted) + 0.2) + 0.5))
