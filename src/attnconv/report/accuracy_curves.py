"""Figures 2 and 13: accuracy over epochs, for one or several runs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from attnconv._util.errors import bad
from attnconv.report.figure_style import GRID, FloatArray, colour_of, house_style, printable, shape_of

_DASHES = {"train": ":", "validation": "-", "test": "--"}
SPLITS: tuple[str, ...] = tuple(_DASHES)


class Curve:
    """Accuracy of one run on one split.

    Attributes:
        run: Name of the run.
        split: `train`, `validation` or `test`.
        epochs: Numbers of completed epochs, (n,).
        accuracy: Share of correctly classified images, 0 to 1, (n,); values that are None are not drawn.

    Raises:
        ValueError: If `split` is unknown, or `epochs` and `accuracy` are empty or have different lengths.
    """

    def __init__(self, run: str, split: str, epochs: Any, accuracy: Any) -> None:
        self.run, self.split = run, split
        self.epochs: FloatArray = np.asarray(epochs, dtype=np.float64)
        self.accuracy: FloatArray = np.asarray(accuracy, dtype=np.float64)
        if split not in _DASHES:
            raise ValueError(bad("split", f"must be one of {', '.join(_DASHES)}", repr(split)))
        if self.epochs.ndim != 1 or self.epochs.shape != self.accuracy.shape or not len(self.epochs):
            got = f"shapes {self.epochs.shape} and {self.accuracy.shape}"
            raise ValueError(bad("epochs, accuracy", "must be two non-empty lists of the same length", got))

    @property
    def last(self) -> float:
        """The last finite accuracy; NaN if there is none."""
        finite = self.accuracy[np.isfinite(self.accuracy)]
        return float(finite[-1]) if len(finite) else float("nan")


@house_style()
def draw_accuracy(curves: Sequence[Curve], *, title: str) -> Figure:
    """Draw accuracy over epochs as one curve per run and split, with the last value of each in the legend.

    Args:
        curves: At least one curve.
        title: Title of the figure.

    Raises:
        ValueError: If `curves` is empty.
    """
    if not curves:
        raise ValueError(bad("curves", "must contain at least one curve", "none"))
    runs, splits = {curve.run for curve in curves}, {curve.split for curve in curves}
    figure = Figure(figsize=(7.2, 3.9 + 0.24 * len(curves)), layout="constrained")
    figure.suptitle(printable(title, width=68))
    axes = figure.subplots()
    for index, curve in enumerate(curves):
        name = f"{curve.run}, {curve.split}" if len(splits) > 1 else curve.run
        name = curve.split if len(runs) == 1 else name
        label = printable(f"{name}: {curve.last:.1%} at the end", width=80)
        (line,) = axes.plot(curve.epochs, curve.accuracy, marker=shape_of(index), color=colour_of(index), label=label)
        line.set(linestyle=_DASHES[curve.split] if len(splits) > 1 else "-", linewidth=1.8)
        line.set(markersize=5.0, markeredgecolor="white", markeredgewidth=0.5)
        line.set_markevery(max(1, len(curve.epochs) // 8))
    low, high = axes.get_ylim()
    axes.set(xlabel="epoch", ylabel="accuracy", ylim=(max(low, -0.02), min(high, 1.02)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axes.grid(color=GRID, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=axes.lines, loc="outside lower center", handlelength=3.0)
    return figure
