"""Attention as a convolution: exact inverses, least squares, and their errors."""

import random

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from attnconv import SelfAttention1d, SelfAttention2d
from attnconv.convert import conversion_error, from_conv, to_conv
from attnconv.convert.verify_conversions import draw_convolution
from attnconv.grid import Border
from tests.tolerances import tolerance


@given(st.integers(0, 10**9), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_every_convolution_comes_back_bit_for_bit(seed: int, dtype: torch.dtype) -> None:
    conv, x = draw_convolution(random.Random(seed), dtype)
    back = to_conv(from_conv(conv))
    assert type(back) is type(conv)
    assert torch.equal(back.weight, conv.weight)
    assert (conv.bias is None) == (back.bias is None)
    torch.testing.assert_close(back(x), conv(x), rtol=0, atol=0)


def hard(layer: SelfAttention2d, shifts: list[list[int]]) -> SelfAttention2d:
    with torch.no_grad():
        layer.encoding.get_parameter("centres").copy_(torch.tensor(shifts))
        layer.encoding.get_parameter("spread").fill_(12.0)
    return layer.double()


@pytest.mark.parametrize(
    ("border", "padding", "mode"),
    [
        ("renormalise", 0, "replicate"),
        ("zero", 3, "zeros"),
        ("zero", 1, "zeros"),  # the nearest lattice point of a head further out is padding too
        ("zero", 0, "replicate"),  # and without padding it is a pixel
        ("replicate", 1, "replicate"),
        ("reflect", 3, "reflect"),
        ("circular", 3, "circular"),
    ],
)
@pytest.mark.parametrize("stride", [1, 2])
def test_hard_heads_anywhere_are_one_convolution(border: Border, padding: int, mode: str, stride: int) -> None:
    layer = SelfAttention2d(3, 2, 4, border=border, padding=padding, stride=stride)
    conv = to_conv(hard(layer, [[2, -2], [0, 0], [2, -2], [-2, 0]]))
    assert (conv.padding_mode, conv.kernel_size, conv.dilation) == (mode, (3, 3), (2, 2))
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    torch.testing.assert_close(conv(x), layer(x), **tolerance(torch.float64))
    assert conversion_error(layer, conv, x).everywhere < 1e-12


def test_what_no_convolution_continues_is_refused() -> None:
    layer = hard(SelfAttention2d(1, 1, 1, border="reflect", padding=1), [[2, 0]])
    with pytest.raises(ValueError, match=r"layer: .*got heads up to 2 pixels out"):
        to_conv(layer)
    with pytest.raises(ValueError, match=r"layer: .*got soft heads"):
        to_conv(SelfAttention2d(1, 1, 1))
    moved = from_conv(nn.Conv2d(1, 1, 3))
    with torch.no_grad():
        moved.encoding.get_parameter("centres")[0] = 7
    with pytest.raises(ValueError, match=r"layer: .*got heads at \[\(7, 7\)\]"):
        to_conv(moved)
    with pytest.raises(ValueError, match=r"x: .*got None"):
        to_conv(SelfAttention2d(1, 1, 1), 3)
    with pytest.raises(ValueError, match=r"kernel_size: .*got \(2, 2\)"):
        to_conv(SelfAttention2d(1, 1, 1), 2, x=torch.zeros(1, 1, 4, 4))


def test_soft_heads_have_a_nearest_convolution_that_grows_nearer_with_the_kernel() -> None:
    layer, x = SelfAttention2d(2, 3, 5).double(), torch.zeros(1, 2, 11, 12, dtype=torch.float64)
    errors = [conversion_error(layer, to_conv(layer, size, x=x), x).everywhere for size in (1, 3, 5, 7, 9)]
    assert errors == sorted(errors, reverse=True)


def matrix(module: nn.Module, x: Tensor) -> Tensor:
    """The module's matrix from all inputs to all outputs, without its bias."""
    basis = torch.eye(x[0].numel(), dtype=x.dtype).reshape(-1, *x.shape[1:])
    with torch.no_grad():
        return (module(basis) - module(torch.zeros_like(x[:1]))).flatten(1)


@pytest.mark.parametrize("border", ["renormalise", "zero", "reflect"])
def test_nearest_and_its_error_are_those_of_the_whole_matrices(border: Border) -> None:
    layer = SelfAttention1d(2, 1, 3, border=border, padding=2, encoding="learned").double()
    x = torch.randn(1, 2, 8, dtype=torch.float64)
    conv = to_conv(layer, 3, x=x)
    target = matrix(layer, x)
    kernels = []
    for index in range(conv.weight.numel()):  # the convolutions of one weight each span all of them
        with torch.no_grad():
            single = nn.Conv1d(2, 1, 3, padding=1, padding_mode=conv.padding_mode, bias=False, dtype=x.dtype)
            single.weight.copy_(torch.eye(conv.weight.numel(), dtype=x.dtype)[index].reshape(conv.weight.shape))
        kernels.append(matrix(single, x).flatten())
    best = torch.linalg.lstsq(torch.stack(kernels, 1), target.flatten()[:, None]).solution[:, 0]
    torch.testing.assert_close(conv.weight.flatten(), best, **tolerance(torch.float64, scale=100))
    error = conversion_error(layer, conv, x)
    apart = (matrix(conv, x) - target).square().sum(0)
    whole = target.square().sum(0)
    for found, queries in ((error.everywhere, slice(None)), (error.inside, slice(1, -1)), (error.border, [0, -1])):
        torch.testing.assert_close(found, float((apart[queries].sum() / whole[queries].sum()).sqrt()))


def test_content_counts_through_its_mean_over_images() -> None:
    layer = SelfAttention1d(4, 2, 2, encoding="learned-content").double()
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    conv = to_conv(layer, 3, x=x)
    best = conversion_error(layer, conv, x).everywhere
    with torch.no_grad():
        conv.weight.mul_(1.01)
    assert best < conversion_error(layer, conv, x).everywhere


def test_a_grouped_convolution_is_compared_as_the_dense_one_that_it_equals() -> None:
    layer, x = SelfAttention2d(2, 2, 4).double(), torch.zeros(1, 2, 5, 5, dtype=torch.float64)
    grouped = nn.Conv2d(2, 2, 3, padding=1, groups=2, dtype=torch.float64)
    dense = nn.Conv2d(2, 2, 3, padding=1, dtype=torch.float64)
    with torch.no_grad():
        dense.weight.zero_()
        dense.weight[0, 0], dense.weight[1, 1] = grouped.weight[:, 0]
    found, expected = (conversion_error(layer, conv, x).everywhere for conv in (grouped, dense))
    assert found == pytest.approx(expected)


def test_error_between_layers_that_do_not_match_is_refused() -> None:
    layer, x = SelfAttention2d(2, 3, 4), torch.zeros(1, 2, 5, 5)
    with pytest.raises(ValueError, match=r"conv: .*got \(3, 3\)"):
        conversion_error(layer, nn.Conv2d(2, 3, 3), x)


def test_a_layer_without_weights_is_nothing_to_be_far_from() -> None:
    layer = SelfAttention2d(1, 1, 1, bias=False)
    with torch.no_grad():
        layer.get_parameter("weight").zero_()
    conv, x = nn.Conv2d(1, 1, 1), torch.zeros(1, 1, 3, 3)
    error = conversion_error(layer, conv, x)
    assert (error.inside, error.border) == (float("inf"), None)
