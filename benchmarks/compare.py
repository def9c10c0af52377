"""One case of a question: contenders that compute the same, their times, peak memory and differences."""

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
    """Rows of all contenders; the first is the base of ratios and differences.

    Args:
        prepare: The function of this name in the question's module: `prepare(**sizes, contender=...)` builds the inputs
            and returns a step, which returns the tensors that all contenders must agree on, or none.
        sizes: Its other arguments, as JSON values.
        contenders: Names.
        case: Description of the case.
        repeats: Timed rounds.
        memory: Measure peak memory too, with one process per contender.
        slower: Ratios say how many times as long as the base a contender takes; by default, how many times as fast it
            is.
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
    """Largest difference over all tensors, each relative to its largest value; None without tensors."""
    pairs = [(one.float(), other.float()) for one, other in zip(found, exact, strict=True)]
    return max((float((one - other).abs().max() / other.abs().max()) for one, other in pairs), default=None)
