"""One figure per question: ratios with their spread, or time over the number of pixels with the fitted line."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from attnconv.report.figure_style import GRID, INK, house_style, printable
from attnconv.report.palette import colour_of, shape_of
from benchmarks.measure import exponent
from benchmarks.results import Answer, Row
from benchmarks.settings import QUESTIONS

MANY = 40  # ratios; of more, those that are 1 by definition are counted instead of drawn
_PLAIN = FuncFormatter(lambda x, _: f"{x:g}")


def draw(answer: Answer) -> Figure:
    """The figure of an answer; `attnconv.report.save` writes it."""
    with house_style():
        return _draw_ratios(answer) if answer.ratio_name else _draw_growth(answer)


def _draw_ratios(answer: Answer) -> Figure:
    """One line per case, one mark per contender: the ratio of medians, its bar from the least to the most round."""
    rows = [row for row in answer.rows if row.ratio is not None]
    label = f"{printable(answer.ratio_name)}\n(bars: least and most of one round)"  # long cases leave little width
    if len(rows) > MANY:
        told = [row for row in rows if row.ratio is not None and row.ratio.least < row.ratio.most] or rows[:1]
        label += f"\n{len(rows) - len(told)} more cases at 1"
        rows = told
    cases, contenders = list(dict.fromkeys(row.case for row in rows)), list(dict.fromkeys(r.contender for r in rows))
    figure = Figure(figsize=(7.2, 1.6 + len(cases) * (0.16 + 0.13 * len(contenders))), layout="constrained")
    figure.suptitle(printable(QUESTIONS[answer.name], width=68))
    axes = figure.subplots()
    axes.axvline(1.0, color=INK, linewidth=0.8, linestyle="--")
    for index, contender in enumerate(contenders):
        shift = (index - (len(contenders) - 1) / 2) * 0.6 / len(contenders)
        own = [row for row in rows if row.contender == contender]
        spread = [(r.ratio.value, r.ratio.least, r.ratio.most) for r in own if r.ratio is not None]
        value, least, most = (np.asarray(numbers) for numbers in zip(*spread, strict=True))
        axes.errorbar(
            value,
            [cases.index(row.case) + shift for row in own],
            xerr=[value - least, most - value],
            fmt=shape_of(index),
            color=colour_of(index),
            markersize=5.0,
            capsize=2.5,
            linewidth=1.2,
            label=printable(contender),
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_PLAIN)
    low, high = axes.get_xlim()
    axes.xaxis.set_minor_formatter(_PLAIN if high / low < 10 else NullFormatter())
    axes.set_xlabel(label)
    axes.set_yticks(range(len(cases)), [printable(case) for case in cases])
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    if len(contenders) > 1:
        figure.legend(loc="outside lower center", ncols=len(contenders))
    return figure


def _draw_growth(answer: Answer) -> Figure:
    """Seconds over pixels, both logarithmic; the bars reach from the fastest to the slowest round."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    figure.suptitle(printable(QUESTIONS[answer.name], width=68))
    axes = figure.subplots()
    for index, contender in enumerate(dict.fromkeys(row.contender for row in answer.rows)):
        own = [row for row in answer.rows if row.contender == contender and row.pixels is not None]
        pixels, seconds = _points(own)
        power = exponent(pixels.tolist(), seconds.tolist())
        centre = np.exp(np.log(seconds).mean() - power * np.log(pixels).mean())
        below = seconds - np.asarray([row.seconds.least for row in own])
        above = np.asarray([row.seconds.most for row in own]) - seconds
        axes.errorbar(
            pixels,
            seconds,
            yerr=[below, above],
            fmt=shape_of(index),
            color=colour_of(index),
            markersize=5.0,
            capsize=2.5,
            label=printable(f"{contender}: pixels to the power of {power:.2f}"),
        )
        axes.plot(pixels, centre * pixels**power, color=colour_of(index), linewidth=1.2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    sizes = list(dict.fromkeys(row.pixels for row in answer.rows if row.pixels is not None))
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(_PLAIN)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("pixels")
    axes.set_ylabel("seconds")
    axes.grid(color=GRID, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _points(rows: list[Row]) -> tuple["np.ndarray[tuple[int], np.dtype[np.float64]]", ...]:
    """Pixels and median seconds."""
    pixels = np.asarray([row.pixels for row in rows], dtype=np.float64)
    return pixels, np.asarray([row.seconds.median for row in rows], dtype=np.float64)
