"""Results of benchmarks: rows with times and peak memory, and statistics over several rows."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.measure import Memory, Ratio

QUESTIONS: Mapping[str, str] = {
    "position-only": "How much time and memory do position-only layers save over a direct softmax?",
    "model-step": "What does attention add to a training step of the paper's model?",
    "megapixel": "How do time and memory of full attention scale up to a megapixel?",
    "full-covariance": "How fast is attention with a full covariance, which is not separable over axes?",
    "hard-heads": "How much slower than a convolution are the equivalent hard attention heads?",
    "relative-bias": "How fast is content-based attention with a learned relative bias?",
    "gated": "How fast is ConViT's gated positional attention?",
    "planner": "Does the planner choose the faster algorithm?",
}


@dataclass(frozen=True)
class Row:
    """Measurements of one contender in one case.

    Attributes:
        case: Description of the problem.
        contender: Name of the implementation.
        seconds: Time of each round.
        ratio: Time ratio to the first contender of the case, as described by `Results.ratio_name`.
        memory: Peak memory of a step.
        memory_ratio: Peak memory divided by that of the first contender.
        pixels: Number of positions of an image.
        difference: Maximum difference from the outputs of the first contender, relative to their maximum.
        dense_bytes: Size of the dense attention matrices in bytes.
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
    """Results of one benchmark.

    Attributes:
        name: A key of `QUESTIONS`.
        ratio_name: Meaning of the ratios in the rows; empty if there are none.
        rows: Measurements, at least one.
        facts: Statistics over several rows, by description.
    """

    name: str
    ratio_name: str
    rows: tuple[Row, ...]
    facts: Mapping[str, float] = field(default_factory=dict)
