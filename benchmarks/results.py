"""What a benchmark measured: rows of times and peak memory, and statistics of several rows."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.measure import Memory, Ratio

QUESTIONS: Mapping[str, str] = {
    "position-only": "How fast and lean is a position-only layer beside the formula it computes?",
    "model-step": "What does attention add to a training step of the paper's model?",
    "megapixel": "How do time and memory of full attention grow up to a megapixel?",
    "full-covariance": "What does a full covariance cost, which does not factor over the axes?",
    "hard-heads": "What does a convolution cost as hard attention heads?",
    "relative-bias": "What does a learned relative bias cost beside content?",
    "gated": "What does ConViT's gated positional attention cost?",
    "planner": "Does the planner choose well?",
}


@dataclass(frozen=True)
class Row:
    """One contender in one case.

    Attributes:
        case: What was measured.
        contender: The form that was measured.
        seconds: Time of each round.
        ratio: Ratio to the first contender of the case, as `Results.ratio_name` describes it.
        memory: Peak memory of a step.
        memory_ratio: Peak memory over that of the first contender.
        pixels: Size of the problem.
        difference: Largest difference from the outputs of the first contender, relative to their largest value.
        dense_bytes: Size of the dense attention matrices.
    """

    case: str
    contender: str
    seconds: tuple[float, ...]
    ratio: Ratio | None = None
    memory: Memory | None = None
    memory_ratio: float | None = None
    pixels: int | None = None
    difference: float | None = None
    dense_bytes: int | None = None

    @property
    def median(self) -> float:
        """Median time in seconds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Results:
    """Results of one question.

    Attributes:
        name: A key of `QUESTIONS`.
        ratio_name: What the ratios of the rows mean; empty where there are none.
        rows: At least one.
        facts: Statistics of several rows, by their description.
    """

    name: str
    ratio_name: str
    rows: tuple[Row, ...]
    facts: Mapping[str, float] = field(default_factory=dict)
