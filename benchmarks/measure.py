"""Measurement of time and peak memory, shared by all benchmarks.

    time        contenders take turns (A B C A B C ..), so that disturbances affect all of them
    ratio       ratio of medians; its range is that of the ratios within rounds, without disturbed rounds
    memory      peak of one step in a separate process, excluding inputs; on a GPU, memory allocated by torch
    exponent    slope of the least-squares line through (log size, log seconds)

`torch.utils.benchmark.Timer` measures statements one after another, so only its clock is used; it synchronises the GPU.
Tensors and layers are created on torch's default device, which is set by `measuring_on`.
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
    """Ratio of two medians, with the minimum and maximum of the ratios within rounds.

    A round in which one of the two took over twice its median time was disturbed by other processes. It counts for the
    medians, but not for the range.
    """

    value: float
    least: float
    most: float
    disturbed: int = 0

    @staticmethod
    def of(over: Sequence[float], under: Sequence[float]) -> "Ratio":
        """Compute the ratio from the times of two contenders in each round.

        Example:
            >>> Ratio.of((2.0, 4.0), (1.0, 1.0))
            Ratio(value=3.0, least=2.0, most=4.0, disturbed=0)
        """
        usual = statistics.median(over), statistics.median(under)
        rounds = [a / b for a, b in zip(over, under, strict=True) if a <= 2 * usual[0] and b <= 2 * usual[1]]
        value = usual[0] / usual[1]
        return Ratio(value, min(value, *rounds), max(value, *rounds), len(over) - len(rounds))


@dataclass(frozen=True)
class Memory:
    """Peak memory in bytes.

    Attributes:
        step: Peak during the step minus resident memory (on a GPU: allocated memory) after creating the inputs.
        process: Peak of the process, including the interpreter and torch (on a GPU: memory reserved by torch).
        tensors: Peak of torch's tensors during the step, excluding inputs and memory used by libraries.
    """

    step: int
    process: int
    tensors: int


def measuring_on(device: str) -> AbstractContextManager[object]:
    """Return a context that sets the default device; for a CPU it does nothing, which avoids overhead."""
    return nullcontext() if device == "cpu" else torch.device(device)


def device_here() -> torch.device:
    """Return the default device; `torch.get_default_device` ignores contexts before torch 2.8."""
    return torch.empty(0).device


def precision(dtype: str) -> AbstractContextManager[object]:
    """Return a context with autocast for "bfloat16", or one without effect for "float32"."""
    return torch.autocast(device_here().type, torch.bfloat16) if dtype == "bfloat16" else nullcontext()


def interleaved(
    contenders: Mapping[str, Callable[[], object]], repeats: int, *, clock: Callable[[], float] = timer
) -> dict[str, tuple[float, ...]]:
    """Measure the seconds of every contender in each of `repeats` rounds, after one warm-up round."""
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
    """Fit the exponent p of seconds ~ size^p by least squares of the logarithms.

    Example:
        >>> round(exponent([1, 10, 100], [3, 30, 300]), 6)
        1.0
    """
    return statistics.linear_regression([math.log(x) for x in sizes], [math.log(y) for y in seconds]).slope


def memory_of(module: str, case: Mapping[str, Any]) -> Memory:
    """Measure the peak memory of one step on the default device, in a separate process.

    Args:
        module: A module with a function `prepare(**case)` that creates the inputs and returns the step.
        case: Arguments of `prepare`, as JSON values.

    Raises:
        ChildProcessError: If the process fails, for example because it runs out of memory.
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
        raise ChildProcessError(
            bad("case", "must complete in a separate process", f"status {result.returncode}: {error}")
        )
    return Memory(**json.loads(result.stdout.splitlines()[-1]))
