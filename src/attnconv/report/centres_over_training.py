"""Figure 3: how the heads of one layer move during training, one panel per epoch."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from matplotlib.figure import Figure

from attnconv._util.errors import bad
from attnconv.report.gaussian_contours import HeadGaussians
from attnconv.report.head_centres import draw_panels

_PANELS = 6


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
    panels = {f"epoch {epoch}": heads[epoch] for epoch in choose_epochs(epochs, _PANELS)}
    return draw_panels(panels, title=title, sizes=sizes)


def choose_epochs(epochs: Sequence[int], count: int) -> list[int]:
    """At most `count` of the epochs: the first, the last, and between them steps that grow geometrically.

    Heads move most at the start of training.

    Args:
        epochs: Increasing.
        count: At least 1; of several epochs, 1 chooses the last.

    Example:
        >>> choose_epochs(range(301), 6)
        [0, 2, 9, 30, 95, 300]
    """
    if len(epochs) <= count:
        return list(epochs)
    if count == 1:
        return [epochs[-1]]
    places, rank = np.round(np.geomspace(1.0, len(epochs), count) - 1.0), np.arange(count)
    distinct = np.maximum.accumulate(places - rank) + rank
    return [epochs[int(place)] for place in distinct]
