import pytest
import torch

from attnconv.surgery.position_vectors import AxisFeatures, cosines
from tests.tolerances import tolerance


@pytest.mark.parametrize("size", [1, 2, 5, 14])
def test_cosines_are_orthonormal_and_but_for_the_first_of_mean_nought(size: int) -> None:
    table = cosines(size)
    torch.testing.assert_close(table.T @ table, torch.eye(size), **tolerance(torch.float32))
    torch.testing.assert_close(table[:, 1:].sum(0), torch.zeros(size - 1), **tolerance(torch.float32))


@pytest.mark.parametrize(("size", "room"), [(8, 8), (8, 7), (14, 5), (5, 9)])
def test_features_are_unit_vectors_and_differ(size: int, room: int) -> None:
    axis = AxisFeatures(size, room, 1)
    products = axis.at(torch.arange(size)) @ axis.at(torch.arange(size)).T
    torch.testing.assert_close(products.diagonal(), torch.ones(size), **tolerance(torch.float32))
    assert float((products - torch.eye(size)).max()) < 0.999
    assert axis.exact == (room >= size)
    assert axis.at(torch.arange(size)).shape[1] <= room


@pytest.mark.parametrize("room", [8, 5])
@pytest.mark.parametrize("step", [-2, 0, 1])
def test_a_shift_is_a_linear_map(room: int, step: int) -> None:
    axis, places = AxisFeatures(8, room, 2), torch.arange(8)
    moved = axis.at(places) @ axis.moved(step).T
    torch.testing.assert_close(moved, axis.at(places + step), **tolerance(torch.float32))
    # No key is better for a query than the one at the shift, or at the border than the nearest to it. (Of 8 places by
    # two frequencies, one at half the period is as good for a shift of 2 beyond the border.)
    products = moved @ axis.at(places).T
    nearest = products.gather(1, (places + step).clamp(0, 7)[:, None])[:, 0]
    torch.testing.assert_close(nearest, products.amax(1), **tolerance(torch.float32))
