"""One fair way of measuring, for every benchmark.

    time        contenders take turns (A B C A B C ..), so that a disturbance meets all of them; median, least and most
    ratio       of the medians; its spread is that of the ratios within the rounds
    memory      in a fresh process per contender: the most that was resident during a step, less what was before it; on
                a GPU, the most that torch had allocated there
    exponent    slope of the least-squares line through (log size, log seconds)

Everything is measured on torch's default device, which `measuring_on` sets: cases make their tensors and layers without
naming one, and a clock is read when the device has done all that it was handed.

Denormal numbers are flushed for all contenders: they slow a CPU's products several times, and the reference formula,
whose far weights are denormal, would look worse than it need.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

import attnconv
from attnconv._util.errors import bad

Step: TypeAlias = Callable[[], object]


@dataclass(frozen=True)
class Timed:
    """What one contender took in each round, in seconds.

    Example:
        >>> taken = Timed((3.0, 1.0, 2.0))
        >>> taken.median, taken.least, taken.most
        (2.0, 1.0, 3.0)
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The number that stands for the contender."""
        return statistics.median(self.seconds)

    @property
    def least(self) -> float:
        """The fastest round."""
        return min(self.seconds)

    @property
    def most(self) -> float:
        """The slowest round."""
        return max(self.seconds)


@dataclass(frozen=True)
class Ratio:
    """The ratio of two medians, with the smallest and the largest ratio of a single round."""

    value: float
    least: float
    most: float

    @staticmethod
    def of(over: Timed, under: Timed) -> "Ratio":
        """Two contenders of the same `interleaved` call.

        Example:
            >>> Ratio.of(Timed((2.0, 4.0)), Timed((1.0, 1.0)))
            Ratio(value=3.0, least=2.0, most=4.0)
        """
        rounds = [a / b for a, b in zip(over.seconds, under.seconds, strict=True)]
        value = over.median / under.median
        return Ratio(value, min(value, *rounds), max(value, *rounds))


@dataclass(frozen=True)
class Memory:
    """Peak memory in bytes.

    Attributes:
        step: The most that was resident during the step beyond what was resident when its inputs were built. On a GPU,
            the most that was allocated there beyond its inputs.
        process: The most that was resident at all, the interpreter and torch included. On a GPU, the most that torch
            had taken from it.
        tensors: The most that torch's tensors held at once during such a step, beyond its inputs: `step` without what
            libraries keep for themselves.
    """

    step: int
    process: int
    tensors: int


def settle() -> None:
    """What every process that measures does first: flush denormals.

    Worker threads take the mode over from the thread that starts them, so this must come before any torch operation.
    """
    torch.set_flush_denormal(True)


def measuring_on(device: str) -> AbstractContextManager[object]:
    """Where tensors and layers are made that name no device, until the context ends.

    Args:
        device: "cpu" or a CUDA device. Nothing is set for a CPU: setting costs a little in every call of torch.
    """
    return nullcontext() if device == "cpu" else torch.device(device)


def device_here() -> torch.device:
    """Where tensors are made that name no device. `torch.get_default_device` overlooks contexts before torch 2.8."""
    return torch.empty(0).device


def low_precision(wanted: bool) -> AbstractContextManager[object]:
    """Autocast to bfloat16 where measurements run, if it is wanted."""
    return torch.autocast(device_here().type, torch.bfloat16) if wanted else nullcontext()


def waited() -> None:
    """Return when the device has done what it was handed; a CPU always has."""
    if device_here().type == "cuda":
        torch.cuda.synchronize()


def interleaved(
    contenders: Mapping[str, Step], repeats: int, *, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Timed]:
    """Seconds of every contender in `repeats` rounds, after a round that is not timed.

    Args:
        contenders: What to call, by name.
        repeats: Rounds, at least 1.
        clock: Seconds since some moment.
    """
    if repeats < 1:
        raise ValueError(bad("repeats", "must be at least 1", repeats))
    for step in contenders.values():
        step()
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, step in contenders.items():
            waited()
            start = clock()
            step()
            waited()
            taken[name].append(clock() - start)
    return {name: Timed(tuple(seconds)) for name, seconds in taken.items()}


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The p of seconds ~ size^p, by least squares through the logarithms.

    Raises:
        ValueError: Fewer than two different sizes.

    Example:
        >>> round(exponent([1, 10, 100], [3, 30, 300]), 6)
        1.0
    """
    if len(set(sizes)) < 2:
        raise ValueError(bad("sizes", "must hold two different sizes at least", list(sizes)))
    x, y = [math.log(size) for size in sizes], [math.log(second) for second in seconds]
    return statistics.linear_regression(x, y).slope


def memory_of(module: str, case: Mapping[str, Any]) -> Memory:
    """Peak memory of one step on the device of these measurements, in a process of its own.

    Args:
        module: A module with a function `prepared(**case)` that builds the inputs and returns the step.
        case: Its arguments, as JSON values.

    Raises:
        ChildProcessError: The process failed, for instance for want of memory; with what it said.
    """
    words = [
        sys.executable,
        "-m",
        "benchmarks.memory_process",
        module,
        json.dumps(dict(case)),
        str(torch.get_num_threads()),
        str(device_here()),
    ]
    sources = str(Path(attnconv.__file__).parent.parent)
    paths = [sources, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if result.returncode != 0:
        said = (result.stderr.strip().splitlines() or ["killed"])[-1]
        raise ChildProcessError(bad("case", "must run in a process of its own", f"status {result.returncode}: {said}"))
    return Memory(**json.loads(result.stdout.splitlines()[-1]))
