"""Soft heads with the weights nearest to a convolution, compared with least squares on a whole image."""

import random

import pytest
import torch
from torch import Tensor, nn

from attnconv.convert import compare, from_conv, recast
from attnconv.convert.verify_conversions import draw_convolution
from attnconv.encodings.base import SeparableEncoding
from attnconv.grid import Grid
from attnconv.operators import Kronecker, Toeplitz
from attnconv.theory import imitate, imitation_error
from tests.tolerances import tolerance


@pytest.mark.parametrize("alpha", [1.5, 3.0])
def test_nearest_weights_are_those_of_the_inside_of_a_large_image(alpha: float) -> None:
    conv = nn.Conv2d(3, 2, 3, padding=1, groups=1, dtype=torch.float64)
    near = from_conv(conv, alpha=alpha, weights="nearest")
    whole = imitate(near, conv, sizes=(17, 17), where="inside")
    ours, theirs = (imitation_error(layer, conv, sizes=(17, 17)).inside for layer in (near, whole))
    assert ours is not None
    assert theirs is not None
    assert theirs <= ours <= 1.001 * theirs


def test_they_are_nearer_than_slices_whatever_the_convolution() -> None:
    source = random.Random(0)
    for _ in range(12):
        conv, x = draw_convolution(source, torch.float64)
        if x.dim() == 5 or conv.kernel_size[0] == 1:
            continue
        sizes = tuple(size + 6 for size in x.shape[2:])
        near, sliced = (
            imitation_error(from_conv(conv, alpha=2.0, weights=weights), conv, sizes=sizes).inside
            for weights in ("nearest", "slices")
        )
        assert near is not None
        assert sliced is not None
        assert near < sliced


def test_hard_heads_keep_the_kernels_slices() -> None:
    conv = nn.Conv2d(2, 3, 3, padding=1, dtype=torch.float64)
    near, sliced = from_conv(conv, weights="nearest"), from_conv(conv)
    torch.testing.assert_close(near.weight, sliced.weight, **tolerance(torch.float64))


def test_a_network_recast_with_them_is_nearer_and_has_no_bound() -> None:
    cnn, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), torch.randn(2, 3, 12, 12)
    near, sliced = (compare(cnn, recast(cnn, alpha=3.0, weights=w), x) for w in ("nearest", "slices"))
    assert near.error < sliced.error
    assert {layer.bound for layer in near.layers} == {None}


def test_blunt_heads_are_fitted_on_an_image_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head with alpha 1e-9 attends to 100,000 positions; 32 positions beyond the taps are sufficient."""
    sizes: list[tuple[int, ...]] = []
    operator_on = SeparableEncoding.operator

    def noted(encoding: SeparableEncoding, grid: Grid, x: Tensor) -> Kronecker | Toeplitz:
        sizes.append(grid.sizes)
        return operator_on(encoding, grid, x)

    monkeypatch.setattr(SeparableEncoding, "operator", noted)
    from_conv(nn.Conv1d(1, 1, 3, padding=1), alpha=1e-9, weights="nearest")
    assert sizes == [(2 * (1 + 32) + 3,)]


@pytest.mark.usefixtures("unhooked")
def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weights: .*got 'best'"):
        from_conv(nn.Conv1d(1, 1, 1), weights="best")  # type: ignore[arg-type]
