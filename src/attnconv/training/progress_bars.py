"""Progress of downloads and of trainings: bars on a terminal, single lines everywhere else."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

from rich import progress as bars
from rich.console import Console

from attnconv.training.run_folder import MetricsLine


@final
class TrainingProgress:
    """Progress of a training on standard error: a bar on a terminal, a line per epoch elsewhere."""

    def __init__(self, epochs: int, steps_per_epoch: int, *, shown: bool = True) -> None:
        self._console = console = Console(stderr=True, quiet=not shown)
        self._epochs, self._steps = epochs, steps_per_epoch
        columns = (bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn(), bars.TimeRemainingColumn())
        texts = "{task.description}", "{task.fields[news]}"
        hidden = not (shown and console.is_terminal)
        self._bar = bars.Progress(texts[0], *columns, texts[1], console=console, refresh_per_second=4, disable=hidden)

    def begin(self, done: int) -> None:
        """Start the bar after this many complete epochs."""
        total = self._epochs * self._steps
        self._task = self._bar.add_task("training", total=total, completed=done * self._steps, news="")
        self._bar.start()

    def step(self, step: int, epoch: int) -> None:
        """Show the number of optimiser steps, the last one in this epoch (from 1)."""
        self._bar.update(self._task, completed=step, description=f"epoch {epoch}/{self._epochs}")

    def epoch(self, lines: Sequence[MetricsLine]) -> None:
        """Show the metrics of a complete epoch."""
        news = " · ".join(f"{line['split']} {line['accuracy']:.1%}" for line in lines)
        self._bar.update(self._task, news=news)
        if self._bar.disable:
            first, width = lines[0], len(str(self._epochs))
            about = f"loss {first['loss']:.4f}   rate {first['lr']:.2g}   {first['seconds']:.0f} s"
            self.say(f"epoch {first['epoch']:>{width}}/{self._epochs}   {news}   {about}")

    def say(self, text: str) -> None:
        """Print one line, above the bar; a log file gets it as it is, without wrapping."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the bar; its last state stays. May be called more than once."""
        self._bar.stop()


@contextmanager
def downloading(*, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Show a download, if there is one; yields a function of the bytes that are there and the bytes in all."""
    console = Console(stderr=True, quiet=not shown)
    columns = ("downloading", bars.BarColumn(), bars.DownloadColumn(), bars.TimeRemainingColumn())
    tenths = -1

    def report(there: int, total: int) -> None:
        nonlocal tenths
        bar.update(task, completed=there, total=total, visible=True)
        if bar.disable and 10 * there // total > tenths:  # a log file gets ten lines, not thousands
            tenths = 10 * there // total
            console.print(f"downloading: {there / 1e6:.0f} of {total / 1e6:.0f} MB", highlight=False, soft_wrap=True)

    with bars.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", visible=False)
        yield report
