import math

import numpy as np
import pytest
from scipy.stats import spearmanr

from attnconv.inspect.layer_trends import layer_trend


def test_it_is_spearmans_correlation() -> None:
    generator = np.random.default_rng(0)
    values = [(generator.normal(size=count) + layer / 2).round(1).tolist() for layer, count in enumerate((3, 5, 4, 6))]
    layers = [layer for layer, some in enumerate(values) for _ in some]
    expected = spearmanr(layers, [value for some in values for value in some]).statistic
    assert layer_trend(values).rho == pytest.approx(expected, rel=1e-12)


def test_chance_is_exceeded_about_once_in_twenty() -> None:
    generator = np.random.default_rng(1)
    found = [layer_trend(generator.normal(size=(4, 9)).tolist(), draws=200).rises for _ in range(400)]
    assert 0.01 < np.mean(found) < 0.10


def test_numbers_that_grow_rise_and_others_do_not() -> None:
    assert layer_trend([[0.0, 0.1], [0.5, 0.6], [1.0, math.inf]]).rises
    assert not layer_trend([[3.0, 3.0], [2.0, 2.0], [1.0, 1.0]]).rises


def test_nothing_to_rank_is_no_trend() -> None:
    for values in ([[1.0, 1.0], [1.0]], [[1.0, 2.0]], [[math.nan], [1.0]]):
        found = layer_trend(values)
        assert (found.rho, found.rises) == (0.0, False)


def test_no_draw_is_refused() -> None:
    with pytest.raises(ValueError, match=r"draws: .*got 0"):
        layer_trend([[1.0]], draws=0)
