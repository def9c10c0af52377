"""Error bounds of soft heads, compared with explicit sums and with worst-case images."""

import math
import operator
import random
import sys

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from attnconv import SelfAttention1d, SelfAttention2d
from attnconv.convert import from_conv
from attnconv.convert.verify_conversions import draw_convolution, perform
from attnconv.encodings.base import mass_off_nearest
from attnconv.grid import BORDERS, Border
from attnconv.theory import alpha_for, error_bound, mass_off


@given(st.floats(1e-4, 60), st.floats(-0.5, 0.5, allow_subnormal=False), st.integers(1, 3))
def test_mass_off_the_nearest_key_is_the_sum_written_out(alpha: float, offset: float, dims: int) -> None:
    reach = int(math.sqrt(60 / alpha)) + 3
    keys = torch.arange(-reach, reach + 1, dtype=torch.float64)
    total = float(torch.exp(-alpha * keys * (keys - 2 * offset)).sum())
    alphas, offsets = (
        torch.full((1, dims), alpha, dtype=torch.float64),
        torch.full((1, dims), offset, dtype=torch.float64),
    )
    expected = 1 - total**-dims
    torch.testing.assert_close(float(mass_off_nearest(alphas, offsets)), expected, rtol=1e-9, atol=1e-15)


def test_lemma_2_the_mass_off_falls_as_exp_of_minus_alpha() -> None:
    for alpha in (5.0, 10.0, 20.0, 46.0):
        torch.testing.assert_close(mass_off(alpha, 2), 4 * math.exp(-alpha), rtol=0.02, atol=0.0)
    assert mass_off(1e-9) > 1 - 1e-8


@given(st.floats(1e-30, 0.99), st.integers(1, 3))
def test_alpha_for_is_the_inverse(mass: float, dims: int) -> None:
    alpha = alpha_for(mass, dims)
    assert mass_off(alpha, dims) <= mass * (1 + 1e-12)
    assert mass_off(alpha * 0.999, dims) > mass * (1 - 1e-12)


def test_the_bound_holds_on_drawn_layers() -> None:
    source = random.Random(0)
    for _ in range(60):
        conv, x = draw_convolution(source, torch.float64)
        layer, axes = from_conv(conv, alpha=0.3 * 66 ** source.random()), (0, *range(2, x.dim()))
        with torch.no_grad():
            apart = (perform(layer, x, "kronecker") - conv(x)).abs().amax(axes)
        assert bool((apart <= error_bound(layer, x.amin(axes), x.amax(axes))).all())


