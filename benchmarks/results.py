"""What a benchmark found: rows of numbers, and facts that are drawn from all of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.measure import Memory, Ratio, Timed


@dataclass(frozen=True)
class Row:
    """One contender in one case.

    Attributes:
        case: What was measured, in words.
        contender: Who.
        seconds: Time of every round.
        ratio: Beside the base of the case, in the sense of the answer's `ratio_name`; None for the base itself.
        memory: Peak memory; None where it was not measured.
        memory_ratio: Peak memory of the step over that of the base.
        pixels: Size of the problem, where time is shown over it.
        difference: Largest difference of outputs over the base's largest output, where both compute the same.
        dense_bytes: What the dense matrix would take, where it was not built.
    """

    case: str
    contender: str
    seconds: Timed
    ratio: Ratio | None = None
    memory: Memory | None = None
    memory_ratio: float | None = None
    pixels: int | None = None
    difference: float | None = None
    dense_bytes: int | None = None


@dataclass(frozen=True)
class Answer:
    """One question's rows.

    Attributes:
        name: As typed after `attnconv bench`.
        ratio_name: What a ratio of its rows says.
        rows: At least one.
        facts: Numbers drawn from several rows, by what they are.
    """

    name: str
    ratio_name: str
    rows: tuple[Row, ...]
    facts: Mapping[str, float] = field(default_factory=dict)
