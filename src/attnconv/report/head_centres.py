"""Figures 3, 4, 12 and 14: centres of heads as shifts from the query, with one panel per layer or epoch.

Row shifts increase downwards, as in an image. A hollow mark at the edge of a panel is a centre outside the view.
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
from attnconv.report.figure_style import GRID, FloatArray, PanelGrid, colour_of, house_style, nearly_uniform, shape_of
from attnconv.training.run_folder import choose_epochs

_PANEL, _GAP, _TITLE, _LINE = 2.3, 0.22, 0.3, 0.16  # inches
_ENTRY_WIDTH, _ENTRY_HEIGHT = 0.42, 0.21  # inches, for one head in the legend
_EPOCHS = 6  # maximum number of panels of Figure 3
_CONTOURS = ((0.5, "-", 1.4), (0.9, ":", 1.0))  # mass inside, line style, line width
_BROKEN, _UNIFORM = "not a number", "nearly uniform"
_NOTE = (
    "Black square: the query. Contours enclose 50 % (solid) and, if they fit, 90 % (dotted) of the attention. Hollow "
    "marks: centres outside the view. Pale marks: nearly uniform heads (everywhere below twice the uniform attention)."
)


class HeadGaussians:
    """Heads of one layer as Gaussians over the shift delta = key - query.

    The attention of a quadratic head is a Gaussian with centre Delta and covariance Sigma, evaluated at the positions
    and renormalised (Sigma = I / (2 alpha) in equation 18 of the paper, any covariance in equation 19).

    Attributes:
        centres: Row shift and column shift of each head, in positions, (h, 2); lists may contain None for NaN.
        covariances: Covariance of each head, in positions squared, (h, 2, 2); infinite for uniform attention.

    Raises:
        ValueError: If the shapes are not (h, 2) and (h, 2, 2).

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


def draw_centres(layers: Sequence[HeadGaussians], *, title: str, sizes: tuple[int, int] = (16, 16)) -> Figure:
    """Draw the head centres of each layer, with contours that enclose 50 % and 90 % of each Gaussian.

    Args:
        layers: Heads of each layer, in order; layers may have different numbers of heads.
        title: Title of the figure.
        sizes: Rows and columns of positions in the image, which limit the shifts shown; 16 x 16 in the paper.

    Raises:
        ValueError: If `layers` is empty.
    """
    if not layers:
        raise ValueError(bad("layers", "must contain the heads of at least one layer", "none"))
    return _draw_panels({f"layer {index}": heads for index, heads in enumerate(layers)}, title, sizes)


def draw_centres_over_training(
    history: Sequence[tuple[int, HeadGaussians]], *, title: str, sizes: tuple[int, int] = (16, 16)
) -> Figure:
    """Draw one layer's head centres with 50 % and 90 % contours at up to six epochs, all at the same scale.

    Args:
        history: Pairs (number of completed epochs, heads of the layer) in increasing order; 0 is the initialisation.
        title: Title of the figure.
        sizes: Rows and columns of positions in the image, which limit the shifts shown; 16 x 16 in the paper.

    Raises:
        ValueError: If `history` is empty, or its epochs do not increase.
    """
    epochs = [epoch for epoch, _ in history]
    if not epochs or any(a >= b for a, b in pairwise(epochs)):
        raise ValueError(bad("history", "must contain at least one epoch, in increasing order", repr(epochs)))
    heads = dict(history)
    panels = {f"epoch {epoch}": heads[epoch] for epoch in choose_epochs(epochs, _EPOCHS)}
    return _draw_panels(panels, title, sizes)


@house_style()
def _draw_panels(panels: Mapping[str, HeadGaussians], title: str, sizes: tuple[int, int]) -> Figure:
    """Draw panels (heads by title) at the same scale, with one legend."""
    view = choose_view(panels.values(), limit=max(sizes) - 0.5)
    reasons = [
        [why_hidden(*head, view, sizes) for head in zip(heads.centres, heads.covariances, strict=True)]
        for heads in panels.values()
    ]
    hidden = [_counted(some) for some in reasons]
    labels = 0.22 + _LINE * max(map(len, hidden))  # including tick labels
    count, most = len(panels), max(len(heads.centres) for heads in panels.values())
    columns = count if count <= 3 else math.ceil(math.sqrt(count))
    entries = int(columns * (_PANEL + _GAP) / _ENTRY_WIDTH)  # of the legend, per line
    widths, heights, gap = [_PANEL] * columns, [_PANEL] * math.ceil(count / columns), (_GAP, labels + _TITLE)
    legend = labels + _LINE + 0.15  # from the lowest panels to the legend
    below = legend + _ENTRY_HEIGHT * math.ceil(most / entries)
    grid = PanelGrid(widths, heights, title=title, note=_NOTE, gap=gap, left=0.75, above=_TITLE, below=below)
    for index, ((name, heads), some, note) in enumerate(zip(panels.items(), reasons, hidden, strict=True)):
        axes = grid.add(*divmod(index, columns))
        edges = np.arange(math.ceil(-view - 0.5), math.floor(view - 0.5) + 1) + 0.5  # between positions
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(edges, minor=True)
            axis.set_major_locator(MaxNLocator(nbins=6, integer=True, symmetric=True, steps=[1, 2, 5, 10]))
        axes.grid(which="minor", color=GRID, linewidth=0.6 if view < 8 else 0.35)
        axes.tick_params(which="minor", length=0)
        axes.set(xlim=(-view, view), ylim=(view, -view), axisbelow=True)
        axes.add_patch(Rectangle((-0.5, -0.5), 1.0, 1.0, facecolor="black", edgecolor="none", zorder=1.5))
        for number, head in enumerate(zip(heads.centres, heads.covariances, some, strict=True)):
            _draw_head(axes, *head, number, view)
        axes.set_title(name)
        left, lowest = index % columns == 0, index + columns >= count
        axes.tick_params(labelleft=left, labelbottom=lowest)
        axes.set_ylabel("row shift (positions, downwards)" if left else "")
        axes.set_xlabel("\n".join([*note, "column shift (positions)"] if lowest else note))
    _legend(grid.figure, most, min(most, entries), grid.box(-1, 0).y0 - legend / grid.figure.get_figheight())
    return grid.figure