@pytest.mark.parametrize("alpha", [0.5, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("kernel", [1, 3])
def test_an_image_built_to_be_worst_reaches_a_quarter_of_the_bound(alpha: float, kernel: int) -> None:
    conv = nn.Conv2d(2, 1, kernel, padding=kernel // 2, dtype=torch.float64)
    layer = from_conv(conv, alpha=alpha)
    x = torch.zeros(1, 2, 9, 9, dtype=torch.float64, requires_grad=True)
    (layer(x) - conv(x))[
        0, 0, 4, 4
    ].backward()  # linear in x: the worst image with values in [-1, 1] is the sign of the gradient
    assert x.grad is not None
    worst = x.grad.sign()
    with torch.no_grad():
        apart = float((layer(worst) - conv(worst)).abs().max())
    assert 0.25 <= apart / float(error_bound(layer, -1.0, 1.0)) <= 1


@pytest.mark.parametrize("border", BORDERS)
def test_a_range_of_python_numbers_is_not_rounded(border: Border) -> None:
    layer = SelfAttention2d(3, 2, heads=4, border=border, dtype=torch.float64)
    low, high = -0.1, 0.7  # neither is representable in float32
    exact = [torch.full((3,), v, dtype=torch.float64) for v in (low, high)]
    torch.testing.assert_close(error_bound(layer, low, high), error_bound(layer, *exact), rtol=1e-15, atol=0.0)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"alpha: .*got 0\.0"):
        mass_off(0.0)
    with pytest.raises(ValueError, match=r"mass: .*got 1\.5"):
        alpha_for(1.5)
    with pytest.raises(ValueError, match=r"dims: .*got 0"):
        mass_off(1.0, dims=0)
    with pytest.raises(ValueError, match=r"dims: .*got 0"):
        alpha_for(0.5, dims=0)
    with pytest.raises(ValueError, match=r"low: .*got low=1\.0, high=0\.0"):
        error_bound(SelfAttention2d(1, 1, 1), 1.0, 0.0)
    with pytest.raises(ValueError, match=r"layer: .*got LearnedRelative"):
        error_bound(SelfAttention1d(1, 1, 1, encoding="learned"), 0.0, 1.0)


def test_alpha_for_a_blunt_head_is_the_least_that_it_looks_at() -> None:
    assert alpha_for(1 - 1e-16) == pytest.approx(1e-12)


def test_alpha_for_the_smallest_normal_float_is_finite() -> None:
    assert math.isfinite(alpha_for(sys.float_info.min))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha", [0.05, 3.0, 46.0])
def test_rounding_is_in_the_bound_and_is_not_overrated(dtype: torch.dtype, alpha: float) -> None:
    """On a constant image all heads are exact, so the bound is only its rounding term."""
    conv = nn.Conv2d(16, 8, 3, padding=1, padding_mode="replicate", dtype=dtype)
    layer, x = from_conv(conv, alpha=alpha), torch.full((1, 16, 11, 11), 0.7, dtype=dtype)
    with torch.no_grad():
        apart = float((layer(x).double() - conv.double()(x.double())).abs().amax((0, 2, 3)).max())
    bound = float(error_bound(layer, float(x[0, 0, 0, 0]), float(x[0, 0, 0, 0])).max())
    assert bound / 10000 < apart <= bound


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("alpha", [0.01, 46.0])
@pytest.mark.parametrize(
    ("make", "channels", "groups"),
    [(nn.Conv1d, 1, 1), (nn.Conv1d, 64, 1), (nn.Conv2d, 1, 1), (nn.Conv2d, 12, 3), (nn.Conv3d, 1, 1)],
)
def test_rounding_counts_keys_scores_and_the_projections_sum(
    make: type[nn.Conv2d], channels: int, groups: int, alpha: float, dtype: torch.dtype
) -> None:
    """Without a range of inputs the bound is the rounding term of the module docstring."""
    conv = make(channels, groups, 2, padding=1, padding_mode="replicate", bias=False, groups=groups, dtype=dtype)
    nn.init.ones_(conv.weight)
    layer = from_conv(conv, alpha=alpha)
    unit, dims = torch.finfo(dtype).eps / 2, layer.dims
    size = layer.heads * channels // groups  # ones, summed by each output
    reach = math.sqrt(-math.log(unit) / alpha)
    for keys, compare in (((2 * math.floor(reach) + 1) ** dims, operator.ge), ((2 * reach + 3) ** dims, operator.le)):
        counted = keys + 16 * dims + 2 * layer.heads * channels / groups + 8
        assert compare(float(error_bound(layer, 1.0, 1.0).max()), unit * counted * size)


def test_a_sum_that_rounds_down_at_every_step_is_within_the_bound() -> None:
    """The sum of 1 and 1023 numbers that are each rounded off has an error of its length times the unit roundoff."""
    channels, unit = 1024, torch.finfo(torch.float32).eps / 2
    conv = nn.Conv1d(channels, 1, 1, bias=False)
    with torch.no_grad():
        conv.weight.fill_(0.99 * unit)[:, 0] = 1
        out = from_conv(conv)(torch.ones(1, channels, 3)).double()
    apart = float((out - conv.weight.detach().double().sum()).abs().max())
    assert apart <= float(error_bound(from_conv(conv), 1.0, 1.0))
