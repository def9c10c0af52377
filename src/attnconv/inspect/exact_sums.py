"""Sums in twice the precision of float64, so that their order does not matter.

    high + low = sum of all terms,    high = fl(a.high + b.high),    low = a.low + b.low + (a.high + b.high - high)

The last difference is the rounding error of `high` and is computed exactly (Knuth, TwoSum). Rounding `low` changes the
result by about n eps^2 of the sum of n terms without cancellation, so processes that add the same terms in different
orders get the same float64 result, unless the sum is that close to the middle between two float64 numbers.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor


@final
@dataclass(frozen=True, eq=False)
class ExactSum:
    """Sum of float64 tensors of the same shape; `+` adds two sums."""

    high: Float64[Tensor, "..."]
    low: Float64[Tensor, "..."]

    @classmethod
    def of(cls, term: Float64[Tensor, "..."]) -> "ExactSum":
        """Return the sum of a single term."""
        return cls(term, torch.zeros_like(term))

    def __add__(self, other: "ExactSum") -> "ExactSum":
        high = self.high + other.high
        added = high - self.high
        error = (self.high - (high - added)) + (other.high - added)
        return ExactSum(high, self.low + other.low + error)

    def value(self) -> Float64[Tensor, "..."]:
        """Return the sum, rounded to float64."""
        return self.high + self.low