def _draw_head(axes: Axes, centre: FloatArray, covariance: FloatArray, hidden: str, index: int, view: float) -> None:
    distance = np.abs(centre).max()
    if hidden == _BROKEN:
        return
    if hidden != _UNIFORM and distance <= 10.0 * view:  # renderers lose precision beyond that
        for mass, style, width in _CONTOURS:
            extent = percentile_radius(mass) * np.sqrt(np.diagonal(covariance))
            if mass > 0.5 and (np.abs(centre) + extent).max() > view:
                continue
            major, minor, angle = contour(covariance, mass, longest=50.0 * view)
            ellipse = Ellipse((centre[1], centre[0]), 2.0 * major, 2.0 * minor, angle=math.degrees(angle), fill=False)
            ellipse.set(edgecolor=colour_of(index), linestyle=style, linewidth=width, zorder=2.0)
            axes.add_patch(ellipse)
    row, column = np.clip(centre, -view, view)
    mark = axes.plot(column, row, shape_of(index), color=colour_of(index), markersize=5.6, zorder=3.0)[0]
    mark.set_alpha(0.3 if hidden == _UNIFORM else None)
    if distance > view:
        mark.set(markerfacecolor="white", markeredgewidth=1.2, clip_on=False)
    else:
        mark.set(markeredgecolor="white", markeredgewidth=0.5)


def _counted(reasons: Sequence[str]) -> list[str]:
    """Format the counts of non-empty reasons, such as `2 heads outside the view` and `1 head nearly uniform`."""
    counts = sorted((reason, count) for reason, count in Counter(reasons).items() if reason)
    return [f"{count} {'head' if count == 1 else 'heads'} {reason}" for reason, count in counts]


def _legend(figure: Figure, heads: int, columns: int, top: float) -> None:
    """Draw marks and indices of the heads, row by row, with the upper edge at `top`, a fraction of the figure."""
    order = [head for column in range(columns) for head in range(column, heads, columns)]  # legends fill columns
    handles = [Line2D([], [], ls="", marker=shape_of(i), markersize=6.6, color=colour_of(i)) for i in order]
    names, place = [f"head {i}" if i == 0 else str(i) for i in order], (0.5, top)
    spacing: dict[str, Any] = {"borderaxespad": 0.0, "columnspacing": 1.2, "handletextpad": 0.4, "handlelength": 0.8}
    figure.legend(handles, names, loc="upper center", bbox_to_anchor=place, ncols=max(columns, 1), **spacing)


def percentile_radius(mass: float) -> float:
    """Return the Mahalanobis radius that contains `mass` of a two-dimensional Gaussian: sqrt(-2 ln(1 - mass))."""
    return math.sqrt(-2.0 * math.log1p(-mass))  # the squared radius is exponentially distributed with mean 2


def contour(covariance: FloatArray, mass: float, *, longest: float = math.inf) -> tuple[float, float, float]:
    """Return the ellipse that contains `mass`: major and minor semi-axis, and the major axis's angle in radians."""
    variances, directions = np.linalg.eigh((covariance + covariance.T) / 2.0)
    lengths = percentile_radius(mass) * np.sqrt(np.clip(variances, 0.0, None))
    minor, major = (min(float(length), longest) for length in lengths)
    row, column = directions[:, 1]
    return major, minor, math.atan2(float(row), float(column))


def why_hidden(centre: FloatArray, covariance: FloatArray, view: float, sizes: tuple[int, int]) -> str:
    """Return the reason why a panel over [-view, view]^2 cannot show a head completely; empty if it can.

    A head that is nearly uniform, for a query in the middle of a grid of `sizes` positions, cannot be shown.
    """
    if not np.isfinite(centre).all() or np.isnan(np.diagonal(covariance)).any():
        return _BROKEN
    if not np.isfinite(covariance).all():
        return _UNIFORM
    variances, directions = np.linalg.eigh((covariance + covariance.T) / 2.0)
    shifts = np.indices(sizes).reshape(2, -1).T - np.array(sizes) // 2 - np.clip(centre, -1e6, 1e6)
    scores = -0.5 * ((shifts @ directions) ** 2 / np.clip(variances, 1e-12, None)).sum(1)
    if nearly_uniform(1.0 / np.exp(scores - scores.max()).sum(), len(scores)):
        return _UNIFORM
    if np.abs(centre).max() > view:
        return "outside the view"
    corners = np.array([(-view, -view), (-view, view), (view, -view), (view, view)]) - centre
    lengths = percentile_radius(0.5) * np.sqrt(np.clip(variances, 1e-300, None))
    return "wider than the view" if (np.hypot(*((corners @ directions) / lengths).T) < 1.0).all() else ""


def choose_view(layers: Collection[HeadGaussians], *, limit: float) -> float:
    """Return half the side, in positions, of a square panel that fits the heads of all layers.

    It contains 5 x 5 positions or more and, up to `limit`, 97 % of the centres and 3/4 of the heads' 50 % contours.
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
