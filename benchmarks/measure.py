"""Time and peak memory, measured in the same way by every benchmark.

    time        contenders take turns (A B C A B C ..), so that a disturbance affects all of them
    ratio       of the medians; its spread is that of the ratios within the rounds
    memory      peak of one step in a process of its own, without its inputs; on a GPU, what torch allocates there
    exponent    slope of the least-squares line through (log size, log seconds)

`torch.utils.benchmark.Timer` times one statement after another, so only its clock is used, which waits for the GPU.
Tensors and layers are created on torch's default device, which `measuring_on` sets.
"""

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import timer

import attnconv
from attnconv._util.errors import bad

_IMPORTED_FROM = (Path(__file__).parents[1], Path(attnconv.__file__).parents[1])


@dataclass(frozen=True)
class Ratio:
    """Ratio of two medians, with the smallest and the largest ratio of a single round."""

    value: float
    least: float
    most: float

    @staticmethod
    def of(over: Sequence[float], under: Sequence[float]) -> "Ratio":
        """Ratio of the times of two contenders that took turns.

        Example:
            >>> Ratio.of((2.0, 4.0), (1.0, 1.0))
            Ratio(value=3.0, least=2.0, most=4.0)
        """
        rounds = [a / b for a, b in zip(over, under, strict=True)]
        value = statistics.median(over) / statistics.median(under)
        return Ratio(value, min(value, *rounds), max(value, *rounds))


@dataclass(frozen=True)
class Memory:
    """Peak memory in bytes.

    Attributes:
        step: Peak of the step, beyond what was resident (on a GPU: allocated) when its inputs were built.
        process: Peak of the process, the interpreter and torch included (on a GPU: what torch reserved).
        tensors: Peak of torch's tensors during the step, beyond its inputs: `step` without what libraries keep.
    """

    step: int
    process: int
    tensors: int


def measuring_on(device: str) -> AbstractContextManager[object]:
    """Create tensors and layers on a device; for a CPU nothing is set, since that costs a little in every call."""
    return nullcontext() if device == "cpu" else torch.device(device)


def device_here() -> torch.device:
    """Default device. `torch.get_default_device` ignores contexts before torch 2.8."""
    return torch.empty(0).device


def precision(dtype: str) -> AbstractContextManager[object]:
    """Autocast for "bfloat16", nothing for "float32"."""
    return torch.autocast(device_here().type, torch.bfloat16) if dtype == "bfloat16" else nullcontext()


def interleaved(
    contenders: Mapping[str, Callable[[], object]], repeats: int, *, clock: Callable[[], float] = timer
) -> dict[str, tuple[float, ...]]:
    """Seconds of every contender in each of `repeats` rounds, after a round that is not timed.

    Raises:
        ValueError: `repeats` is below 1.
    """
    if repeats < 1:
        raise ValueError(bad("repeats", "must be at least 1", repeats))
    for step in contenders.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, step in contenders.items():
            start = clock()
            step()
            times[name].append(clock() - start)
    return {name: tuple(seconds) for name, seconds in times.items()}


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The p of seconds ~ size^p, by least squares through the logarithms.

    Example:
        >>> round(exponent([1, 10, 100], [3, 30, 300]), 6)
        1.0
    """
    return statistics.linear_regression([math.log(x) for x in sizes], [math.log(y) for y in seconds]).slope


def memory_of(module: str, case: Mapping[str, Any]) -> Memory:
    """Peak memory of one step on the default device, in a process of its own.

    Args:
        module: A module with a function `prepare(**case)` that builds the inputs and returns the step.
        case: Its arguments, as JSON values.

    Raises:
        ChildProcessError: The process failed, for instance because it ran out of memory.
    """
    words = ["benchmarks.memory_process", module, json.dumps(dict(case)), str(torch.get_num_threads())]
    paths = [*map(str, _IMPORTED_FROM), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        [sys.executable, "-m", *words, str(device_here())],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    if result.returncode != 0:
        error = (result.stderr.strip().splitlines() or ["killed"])[-1]
        raise ChildProcessError(bad("case", "must run in a process of its own", f"status {result.returncode}: {error}"))
    return Memory(**json.loads(result.stdout.splitlines()[-1]))
