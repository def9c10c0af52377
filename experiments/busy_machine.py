"""Time of a short training while other processes use all cores, with different settings of OpenMP.

    python -m experiments.busy_machine --out results/busy-machine

Each neighbour is a process with one thread that never waits. The settings take turns, each in a process of its own.
"""

import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tyro

from experiments.common import write_results

SETTINGS: Mapping[str, Mapping[str, str]] = {
    "attnconv's default": {},
    "OpenMP's default: long spinning": {"GOMP_SPINCOUNT": "300000"},
    "no spinning": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
INHERITED = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Settings:
    """Arguments of the script."""

    out: Path | None = None
    """Output folder for the tables; None only prints them."""
    command: str = "train quadratic-digits --epochs 3"
    """Arguments of the command `attnconv`; `--out` is added."""
    neighbours: tuple[int, ...] = (0, 2)
    """Numbers of busy processes."""
    rounds: int = 3
    """Number of times that each setting is measured."""


def main(settings: Settings) -> None:
    """Measure all settings, and print and write the table."""
    found = {count: measured(settings, count) for count in settings.neighbours}
    base = statistics.median(found[settings.neighbours[0]][next(iter(SETTINGS))])
    lines = ["| setting |" + "".join(f" {count} neighbours |" for count in found)]
    lines += ["|---|" + "---|" * len(found)]
    for name in SETTINGS:
        lines += [f"| {name} |" + "".join(f" {ratio(found[count][name], base)} |" for count in found)]
    print(written := "\n".join(lines))
    if settings.out is not None:
        write_results(settings.out, "busy_machine", settings, written, {"seconds": found})


def measured(settings: Settings, count: int) -> dict[str, list[float]]:
    """Return the seconds of each round, by setting."""
    seconds: dict[str, list[float]] = {name: [] for name in SETTINGS}
    with neighbours(count):
        for _ in range(settings.rounds):
            for name, changes in SETTINGS.items():
                seconds[name].append(timed(shlex.split(settings.command), changes))
    return seconds


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Run busy processes."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def timed(command: Sequence[str], changes: Mapping[str, str]) -> float:
    """Return the seconds of a command with changed environment variables."""
    variables = {name: value for name, value in os.environ.items() if name not in INHERITED}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "attnconv", *command, "--out", f"{folder}/run"]
        start = time.perf_counter()
        subprocess.run(words, env={**variables, **changes}, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start


def ratio(seconds: Sequence[float], base: float) -> str:
    """Format a median time relative to another one, with the range of all rounds."""
    middle, *ends = (time / base for time in (statistics.median(seconds), min(seconds), max(seconds)))
    return f"{middle:.2f} ({ends[0]:.2f} to {ends[1]:.2f})"


if __name__ == "__main__":
    main(tyro.cli(Settings))
