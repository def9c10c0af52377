"""Heat map of the effects of all heads of a model, with one row per layer and one column per head."""

import numpy as np
from matplotlib.figure import Figure

from attnconv.report.figure_style import ATTENTION, house_style, printable, shortened
from attnconv.surgery.ablation_effects import HeadEffects

_CELL = 0.3  # inches


@house_style()
def draw_effects(found: HeadEffects, *, title: str) -> Figure:
    """Draw the relative output change of each head, with the first layer at the top.

    Args:
        found: The result of `head_effects`.
        title: Title of the figure.
    """
    names = list(dict.fromkeys(effect.layer for effect in found.heads))
    heads = 1 + max(effect.head for effect in found.heads)
    values = np.full((len(names), heads), np.nan)  # layers may have fewer heads
    for effect in found.heads:
        values[names.index(effect.layer), effect.head] = effect.output_change
    figure = Figure(figsize=(4.0 + _CELL * heads, 1.5 + _CELL * len(names)), layout="constrained")
    figure.suptitle(printable(title, width=int(11 * figure.get_figwidth())))
    axes = figure.subplots()
    image = axes.imshow(values, cmap=ATTENTION, vmin=0.0, aspect="auto")
    axes.set_yticks(range(len(names)), [shortened(name) for name in names])
    axes.set(xlabel="head", xticks=range(0, heads, 1 + heads // 24))
    figure.colorbar(image, ax=axes, label="output change")
    return figure
