"""Figure for `experiments.sequence`: the best shift of each head, and the attention to it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from attnconv.paper.tables import LEAST_CONSTANCY, LEAST_MASS
from attnconv.report.figure_style import FAINT, GRID, INK, house_style, save
from experiments.sequence_tasks import TEACHER_SHIFTS

MODELS = ("quadratic", "learned")
LARGEST = 90.0  # area of a head with all of its attention on one shift, in square points


def draw_shifts(results: Sequence[Mapping[str, Any]], stem: Path) -> None:
    """Draw one row per task and model and one column per layer, with seeds on the vertical axis.

    Args:
        results: Plain values of the runs.
        stem: Path of the two figure files, without extension.
    """
    rows = [(t, m) for t in dict.fromkeys(r["task"] for r in results) for m in MODELS]
    columns = max(len(r["layers"]) for r in results)
    with house_style():
        figure = Figure(figsize=(3.2 * columns, 1.25 * len(rows) + 0.6), layout="constrained")
        grid = figure.subplots(len(rows), columns, squeeze=False)
        for line, (task, model) in zip(grid, rows, strict=True):
            runs = [r for r in results if (r["task"], r["model"]) == (task, model)]
            for number, axes in enumerate(line):
                if number >= len(runs[0]["layers"]):
                    axes.set_axis_off()
                    continue
                _panel(axes, [run["layers"][number] for run in runs])
                axes.set_title(f"{task}, {model}, layer {number}")
                if task == "teacher":
                    for shift in TEACHER_SHIFTS[number]:
                        axes.axvspan(shift - 0.5, shift + 0.5, color=GRID, zorder=0)
        figure.suptitle(
            "Best shift of each head, in positions\nArea: attention to it; filled: fixed as the query moves"
        )
    save(figure, stem)


def _panel(axes: Axes, layers: Sequence[Mapping[str, Any]]) -> None:
    for height, layer in enumerate(layers):
        for shift, mass, constancy in layer["all_shifts"]:
            fixed = mass >= LEAST_MASS and constancy >= LEAST_CONSTANCY
            face, edge = (INK, INK) if fixed else ("none", FAINT)
            axes.scatter([shift], [height], s=LARGEST * mass, alpha=0.7, facecolors=face, edgecolors=edge)
    furthest = max(4, *(abs(head[0]) for layer in layers for head in layer["all_shifts"])) + 1
    axes.set(xlim=(-furthest, furthest), ylim=(-0.6, len(layers) - 0.4), yticks=range(len(layers)))
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    axes.set_ylabel("seed")
