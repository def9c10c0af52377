"""Narrow heads: exact if the rank allows it, otherwise the best weights. Few heads: accuracy and known cases."""

import math

import pytest
import torch
from torch import nn

from attnconv import SelfAttention2d
from attnconv.convert import from_conv, head_ranks, low_rank, low_rank_error, place_heads
from attnconv.convert.few_or_narrow_heads import _Problem
from attnconv.theory import imitate, imitation_error
from attnconv.theory.conv_taps import head_weights


@pytest.fixture
def layer() -> SelfAttention2d:
    made = from_conv(nn.Conv2d(6, 8, 3, padding=1, dtype=torch.float64))
    assert isinstance(made, SelfAttention2d)
    return made


@pytest.mark.parametrize("width", [6, 8, 11])
def test_heads_as_wide_as_the_rank_are_exact(layer: SelfAttention2d, width: int) -> None:
    assert head_ranks(layer) == [6] * 9
    x = torch.randn(2, 6, 9, 10, dtype=torch.float64)
    made = low_rank(layer, width)
    assert made.value_weight is not None
    assert made.value_weight.shape == (9, 6, width)
    assert low_rank_error(layer, made, x) < 1e-12


@pytest.mark.parametrize("width", [1, 2, 4])
def test_several_narrow_heads_per_shift_are_exact(layer: SelfAttention2d, width: int) -> None:
    with torch.no_grad():
        assert layer.weight is not None
        layer.weight[3, :, 1:] = 0  # one head of rank 1; others have rank 6
        layer.weight[4] = 0  # one head of rank 0
    made, x = low_rank(layer, width, exact=True), torch.randn(2, 6, 9, 10, dtype=torch.float64)
    assert made.heads == 7 * -(-6 // width) + 2
    assert low_rank_error(layer, made, x) < 1e-12
    assert made.plan((9, 10)) == "shift"
    assert low_rank_error(layer, made, x) < 1e-12


def test_truncation_is_best_in_the_weights(layer: SelfAttention2d) -> None:
    made = low_rank(layer, 2)
    assert layer.weight is not None
    assert made.value_weight is not None
    assert made.output_weight is not None
    lost = (layer.weight - made.value_weight @ made.output_weight).square().sum((1, 2))
    torch.testing.assert_close(lost, torch.linalg.svdvals(layer.weight)[:, 2:].square().sum(1))


def test_everything_else_is_kept() -> None:
    conv = nn.ConvTranspose2d(4, 3, 3, stride=2, output_padding=1)
    layer = from_conv(conv).eval()
    layer.requires_grad_(False)
    made = low_rank(layer, 3)
    x = torch.randn(1, 4, 5, 6)
    torch.testing.assert_close(made(x), conv(x), rtol=1e-4, atol=1e-5)
    assert not made.training
    assert not any(parameter.requires_grad for parameter in made.parameters())


def test_ranks_are_those_of_the_dtype() -> None:
    conv = nn.Conv2d(2, 2, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        conv.weight.copy_(torch.diag(torch.tensor([1.0, 1e-8], dtype=torch.float64))[..., None, None])
    layer, x = from_conv(conv), torch.randn(1, 2, 3, 3, dtype=torch.float64)
    assert head_ranks(layer) == [2]
    x[:, 0] = 0
    assert low_rank_error(layer, low_rank(layer, 1, exact=True), x) < 1e-12
    assert head_ranks(from_conv(conv.float())) == [1]


def test_what_cannot_be_factored_is_refused() -> None:
    layer = SelfAttention2d(4, 4, 2)
    with pytest.raises(ValueError, match=r"layer: .*got factored weights"):
        low_rank(low_rank(layer, 2), 2)
    with pytest.raises(ValueError, match=r"layer: .*got 2"):
        low_rank(SelfAttention2d(4, 4, 2, groups=2), 2)
    with pytest.raises(ValueError, match=r"head_channels: .*got 0"):
        low_rank(layer, 0)


def error(conv: nn.Conv1d | nn.Conv2d, heads: int, restarts: int = 8) -> float:
    size = 2 * 10 + 2 * max(conv.kernel_size) * max(conv.dilation)
    found = imitation_error(
        place_heads(conv, heads, restarts=restarts), conv, sizes=(size,) * len(conv.kernel_size)
    ).inside
    assert found is not None
    return found


@pytest.mark.parametrize("heads", [1, 3, 6, 8])
def test_never_worse_than_hard_heads_at_the_largest_taps(heads: int) -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1, dtype=torch.float64)
    energy = head_weights(conv).detach().square().sum((1, 2)).sort().values
    obvious = float((energy[:-heads].sum() / energy.sum()).sqrt())
    assert error(conv, heads, restarts=2) <= obvious + 1e-9


@pytest.mark.parametrize("heads", [3, 5])
def test_rounding_does_not_make_it_worse_than_hard_heads(heads: int) -> None:
    """In bfloat16, large weights that nearly cancel would lose more by rounding than the search gained."""
    torch.manual_seed(2)
    conv = nn.Conv1d(1, 1, 7, padding=3, bias=False).bfloat16()
    with torch.no_grad():
        conv.weight.copy_(torch.randn_like(conv.weight))
    order = conv.weight.detach().flatten().float().abs().argsort(descending=True)[:heads]
    left = (
        1 - conv.weight.detach().flatten().double()[order].square().sum() / conv.weight.detach().double().square().sum()
    )
    found = imitation_error(place_heads(conv, heads, restarts=3), conv, sizes=(31,)).inside
    assert found is not None
    assert found <= float(left.sqrt()) + 1e-3


def test_a_gaussian_blur_is_one_head_and_a_box_four() -> None:
    blur = nn.Conv2d(1, 1, 5, padding=2, dtype=torch.float64)
    bell = torch.exp(-0.7 * torch.arange(-2.0, 3, dtype=torch.float64).square())
    box = nn.Conv2d(1, 1, 3, padding=1, dtype=torch.float64)
    with torch.no_grad():
        blur.weight.copy_(bell[:, None] * bell)
        box.weight.fill_(1 / 9)
    assert error(blur, 1, restarts=0) < 0.01
    assert error(box, 4) < 0.01 < error(box, 2, restarts=2)


def test_more_heads_come_nearer_and_the_seed_decides() -> None:
    conv = nn.Conv1d(2, 2, 5, dilation=2, dtype=torch.float64)
    errors = [error(conv, heads, restarts=4) for heads in (1, 2, 3, 4)]
    assert errors == sorted(errors, reverse=True)
    first, second = (place_heads(conv, 2, restarts=2, seed=1) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_the_weights_are_the_best_for_the_heads_found() -> None:
    conv = nn.Conv2d(2, 2, 3, padding=1, groups=2, dtype=torch.float64)
    layer = place_heads(conv, 5, restarts=1, diagonal=True)
    best = imitate(layer, conv, sizes=(25, 25), where="inside")
    ours, theirs = (imitation_error(made, conv, sizes=(25, 25)).inside for made in (layer, best))
    assert ours is not None
    assert theirs is not None
    assert theirs <= ours <= theirs * 1.01 + 1e-9
    assert layer.groups == 2
    assert layer.encoding.get_parameter("spread").shape == (5, 2)


def test_the_layer_has_the_convolutions_outputs() -> None:
    conv = nn.Conv2d(2, 3, 3, stride=2, padding=1, padding_mode="reflect", bias=False)
    layer, x = place_heads(conv, 4, restarts=0), torch.randn(1, 2, 9, 8)
    assert layer(x).shape == conv(x).shape == from_conv(conv)(x).shape
    assert (layer.border, layer.bias) == ("reflect", None)


def test_a_kernel_of_zeros_is_no_trouble() -> None:
    conv = nn.Conv1d(1, 1, 3, padding=1)
    nn.init.zeros_(conv.weight)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in place_heads(conv, 2).parameters())


@pytest.mark.usefixtures("unhooked")
def test_what_needs_no_placing_is_refused() -> None:
    conv = nn.Conv2d(1, 1, 3)
    for heads in (0, 9):
        with pytest.raises(ValueError, match=rf"heads: .*got {heads}"):
            place_heads(conv, heads)
    with pytest.raises(TypeError, match=r"conv: .*got ConvTranspose1d"):
        place_heads(nn.ConvTranspose1d(1, 1, 3), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"conv: .*got .*meta"):
        place_heads(nn.Conv1d(1, 1, 3, device="meta"), 1)


def test_the_default_device_is_none_of_its_business() -> None:
    conv = nn.Conv1d(1, 1, 3)
    expected = place_heads(conv, 1, restarts=0)
    with torch.device("meta"):
        found = place_heads(conv, 1, restarts=0)
    for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("sharpness", [0.1, 0.7, 0.9, 3.0])
def test_heads_may_meet_and_the_error_is_that_of_one(sharpness: float) -> None:
    """Equal heads have a singular Phi^T Phi; its regularisation must not affect the error."""
    shifts = torch.arange(-2.0, 3, dtype=torch.float64)[:, None]
    problem = _Problem(shifts, torch.exp(-0.7 * shifts.square())[:, :, None], diagonal=False)
    centre, alpha = torch.tensor([[0.3]], dtype=torch.float64), torch.tensor([[sharpness]], dtype=torch.float64)
    one = problem.error(centre, alpha)
    for heads in (2, 3):
        met = problem.error(centre.repeat(heads, 1), alpha.repeat(heads, 1))
        torch.testing.assert_close(met, one, rtol=0, atol=4e-9)
    left = -problem.attention(centre, alpha) @ problem.weights(centre, alpha)[:, :, 0]
    left[problem.places] += problem.kernel[:, :, 0]
    torch.testing.assert_close(one, left.square().sum() / problem.kernel.square().sum(), rtol=0, atol=4e-9)
    assert one > 1e-3


def test_a_search_that_is_slow_at_first_goes_on_to_the_end() -> None:
    """Three Gaussians, two far apart and one in between: after 20 steps the error is still 6 %."""
    torch.manual_seed(2)
    conv = nn.Conv1d(1, 2, 11, padding=5, dtype=torch.float64)
    centres, alpha = torch.tensor([-3.0, 0.5, 3.0]).double(), torch.tensor([0.4, 0.8, 0.6]).double()
    bells = torch.exp(-alpha[:, None] * (torch.arange(-5, 6) - centres[:, None]).square())
    with torch.no_grad():
        conv.weight.copy_((torch.randn(3, 2, dtype=torch.float64).mT @ bells)[:, None])
    assert error(conv, 3, restarts=2) < 0.01


def test_errors_without_a_finite_reference() -> None:
    layer, zero, x = from_conv(nn.Conv1d(2, 3, 3)), from_conv(nn.Conv1d(2, 3, 3)), torch.ones(1, 2, 5)
    zero.get_parameter("weight").data.zero_()
    assert low_rank_error(zero, layer, x) == math.inf
    assert low_rank_error(zero, zero, x) == 0
    assert math.isnan(low_rank_error(layer, layer, x.fill_(math.nan)))


def test_weights_that_overflow_are_not_chosen() -> None:
    taps = torch.arange(-4.0, 5)
    conv = nn.Conv1d(1, 1, 9, padding=4, bias=False)
    conv.weight.data.copy_(taps * torch.exp(-0.05 * taps.square()) * 1e4)
    weight = place_heads(conv.half(), 2, restarts=4).weight
    assert weight is not None
    assert bool(weight.isfinite().all())
