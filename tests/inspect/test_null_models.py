import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from attnconv import Grid, Shift, from_conv
from attnconv.inspect.head_statistics import grid_coverage, profile_cosines, redundancy
from attnconv.inspect.null_models import layer_trend, mirror_partners, mirror_symmetry, turned_at_random, turned_heads
from attnconv.inspect.shift_profiles import ShiftProfile, shift_profile
from tests.tolerances import tolerance

SIDE = 7


def profile_of(*taps: tuple[int, int], reach: tuple[int, int] = (SIDE, SIDE)) -> ShiftProfile:
    """Return the profile of heads with one shift each."""
    mass = torch.zeros(len(taps), *(2 * half + 1 for half in reach), dtype=torch.float64)
    for head, (row, column) in enumerate(taps):
        mass[head, row + reach[0], column + reach[1]] = 1.0
    counts = torch.ones(mass.shape[1:], dtype=torch.int64)
    constancy = torch.ones(len(taps), dtype=torch.float64)
    both = tuple((-half, half) for half in reach)
    return ShiftProfile(mass, counts, torch.zeros_like(mass), constancy, both, ((0, 0), (0, 0)), 256)


def holds(profile: ShiftProfile) -> list[tuple[int, ...]]:
    return [tuple(profile.shifts[place].tolist()) for place in profile.mass.flatten(1).argmax(1)]


KERNEL = [(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)]


class TestTurned:
    def test_a_turned_head_keeps_its_distance_and_reaches_every_direction(self) -> None:
        generator = torch.Generator().manual_seed(0)
        found = {holds(turned_at_random(profile_of((1, 3)), generator))[0] for _ in range(200)}
        assert found == {(a * x, b * y) for x, y in ((1, 3), (3, 1)) for a in (-1, 1) for b in (-1, 1)}

    def test_axes_of_other_lengths_are_not_exchanged(self) -> None:
        generator = torch.Generator().manual_seed(0)
        profile = profile_of((1, 3), reach=(4, 5))
        assert {holds(turned_at_random(profile, generator))[0] for _ in range(100)} == {
            (a, 3 * b) for a in (-1, 1) for b in (-1, 1)
        }

    def test_a_kernel_overlaps_less_and_covers_more_than_chance(self) -> None:
        profile = profile_of(*KERNEL)
        turned = turned_heads(profile, draws=50)
        assert (redundancy(profile), grid_coverage(profile)) == (0.0, 1.0)
        assert float(turned.redundancy.quantile(0.05)) > 0
        assert float(turned.coverage.quantile(0.95)) < 1

    def test_heads_that_are_alike_do_not(self) -> None:
        turned = turned_heads(profile_of(*[(0, 1)] * 4), draws=50)
        assert float(turned.redundancy.max()) <= 1.0
        assert float(turned.redundancy.mean()) < 0.5  # four directions

    def test_draws_are_a_function_of_the_seed(self) -> None:
        one, other = (turned_heads(profile_of(*KERNEL), draws=5, seed=3) for _ in range(2))
        torch.testing.assert_close(one.coverage, other.coverage, **tolerance(torch.float64))

    def test_no_draw_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"draws: .*got 0"):
            turned_heads(profile_of((0, 0)), draws=0)


class TestMirrors:
    def test_partners_of_each_axis(self) -> None:
        profile = profile_of((1, 2), (1, -2), (3, 0), (-1, 2))
        across, partner = mirror_partners(profile, 1)
        assert across.tolist() == [1.0, 1.0, 1.0, 0.0]
        assert partner[:3].tolist() == [1, 0, 2]
        assert mirror_partners(profile, 0)[0].tolist() == [1.0, 0.0, 0.0, 1.0]
        with pytest.raises(ValueError, match=r"axis: .*got 2"):
            mirror_partners(profile, 2)

    def test_left_right_pairs_beat_chance_and_a_turned_layer_shows_the_opposite(self) -> None:
        pairs = [(row, sign * column) for row, column in ((1, 2), (2, 1), (3, 4), (1, 5), (4, 2)) for sign in (1, -1)]
        found = mirror_symmetry([profile_of(*pairs), profile_of(*pairs)])
        assert (found.left_right, found.up_down) == (1.0, 0.0)
        assert 0 < found.chance < 1
        sideways = mirror_symmetry([profile_of(*((column, row) for row, column in pairs))] * 2)
        assert sideways.left_right - sideways.up_down < sideways.chance

    def test_partners_count_once(self) -> None:
        """The heads of a pair share a random sign, so the chance level is higher than for heads without partners."""
        pairs = mirror_symmetry([profile_of((1, 2), (1, -2))] * 4)
        alone = mirror_symmetry([profile_of((1, 0), (2, 0))] * 4)
        assert alone.chance < pairs.chance

    def test_profiles_of_one_axis_are_refused(self) -> None:
        flat = shift_profile(Shift(Grid.make((3,)), [(1,)], torch.zeros(())))
        with pytest.raises(ValueError, match=r"profiles: .*got numbers of axes \[1\]"):
            mirror_symmetry([flat])
        with pytest.raises(ValueError, match=r"profiles: .* got numbers of axes \[\]"):
            mirror_symmetry([])

    def test_shifts_that_do_not_reach_both_ways_alike_are_refused(self) -> None:
        """A convolution without padding attends downwards and to the right of its first pixel."""
        unpadded = shift_profile(from_conv(torch.nn.Conv2d(1, 1, 3)).operator(torch.zeros(1, 1, 8, 8)))
        for mirror in (partial(mirror_partners, axis=0), partial(turned_at_random, generator=torch.Generator())):
            with pytest.raises(ValueError, match=r"profile: .*got "):
                mirror(unpadded)


def test_heads_without_mass_are_like_nothing() -> None:
    profiles = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    expected = torch.tensor([[0.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(profile_cosines(profiles, profiles), expected, **tolerance(torch.float64))


class TestLayerTrend:
    def test_is_spearmans_correlation(self) -> None:
        generator = np.random.default_rng(0)
        values = [
            (generator.normal(size=count) + layer / 2).round(1).tolist() for layer, count in enumerate((3, 5, 4, 6))
        ]
        layers = [layer for layer, some in enumerate(values) for _ in some]
        expected = spearmanr(layers, [value for some in values for value in some]).statistic
        assert layer_trend(values).rho == pytest.approx(expected, rel=1e-12)

    def test_chance_is_exceeded_about_once_in_twenty(self) -> None:
        generator = np.random.default_rng(1)
        found = [layer_trend(generator.normal(size=(4, 9)).tolist()) for _ in range(400)]
        assert 0.01 < np.mean([trend.rho > trend.chance for trend in found]) < 0.10

    def test_numbers_that_grow_rise_and_others_do_not(self) -> None:
        up, down = layer_trend([[0.0, 0.1], [0.5, 0.6], [1.0, math.inf]]), layer_trend([[3.0, 3.0], [2.0, 2.0], [1.0]])
        assert up.rho > up.chance
        assert down.rho <= down.chance

    def test_nothing_to_rank_is_no_trend(self) -> None:
        for values in ([[1.0, 1.0], [1.0]], [[1.0, 2.0]], [[math.nan], [1.0]]):
            found = layer_trend(values)
            assert (found.rho, found.rho > found.chance) == (0.0, False)
