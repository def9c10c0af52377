"""Figures for docs/speed.md: ratios with their ranges, and time over the number of positions with fitted lines."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from attnconv.report.figure_style import GRID, INK, colour_of, house_style, printable, shape_of
from benchmarks.measure import exponent
from benchmarks.results import Results

T = TypeVar("T")
_PLAIN = FuncFormatter(lambda x, _: f"{x:g}")


def ratios(results: Results) -> Figure:
    """Plot the ratios of medians with their ranges over rounds, one row per case and one marker per contender."""
    rows = [row for row in results.rows if row.ratio is not None]
    cases, contenders = _unique(row.case for row in rows), _unique(row.contender for row in rows)
    with house_style():
        figure, axes = _axes(
            "Time of position-only layers compared with a direct softmax",
            1.6 + len(cases) * (0.16 + 0.13 * len(contenders)),
        )
        axes.axvline(1.0, color=INK, linewidth=0.8, linestyle="--")
        for index, contender in enumerate(contenders):
            shift = (index - (len(contenders) - 1) / 2) * 0.6 / len(contenders)
            points = [(cases.index(row.case) + shift, row.ratio) for row in rows if row.contender == contender]
            heights, found = zip(*[(height, ratio) for height, ratio in points if ratio is not None], strict=True)
            value = np.asarray([ratio.value for ratio in found])
            below, above = value - [ratio.least for ratio in found], [ratio.most for ratio in found] - value
            axes.errorbar(value, heights, xerr=[below, above], label=printable(contender), **_marks(index))
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_PLAIN)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(f"{printable(results.ratio_name)}\n(bars: range over rounds)")
        axes.set_yticks(range(len(cases)), [printable(case) for case in cases])
        axes.set_ylim(len(cases) - 0.5, -0.5)
        axes.grid(axis="x", color=GRID, linewidth=0.7)
        figure.legend(loc="outside lower center", ncols=len(contenders))
    return figure


def growth(results: Results) -> Figure:
    """Plot seconds over positions on logarithmic axes; bars show the range over rounds."""
    with house_style():
        figure, axes = _axes("Time of full attention up to a megapixel", 4.2)
        for index, contender in enumerate(_unique(row.contender for row in results.rows)):
            rows = [row for row in results.rows if row.contender == contender]
            pixels, seconds = np.asarray([row.pixels for row in rows], float), np.asarray([row.median for row in rows])
            power = exponent(pixels.tolist(), seconds.tolist())
            bars = [seconds - [min(row.seconds) for row in rows], [max(row.seconds) for row in rows] - seconds]
            label = printable(f"{contender}: exponent {power:.2f}")
            axes.errorbar(pixels, seconds, yerr=bars, label=label, **_marks(index))
            centre = np.exp(np.log(seconds).mean() - power * np.log(pixels).mean())
            axes.plot(pixels, centre * pixels**power, color=colour_of(index), linewidth=1.2)
        axes.set(xscale="log", yscale="log", xlabel="positions", ylabel="seconds")
        sizes = _unique(row.pixels for row in results.rows if row.pixels is not None)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.yaxis.set_major_formatter(_PLAIN)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
        axes.grid(color=GRID, linewidth=0.7)
        figure.legend(loc="outside lower center", ncols=2, title="alpha: sharpness of the heads, in 1 / position²")
    return figure


FIGURES: Mapping[str, Callable[[Results], Figure]] = {"position-only": ratios, "megapixel": growth}


def _axes(title: str, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, height), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _marks(index: int) -> dict[str, Any]:
    return {"fmt": shape_of(index), "color": colour_of(index), "markersize": 5.0, "capsize": 2.5, "linewidth": 1.2}


def _unique(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))
