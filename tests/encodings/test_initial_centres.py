"""Tests of heads initialised at the nearest shifts."""

import itertools

import pytest
import torch

from attnconv import GeneralizedQuadratic, Grid, LearnedRelative, Quadratic
from attnconv.encodings.quadratic import nearest_shifts, start_at_neighbours


@pytest.mark.parametrize("encoding", [Quadratic(9, spread_std=0.1), GeneralizedQuadratic(9, spread_std=0.1)])
def test_nine_heads_are_a_kernel_of_three_by_three_and_narrow(encoding: Quadratic | GeneralizedQuadratic) -> None:
    name = "spread" if isinstance(encoding, Quadratic) else "root_precision"
    drawn = encoding.get_parameter(name).detach().clone()
    start_at_neighbours(encoding)
    kernel = {(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)}
    assert {tuple(centre) for centre in encoding.centres.int().tolist()} == kernel
    torch.testing.assert_close(encoding.get_parameter(name).detach(), 2 * drawn)


def test_each_head_attends_its_own_shift_most() -> None:
    encoding = Quadratic(9, spread_std=0.0)
    start_at_neighbours(encoding)
    middle = 4 * 9 + 4  # centre of 9 x 9 positions
    row = encoding.operator(Grid.make((9, 9)), torch.zeros(1, 9, 9, 1)).to_dense()[0, :, middle]
    places = encoding.centres.int() + 4
    torch.testing.assert_close(row.argmax(1), (9 * places[:, 0] + places[:, 1]).long())
    torch.testing.assert_close(row.amax(1), torch.full((9,), 0.619), rtol=0.0, atol=1e-3)


def test_shifts_are_the_nearest_whatever_their_number() -> None:
    for count, dims in ((1, 2), (2, 1), (16, 2), (25, 2), (27, 3), (40, 2)):
        shifts = nearest_shifts(count, dims)
        assert len(set(shifts)) == count
        far = max(sum(step**2 for step in shift) for shift in shifts)
        box = itertools.product(range(-8, 9), repeat=dims)
        assert {shift for shift in box if sum(step**2 for step in shift) < far} <= set(shifts)


def test_seven_heads_on_a_sequence() -> None:
    encoding = Quadratic(7, dims=1)
    start_at_neighbours(encoding)
    assert sorted(encoding.centres.flatten().int().tolist()) == [-3, -2, -1, 0, 1, 2, 3]


def test_heads_without_centres_are_refused() -> None:
    with pytest.raises(ValueError, match=r"encoding: .*got LearnedRelative"):
        start_at_neighbours(LearnedRelative(9, channels=4))
