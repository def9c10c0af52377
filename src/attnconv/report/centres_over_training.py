"""Figure 3: how the heads of one layer move during training, one panel per epoch."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from matplotlib.figure import Figure

from attnconv._util.errors import bad
from attnconv.report.gaussian_contours import HeadGaussians
from attnconv.report.head_centres import draw_panels


def draw_centres_over_training(
    history: Sequence[tuple[int, HeadGaussians]],
    *,
    title: str,
    panels: int = 6,
    sizes: tuple[int, int] | None = None,
    view: float | None = None,
) -> Figure:
    """Head centres with 50 % and 90 % contours at some epochs, all at one scale.

    Args:
        history: (epoch, heads of the layer at its end), epochs increasing; epoch 0 is the initialisation.
        title: Heading, which names the run and the layer.
        panels: Most epochs to show, at least 1; their steps grow, since heads move most at the start.
        sizes: Rows and columns of positions in the image.
        view: Half the side of a panel in pixels; None fits it to the heads.

    Returns:
        The figure; `attnconv.report.save` writes it.

    Raises:
        ValueError: An empty history, epochs that do not increase, or fewer than one panel.
    """
    epochs = [epoch for epoch, _ in history]
    if not epochs or any(a >= b for a, b in pairwise(epochs)):
        raise ValueError(bad("history", "must hold at least one epoch, and epochs that increase", repr(epochs)))
    heads = dict(history)
    shown = {f"epoch {epoch}": heads[epoch] for epoch in choose_epochs(epochs, panels)}
    return draw_panels(shown, title=title, sizes=sizes, view=view)


def choose_epochs(epochs: Sequence[int], count: int) -> list[int]:
    """At most `count` of the epochs: the first, the last, and between them steps that grow geometrically.

    Raises:
        ValueError: `count` is below 1.

    Example:
        >>> choose_epochs(range(301), 6)
        [0, 2, 9, 30, 95, 300]
    """
    if count < 1:
        raise ValueError(bad("panels", "must be at least 1", count))
    if len(epochs) <= count:
        return list(epochs)
    if count == 1:
        return [epochs[-1]]
    steps = np.geomspace(1.0, len(epochs), count) - 1.0
    chosen = {0, len(epochs) - 1}
    for step in steps[1:-1]:
        free = [i for i in range(len(epochs)) if i not in chosen]
        chosen.add(min(free, key=lambda i: (abs(i - step), i)))
    return [epochs[i] for i in sorted(chosen)]
