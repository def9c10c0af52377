"""Whether a number of heads grows from layer to layer, and how much growth chance alone gives.

Spearman's rank correlation between a head's layer and its number, over all heads,

    rho = corr(rank(layer), rank(number)),       1: every head of a later layer has the larger number

ties sharing their mean rank; and what rho is exceeded in one of twenty shuffles of the heads over the layers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from scipy.stats import rankdata

from attnconv._util.value_checks import whole

LEVEL = 0.95


@final
@dataclass(frozen=True)
class LayerTrend:
    """How a number goes from layer to layer.

    Attributes:
        rho: Spearman's rank correlation, -1 to 1; 0 where all numbers or all layers are the same.
        chance: The `LEVEL` quantile of rho under shuffles.
    """

    rho: float
    chance: float

    @property
    def rises(self) -> bool:
        """Whether the number grows by more than chance would have it."""
        return self.rho > self.chance


def layer_trend(values: Sequence[Sequence[float]], *, draws: int = 1000, seed: int = 0) -> LayerTrend:
    """Whether a number of heads grows with their layer.

    Args:
        values: Layer by layer, first to last, one number for each head; NaN leaves a head out, infinity ranks last.
        draws: Shuffles, at least 1.
        seed: Of the shuffles, at least 0.

    Raises:
        ValueError: `draws` is below 1 or `seed` below 0.

    Example:
        >>> found = layer_trend([[1.0, 1.5, 2.0], [3.0, 2.5, 4.0], [5.0, 9.0, 7.0]])
        >>> round(found.rho, 2), found.rises
        (0.95, True)
    """
    draws, seed = whole("draws", draws, 1), whole("seed", seed, 0)
    pairs = [(layer, value) for layer, some in enumerate(values) for value in some if not math.isnan(value)]
    layers = _standard(np.array([layer for layer, _ in pairs]))
    numbers = _standard(np.array([value for _, value in pairs]))
    generator = np.random.default_rng(seed)
    shuffled = [float(generator.permutation(layers) @ numbers) for _ in range(draws)]
    return LayerTrend(float(layers @ numbers), float(np.quantile(shuffled, LEVEL)))


def _standard(values: np.ndarray) -> np.ndarray:
    """Ranks, centred and of length 1, so that their product is a correlation; zeros where all are the same."""
    ranks = np.asarray(rankdata(values)) - (len(values) + 1) / 2
    length = float(np.linalg.norm(ranks))
    return ranks / length if length > 0 else ranks
