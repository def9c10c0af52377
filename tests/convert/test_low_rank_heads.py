"""Factored heads: exact where the rank allows, best in weights or in outputs where it does not."""

import pytest
import torch
from torch import Tensor, nn

from attnconv import SelfAttention2d
from attnconv.convert import from_conv, head_ranks, low_rank, low_rank_error, low_rank_heads
from attnconv.convert.low_rank_heads import _Regression


def correlated(batch: int, channels: int) -> Tensor:
    """Images whose channels and pixels say much about each other."""
    mixing = torch.randn(channels, channels, dtype=torch.float64) * torch.logspace(0, -2, channels, dtype=torch.float64)
    noise = torch.randn(batch, channels, 9, 10, dtype=torch.float64)
    return nn.functional.avg_pool2d(torch.einsum("bchw,ce->behw", noise, mixing), 3, 1, 1)


@pytest.fixture
def layer() -> SelfAttention2d:
    made = from_conv(nn.Conv2d(6, 8, 3, padding=1, dtype=torch.float64))
    assert isinstance(made, SelfAttention2d)
    return made


@pytest.mark.parametrize("width", [6, 8, 11])
def test_heads_as_wide_as_the_rank_are_exact(layer: SelfAttention2d, width: int) -> None:
    assert head_ranks(layer) == [6] * 9
    x = correlated(2, 6)
    for made in (low_rank(layer, width), low_rank(layer, width, images=x)):
        assert made.value_weight is not None
        assert made.value_weight.shape == (9, 6, width)
        assert low_rank_error(layer, made, x) < 1e-12


@pytest.mark.parametrize("width", [1, 2, 4])
def test_several_narrow_heads_per_shift_are_exact(layer: SelfAttention2d, width: int) -> None:
    with torch.no_grad():
        assert layer.weight is not None
        layer.weight[3, :, 1:] = 0  # a head of rank 1 among those of rank 6
        layer.weight[4] = 0  # and one of rank 0
    made = low_rank(layer, width, exact=True)
    assert made.heads == 7 * -(-6 // width) + 2
    assert low_rank_error(layer, made, correlated(2, 6)) < 1e-12
    assert made.plan((9, 10)) == "shift"
    assert low_rank_error(layer, made, correlated(2, 6)) < 1e-12


@pytest.mark.parametrize("width", [1, 2, 4])
def test_images_decide_what_is_kept(layer: SelfAttention2d, width: int) -> None:
    x, other = correlated(6, 6).chunk(2)
    plain, whitened = low_rank(layer, width), low_rank(layer, width, images=x)
    assert low_rank_error(layer, whitened, x) < 0.7 * low_rank_error(layer, plain, x)
    assert low_rank_error(layer, whitened, other) < low_rank_error(layer, plain, other)


def test_truncation_is_best_in_the_weights(layer: SelfAttention2d) -> None:
    made = low_rank(layer, 2)
    assert layer.weight is not None
    assert made.value_weight is not None
    assert made.output_weight is not None
    lost = (layer.weight - made.value_weight @ made.output_weight).square().sum((1, 2))
    torch.testing.assert_close(lost, torch.linalg.svdvals(layer.weight)[:, 2:].square().sum(1))


def test_turns_never_raise_the_error_and_no_neighbour_is_better(layer: SelfAttention2d) -> None:
    x = correlated(4, 6)
    with torch.no_grad():
        regression = _Regression(layer, x)
    assert layer.weight is not None
    weight = layer.weight.detach()
    alone = torch.stack([regression._truncated(h, weight[h], 2) for h in range(9)])
    together = regression.fit(weight, 2)
    assert regression._error(weight - together) < regression._error(weight - alone)
    made = low_rank(layer, 2, images=x)
    best = low_rank_error(layer, made, x)
    for _ in range(5):
        with torch.no_grad():
            for parameter in (made.get_parameter("value_weight"), made.get_parameter("output_weight")):
                parameter.add_(0.03 * torch.randn_like(parameter))
        assert low_rank_error(layer, made, x) > best


def fitted(layer: SelfAttention2d, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[float, int]:
    """The error of heads of width 2, and how often each was updated."""
    with torch.no_grad():
        regression = _Regression(layer, x)
    calls, truncated = [], regression._truncated

    def counted(head: int, matrix: Tensor, rank: int) -> Tensor:
        calls.append(head)
        return truncated(head, matrix, rank)

    monkeypatch.setattr(regression, "_truncated", counted)
    weight = layer.get_parameter("weight").detach()
    error = regression._error(weight - regression.fit(weight, 2))
    return error, calls.count(0) - 1  # the first is the start


def test_heads_are_updated_until_little_is_left_to_gain(
    layer: SelfAttention2d, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = correlated(4, 6)
    error, updates = fitted(layer, x, monkeypatch)
    monkeypatch.setattr(low_rank_heads, "_ROUNDS", 500)
    monkeypatch.setattr(low_rank_heads, "_GAIN", 0.0)
    least, many = fitted(layer, x, monkeypatch)
    assert error < 1.03 * least
    assert updates < many / 2


def test_heads_that_have_nothing_to_do_with_each_other_are_soon_done(
    layer: SelfAttention2d, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, updates = fitted(layer, torch.randn(64, 6, 16, 16, dtype=torch.float64), monkeypatch)
    assert updates <= 3


def test_blunt_heads_that_gain_little_for_long_are_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = from_conv(nn.Conv2d(6, 8, 3, padding=1, dtype=torch.float64), alpha=0.2)
    assert isinstance(layer, SelfAttention2d)
    _, updates = fitted(layer, correlated(4, 6), monkeypatch)
    assert updates < 100


def test_everything_else_is_kept() -> None:
    conv = nn.ConvTranspose2d(4, 3, 3, stride=2, output_padding=1)
    layer = from_conv(conv).eval()
    layer.requires_grad_(False)
    made = low_rank(layer, 3)
    x = torch.randn(1, 4, 5, 6)
    torch.testing.assert_close(made(x), conv(x), rtol=1e-4, atol=1e-5)
    assert not made.training
    assert not any(parameter.requires_grad for parameter in made.parameters())


def test_images_of_zeros_are_no_trouble(layer: SelfAttention2d) -> None:
    x = torch.zeros(1, 6, 5, 5, dtype=torch.float64)
    made = low_rank(layer, 2, images=x)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in made.parameters())
    assert low_rank_error(layer, made, x) == 0


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
    with pytest.raises(ValueError, match=r"layer: .*got factored ones"):
        low_rank(low_rank(layer, 2), 2)
    with pytest.raises(ValueError, match=r"layer: .*got 2"):
        low_rank(SelfAttention2d(4, 4, 2, groups=2), 2)
    with pytest.raises(ValueError, match=r"head_channels: .*got 0"):
        low_rank(layer, 0)
    with pytest.raises(ValueError, match=r"images: .*got \(1, 4, 3, 3\)"):
        low_rank(layer, 2, images=torch.zeros(1, 4, 3, 3), exact=True)
