"""Figures 4, 12 and 14: where the heads of every layer look, one panel per layer."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from attnconv.report.gaussian_contours import HeadGaussians
from attnconv.report.head_panels import Panel, draw_panels


def draw_centres(
    layers: Sequence[HeadGaussians], *, title: str, sizes: tuple[int, int] | None = None, view: float | None = None
) -> Figure:
    """Head centres with 50 % and 90 % contours: circles for isotropic heads, ellipses for full covariances.

    Args:
        layers: The heads of each layer, first layer first; their numbers may differ.
        title: Heading, which names the run.
        sizes: Rows and columns of positions in the image; no shift beyond them is shown.
        view: Half the side of a panel in pixels; None fits it to the heads.

    Returns:
        The figure; `attnconv.report.save` writes it.

    Raises:
        ValueError: No layer, or a view that is not positive.
    """
    panels = [Panel(f"layer {index}", heads) for index, heads in enumerate(layers, start=1)]
    return draw_panels(panels, title=title, sizes=sizes, view=view)
