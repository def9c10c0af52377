"""Whether a statistic of heads grows from layer to layer, and how much growth chance gives.

Spearman's rank correlation between a head's layer and its value, over all heads,

    rho = corr(rank(layer), rank(value)),       1: every head of a later layer has the larger value

with mean ranks for ties; chance is what rho exceeds in one of twenty shuffles of the heads over the layers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from attnconv._util.value_checks import whole

LEVEL = 0.95


@final
@dataclass(frozen=True)
class LayerTrend:
    """How a statistic changes from layer to layer.

    Attributes:
        rho: Spearman's rank correlation, -1 to 1; 0 where all values or all layers are the same.
        chance: The `LEVEL` quantile of rho under shuffles.
    """

    rho: float
    chance: float

    @property
    def rises(self) -> bool:
        """Whether it grows by more than chance."""
        return self.rho > self.chance


def layer_trend(values: Sequence[Sequence[float]], *, draws: int = 1000, seed: int = 0) -> LayerTrend:
    """Test whether a statistic of heads grows with their layer.

    Args:
        values: Layer by layer, first to last, one value per head; NaN leaves a head out, infinity ranks last.
        draws: Number of shuffles, at least 1.
        seed: Their seed, at least 0.

    Raises:
        ValueError: `draws` is below 1 or `seed` below 0.

    Example:
        >>> found = layer_trend([[1.0, 1.5, 2.0], [3.0, 2.5, 4.0], [5.0, 9.0, 7.0]])
        >>> round(found.rho, 2), found.rises
        (0.95, True)
    """
    draws, generator = whole("draws", draws, 1), torch.Generator().manual_seed(whole("seed", seed, 0))
    pairs = [(layer, value) for layer, some in enumerate(values) for value in some if not math.isnan(value)]
    layers = _standard_ranks(torch.tensor([layer for layer, _ in pairs], dtype=torch.float64))
    numbers = _standard_ranks(torch.tensor([value for _, value in pairs], dtype=torch.float64))
    shuffled = torch.rand(draws, len(layers), generator=generator, dtype=torch.float64).argsort(-1)
    return LayerTrend(float(layers @ numbers), float(torch.quantile(layers[shuffled] @ numbers, LEVEL)))


def _standard_ranks(values: Float64[Tensor, "n"]) -> Float64[Tensor, "n"]:
    """Ranks, centred and of length 1, so that their product is a correlation; zeros where all are the same."""
    _, places, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = (last - (counts - 1) / 2)[places] - (len(values) + 1) / 2
    length = ranks.norm()
    return ranks / length if length > 0 else ranks
