"""Comparison of contenders that compute the same result: times, peak memory and differences of outputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor

from benchmarks.measure import Ratio, interleaved, memory_of
from benchmarks.results import Row

Step: TypeAlias = Callable[[], list[Tensor]]


def compare(
    prepare: Callable[..., Step],
    sizes: Mapping[str, Any],
    contenders: Sequence[str],
    *,
    case: str,
    repeats: int,
    memory: bool = False,
    slower: bool = False,
    dense_bytes: int | None = None,
) -> list[Row]:
    """Measure all contenders and return one row for each; the first is the baseline of ratios and differences.

    Args:
        prepare: The `prepare` function of a benchmark. `prepare(**sizes, contender=...)` creates the inputs and returns
            a step, a function that returns the outputs to compare, if any.
        sizes: Other arguments of `prepare`, as JSON values.
        contenders: Names of the contenders.
        case: Description of the case.
        repeats: Number of timed rounds.
        memory: Also measure peak memory, in one process per contender.
        slower: Report time relative to the baseline instead of speedup over it.
        dense_bytes: See `Row`.
    """
    steps = {name: prepare(**sizes, contender=name) for name in contenders}
    outputs = {name: [tensor.clone() for tensor in step()] for name, step in steps.items()}
    times = interleaved(steps, repeats)
    memories = {name: memory_of(prepare.__module__, {**sizes, "contender": name}) for name in contenders if memory}
    rows, base, side = [], contenders[0], sizes.get("side")
    pixels = None if side is None else side**2
    for name in contenders:
        over, under = (name, base) if slower else (base, name)
        row = Row(case, name, times[name], memory=memories.get(name), pixels=pixels, dense_bytes=dense_bytes)
        if name != base:
            ratio = Ratio.of(times[over], times[under])
            share = memories[name].step / max(memories[base].step, 1) if memory else None
            difference = largest_difference(outputs[name], outputs[base])
            row = replace(row, ratio=ratio, memory_ratio=share, difference=difference)
        rows.append(row)
    return rows


def largest_difference(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float | None:
    """Return the maximum difference over all tensors, relative to the maximum of each; None without tensors."""
    pairs = [(one.float(), other.float()) for one, other in zip(found, exact, strict=True)]
    return max((float((one - other).abs().max() / other.abs().max()) for one, other in pairs), default=None)
