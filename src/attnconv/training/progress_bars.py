"""Progress of downloads, training and other long operations, on standard error."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, final

from rich import progress as bars
from rich.console import Console

from attnconv._util.processes import is_first_process
from attnconv.training.run_folder import MetricsLine

T = TypeVar("T")


@final
class TrainingProgress:
    """Progress of a training run: a bar on a terminal, otherwise one line per epoch."""

    def __init__(self, epochs: int, steps_per_epoch: int, *, shown: bool = True) -> None:
        self._console = console = Console(stderr=True, quiet=not shown)
        self._epochs, self._steps = epochs, steps_per_epoch
        columns = (bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn(), bars.TimeRemainingColumn())
        texts = "{task.description}", "{task.fields[news]}"
        hidden = not (shown and console.is_terminal)
        self._bar = bars.Progress(texts[0], *columns, texts[1], console=console, refresh_per_second=4, disable=hidden)

    def begin(self, done: int) -> None:
        """Start the bar at the given number of completed epochs."""
        total = self._epochs * self._steps
        self._task = self._bar.add_task("training", total=total, completed=done * self._steps, news="")
        self._bar.start()

    def step(self, step: int, epoch: int) -> None:
        """Show the number of optimiser steps and the number of the current epoch, from 1."""
        self._bar.update(self._task, completed=step, description=f"epoch {epoch}/{self._epochs}")

    def epoch(self, lines: Sequence[MetricsLine]) -> None:
        news = "accuracy: " + ", ".join(f"{line['split']} {line['accuracy']:.1%}" for line in lines)
        self._bar.update(self._task, news=news)
        if self._bar.disable:
            first, width = lines[0], len(str(self._epochs))
            about = f"loss {first['loss']:.4f}   learning rate {first['lr']:.2g}   {first['seconds']:.0f} s elapsed"
            self.say(f"epoch {first['epoch']:>{width}}/{self._epochs}   {news}   {about}")

    def say(self, text: str) -> None:
        """Print one line above the bar, without wrapping."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the bar and keep its last state on the screen. Can be called repeatedly."""
        self._bar.stop()


@contextmanager
def downloading(*, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of a download, if there is one; yield a callback `(bytes received, total bytes)`."""
    console = Console(stderr=True, quiet=not shown)
    columns = ("downloading", bars.BarColumn(), bars.DownloadColumn(), bars.TimeRemainingColumn())
    tenths = -1

    def report(there: int, total: int) -> None:
        nonlocal tenths
        bar.update(task, completed=there, total=total, visible=True)
        if bar.disable and 10 * there // total > tenths:  # ten lines in a log file
            tenths = 10 * there // total
            console.print(f"downloading: {there / 1e6:.0f} of {total / 1e6:.0f} MB", highlight=False, soft_wrap=True)

    with bars.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", visible=False)
        yield report


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show a spinner with the elapsed time, but only on a terminal."""
    console = Console(stderr=True)
    columns = (bars.SpinnerColumn(), "{task.description}", bars.TimeElapsedColumn())
    with bars.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task(text)
        yield


def tracked(items: Iterable[T], text: str, total: int) -> Generator[T, None, None]:
    """Yield the items; on a terminal, also show a progress bar in the first process."""
    console = Console(stderr=True)
    hidden = not (console.is_terminal and is_first_process())
    yield from bars.track(items, text, total, console=console, transient=True, disable=hidden)
