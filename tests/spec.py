"""docs/grid.md implemented literally, with loops over queries and lattice points and no code of the library."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SpecAxis:
    """One axis, with the names of the page."""

    m: int
    n: int
    stride: int = 1
    offset: int = 0
    before: int = 0
    after: int = 0
    spacing: int = 1
    border: str = "renormalise"

    def lattice(self) -> list[int]:
        if self.border == "renormalise":
            return [self.spacing * k for k in range(self.m)]
        return list(range(-self.before, self.spacing * (self.m - 1) + self.after + 1))

    def source(self, point: int) -> int | None:
        if self.border in ("renormalise", "zero"):
            inside = point % self.spacing == 0 and 0 <= point // self.spacing < self.m
            return point // self.spacing if inside else None
        if self.border == "replicate":
            return min(max(point, 0), self.m - 1)
        if self.border == "circular":
            return point % self.m
        while not 0 <= point < self.m:  # reflect at the ends
            if self.m == 1:
                return 0
            point = -point if point < 0 else 2 * (self.m - 1) - point
        return point

    def queries(self) -> list[int]:
        return [self.stride * i + self.offset for i in range(self.n)]


def spec_attention(
    axes: Sequence[SpecAxis], heads: int, score: Callable[[int, tuple[int, ...]], float]
) -> tuple[Tensor, Tensor]:
    """Return probabilities (h, n, m) and padding masses (h, n) in float64 from score(head, shift)."""
    keys = math.prod(axis.m for axis in axes)
    queries = list(itertools.product(*(axis.queries() for axis in axes)))
    lattice = list(itertools.product(*(axis.lattice() for axis in axes)))
    probabilities = torch.zeros(heads, len(queries), keys, dtype=torch.float64)
    masses = torch.zeros(heads, len(queries), dtype=torch.float64)
    for head, (row, query) in itertools.product(range(heads), enumerate(queries)):
        scores = [score(head, tuple(p - q for p, q in zip(point, query, strict=True))) for point in lattice]
        largest = max(scores)
        weights = [math.exp(s - largest) for s in scores]
        for point, weight in zip(lattice, weights, strict=True):
            places = [axis.source(p) for axis, p in zip(axes, point, strict=True)]
            if any(place is None for place in places):
                masses[head, row] += weight / sum(weights)
                continue
            flat = 0
            for axis, place in zip(axes, places, strict=True):
                flat = flat * axis.m + (place or 0)
            probabilities[head, row, flat] += weight / sum(weights)
    return probabilities, masses
