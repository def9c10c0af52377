"""One case of a question: contenders that compute the same, their times in one run, their memory, their differences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from benchmarks.measure import Memory, Ratio, interleaved, memory_of
from benchmarks.results import Row


@dataclass(frozen=True)
class Case:
    """What all contenders of a case are given.

    Attributes:
        words: The case, for people.
        arguments: Of the question's `prepared`, which also takes the `contender` and returns a step.
        pixels: Its size.
        dense_bytes: What the dense matrix would take, where that is to be shown.
        memory: Whether peak memory is measured too, which takes a process per contender.
    """

    words: str
    arguments: Mapping[str, Any]
    pixels: int
    dense_bytes: int | None = None
    memory: bool = True


def compare(
    module: str, prepared: Callable[..., Callable[[], list[Tensor]]], case: Case, names: Sequence[str], repeats: int
) -> list[Row]:
    """Rows of all contenders; the first is the base of ratios and differences.

    Args:
        module: Where `prepared` stands, for the processes that measure memory.
        prepared: Builds a contender's step, which returns what must be equal: outputs, gradients.
        case: Its arguments.
        names: The contenders.
        repeats: Timed rounds.
    """
    steps = {name: prepared(**case.arguments, contender=name) for name in names}
    found = {name: [tensor.clone() for tensor in step()] for name, step in steps.items()}
    times = interleaved(steps, repeats)
    memories = {name: memory_of(module, {**case.arguments, "contender": name}) for name in names if case.memory}
    base = names[0]
    return [
        Row(
            case=case.words,
            contender=name,
            seconds=times[name],
            ratio=None if name == base else Ratio.of(times[base], times[name]),
            memory=memories.get(name),
            memory_ratio=_part_of(memories, name, base),
            pixels=case.pixels,
            difference=None if name == base else largest_difference(found[name], found[base]),
            dense_bytes=case.dense_bytes,
        )
        for name in names
    ]


def _part_of(memories: Mapping[str, Memory], name: str, base: str) -> float | None:
    """A contender's memory over that of the base; None for the base itself, and where none is measured."""
    return None if name == base or not memories else memories[name].step / max(memories[base].step, 1)


def largest_difference(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest over all tensors, each over its own largest value."""
    pairs = zip(found, exact, strict=True)
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
