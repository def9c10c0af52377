"""Imitation of convolutions, compared with impulse responses, dense least squares and perturbations."""

import copy
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from attnconv import SelfAttention1d, SelfAttention2d, SelfAttention3d, from_conv
from attnconv.convert import conversion_error
from attnconv.convert.verify_conversions import draw_convolution
from attnconv.layers.self_attention import SelfAttention
from attnconv.theory.lemma3_best_weights import imitate, imitation_error
from tests.tolerances import tolerance

DOUBLE = torch.float64


def soft(inputs: int = 2, outputs: int = 3, heads: int = 6, **options: Any) -> SelfAttention2d:
    return SelfAttention2d(inputs, outputs, heads, dtype=DOUBLE, **options)


def response(module: nn.Module, channels: int, sizes: tuple[int, ...]) -> Tensor:
    """Return the impulse responses of a position-only module without its bias, (impulse, d, *queries)."""
    with torch.no_grad():
        count = channels * torch.Size(sizes).numel()
        impulses = torch.eye(count, dtype=DOUBLE).reshape(count, channels, *sizes)
        return module(impulses) - module(torch.zeros_like(impulses[:1]))


def apart(layer: SelfAttention, conv: nn.Module, sizes: tuple[int, ...], crop: int = 0) -> float:
    difference = response(layer, layer.in_channels, sizes) - response(conv, layer.in_channels, sizes)
    for dim in range(-len(sizes), 0):
        difference = difference.narrow(dim, crop, difference.shape[dim] - 2 * crop)
    return float(difference.square().sum())


@settings(max_examples=40)
@given(st.integers(0, 10**9))
def test_hard_heads_take_over_any_convolution(seed: int) -> None:
    conv, x = draw_convolution(random.Random(seed), DOUBLE)
    layer = from_conv(conv)
    with torch.no_grad():
        for parameter in (layer.weight, layer.bias):
            if parameter is not None:
                parameter.normal_()
    torch.testing.assert_close(imitate(layer, conv, sizes=x.shape[2:])(x), conv(x), **tolerance(DOUBLE, scale=10))


@pytest.mark.parametrize("where", ["all", "inside"])
@pytest.mark.parametrize(
    ("layer", "conv", "sizes"),
    [
        (SelfAttention1d(2, 2, 5, border="reflect", padding=1), nn.Conv1d(2, 2, 3, padding=1), (9,)),
        (soft(), nn.Conv2d(2, 3, 3, padding=1), (5, 6)),
        (soft(border="zero", padding=2), nn.Conv2d(2, 3, (2, 4), padding="same", padding_mode="circular"), (5, 6)),
        (soft(stride=2), nn.Conv2d(2, 3, 3, stride=2, padding=1, padding_mode="replicate"), (6, 5)),
        (soft(window=(3, 3)), nn.Conv2d(2, 3, 3, padding="valid"), (5, 5)),
        (soft(encoding="quadratic-generalized"), nn.Conv2d(2, 3, 3, padding=2, dilation=2), (6, 6)),
        (soft(4, 6, groups=2), nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 5)),
        (SelfAttention3d(1, 2, 4), nn.Conv3d(1, 2, (1, 3, 2), padding="same"), (2, 3, 3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_other_weights_come_nearer(layer: Any, conv: Any, sizes: tuple[int, ...], where: Any) -> None:
    """Compare with PyTorch's least squares on the dense stacked problem, and with random steps from the solution."""
    layer, conv = layer.double(), conv.double()
    made = imitate(layer, conv, sizes=sizes, where=where)
    queries = list(layer.grid(sizes).query_sizes)
    chosen = torch.ones(queries, dtype=torch.bool)
    if where == "inside":  # queries whose taps read no padding
        ones = torch.ones(1, 1, *sizes, dtype=DOUBLE)
        counting = type(conv)(1, 1, conv.kernel_size, conv.stride, conv.padding, conv.dilation, bias=False).double()
        nn.init.ones_(counting.weight)
        chosen = (counting(ones) == counting.weight.numel())[0, 0]
    rows = layer.operator(torch.zeros(1, layer.in_channels, *sizes, dtype=DOUBLE)).to_dense().detach()[0]
    left = rows[:, chosen.flatten()].permute(1, 2, 0).flatten(0, 1)  # (chosen queries x keys, h)
    wanted = response(conv, layer.in_channels, sizes)[:, :, chosen].unflatten(
        0, (layer.in_channels, -1)
    )  # (c, m, d, n)
    right = wanted.permute(3, 1, 0, 2).flatten(0, 1).flatten(1)  # (chosen queries x keys, c d)
    solution = torch.linalg.lstsq(left, right, driver="gelsd").solution
    best = float((right - left @ solution).square().sum())

    def error(candidate: SelfAttention) -> float:
        difference = response(candidate, layer.in_channels, sizes) - response(conv, layer.in_channels, sizes)
        return float(difference[:, :, chosen].square().sum())

    assert error(made) == pytest.approx(best, rel=1e-9)
    if layer.groups == 1:
        expected = solution.unflatten(1, (layer.in_channels, layer.out_channels))
        torch.testing.assert_close(made.weight, nn.Parameter(expected), rtol=1e-7, atol=1e-7)
    for scale in (1e-1, 1e-3):
        moved = copy.deepcopy(made)
        with torch.no_grad():
            assert moved.weight is not None
            moved.weight.add_(torch.randn_like(moved.weight), alpha=scale)
        assert error(moved) > error(made)
    assert error(layer) > error(made)
    torch.testing.assert_close(made.bias, conv.bias)


def test_inside_and_everywhere_differ_under_another_border_rule() -> None:
    layer, conv = soft(heads=9), nn.Conv2d(2, 3, 3, padding=1, dtype=DOUBLE)
    everywhere, inside = (imitate(layer, conv, sizes=(6, 6), where=where) for where in ("all", "inside"))
    assert apart(everywhere, conv, (6, 6)) < apart(inside, conv, (6, 6))
    assert apart(inside, conv, (6, 6), crop=1) < apart(everywhere, conv, (6, 6), crop=1)


@pytest.mark.parametrize("head_channels", [None, 2])
def test_the_error_is_that_of_all_impulses(head_channels: int | None) -> None:
    layer = soft(border="zero", padding=1, head_channels=head_channels)
    conv = nn.Conv2d(2, 3, 3, padding=1, dtype=DOUBLE)
    measured = imitation_error(layer, conv, sizes=(5, 4))
    whole = response(conv, 2, (5, 4)).square()
    assert measured.everywhere == pytest.approx((apart(layer, conv, (5, 4)) / float(whole.sum())) ** 0.5)
    inner = float(whole[:, :, 1:-1, 1:-1].sum())
    assert measured.inside == pytest.approx((apart(layer, conv, (5, 4), crop=1) / inner) ** 0.5)


def test_the_error_measures_against_the_convolution_and_the_other_against_the_layer() -> None:
    layer, conv = soft(border="zero", padding=1), nn.Conv2d(2, 3, 3, padding=1, dtype=DOUBLE)
    made, sizes = imitate(layer, conv, sizes=(5, 4)), (5, 4)
    ours = imitation_error(made, conv, sizes=sizes)
    theirs = conversion_error(made, conv, torch.zeros(1, 2, *sizes, dtype=DOUBLE))
    assert theirs.inside is not None
    sides = [float(response(module, 2, sizes).norm()) for module in (conv, made)]
    assert ours.everywhere * sides[0] == pytest.approx(theirs.everywhere * sides[1])
    assert ours.everywhere < 1.0 < imitation_error(layer, conv, sizes=sizes).everywhere


def test_more_heads_come_nearer() -> None:
    """Soft heads at 5 x 5 shifts approximate a 3 x 3 kernel better than nine heads at its own positions."""
    conv = nn.Conv2d(1, 1, 3, padding=1, dtype=DOUBLE)
    errors = []
    for reach in (1, 2):
        side = 2 * reach + 1
        layer = from_conv(nn.Conv2d(1, 1, side, padding=reach, dtype=DOUBLE), alpha=1.0)
        made = imitate(layer, conv, sizes=(7, 7))
        errors.append(imitation_error(made, conv, sizes=(7, 7)).everywhere)
    assert errors[1] < errors[0] / 2


def test_content_layers_imitate_on_the_images_given() -> None:
    torch.manual_seed(1)
    layer = SelfAttention2d(4, 3, heads=6, encoding="learned-content", dtype=DOUBLE)
    conv, x = nn.Conv2d(4, 3, 3, padding=1, dtype=DOUBLE), torch.randn(3, 4, 5, 5, dtype=DOUBLE)
    made = imitate(layer, conv, x=x)
    rows = layer.operator(x).to_dense().detach()
    reference = response(conv, 4, (5, 5))
    left = rows.permute(0, 2, 3, 1).flatten(0, 2)
    target = reference.unflatten(0, (4, 25)).permute(3, 4, 1, 0, 2).flatten(0, 1).flatten(0, 1).flatten(1).repeat(3, 1)
    expected = torch.linalg.lstsq(left, target, driver="gelsd").solution.unflatten(1, (4, 3))
    torch.testing.assert_close(made.weight, nn.Parameter(expected), rtol=1e-7, atol=1e-7)
    assert imitation_error(made, conv, x=x).everywhere < imitation_error(layer, conv, x=x).everywhere
    with pytest.raises(ValueError, match=r"x: .*content.*got"):
        imitate(layer, conv, sizes=(5, 5))


@pytest.mark.parametrize("groups", [2, 4])
def test_a_layer_without_groups_takes_a_grouped_kernel(groups: int) -> None:
    conv = nn.Conv2d(4, 8, 3, padding=1, groups=groups, dtype=DOUBLE)
    full = nn.Conv2d(4, 8, 3, padding=1, dtype=DOUBLE)
    x = torch.randn(2, 4, 5, 6, dtype=DOUBLE)
    torch.testing.assert_close(imitate(from_conv(full), conv, x=x)(x), conv(x), **tolerance(DOUBLE, scale=10))


def test_a_transposed_layer_takes_another_transposed_kernel() -> None:
    options: dict[str, Any] = {"stride": 2, "dtype": DOUBLE}
    layer = from_conv(nn.ConvTranspose2d(2, 3, 4, padding=1, **options))
    conv = nn.ConvTranspose2d(2, 3, 2, padding=0, **options)
    x = torch.randn(1, 2, 4, 3, dtype=DOUBLE)
    torch.testing.assert_close(imitate(layer, conv, x=x)(x), conv(x), **tolerance(DOUBLE, scale=10))


def test_the_copy_keeps_what_is_not_asked_for() -> None:
    layer = soft().float().eval()
    assert layer.weight is not None
    layer.weight.requires_grad_(False)
    before = copy.deepcopy(layer.state_dict())
    made = imitate(layer, nn.Conv2d(2, 3, 3, padding=1, bias=False), sizes=(5, 5))
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)
    assert made.weight is not None
    assert made.bias is not None
    assert (made.weight.dtype, made.weight.requires_grad, made.training) == (torch.float32, False, False)
    assert not made.bias.any()  # the convolution has none
    torch.testing.assert_close(made.encoding.state_dict(), layer.encoding.state_dict(), rtol=0, atol=0)
    assert made.encoding is not layer.encoding


CONV = nn.Conv2d(2, 3, 3, padding=1, dtype=DOUBLE)


@pytest.mark.parametrize(
    ("layer", "conv", "options", "message"),
    [
        (
            soft(head_channels=2),
            CONV,
            {},
            r"layer: .*got factored weights\. .*head_channels",
        ),
        (soft(3), CONV, {}, r"conv: .*channels.*got \(2, 3\)"),
        (soft(bias=False), CONV, {}, r"layer: .*bias.*got None"),
        (soft(stride=2), CONV, {}, r"conv: .*stride \(2, 2\), got \(1, 1\)"),
        (
            soft(),
            CONV,
            {"sizes": (2, 2), "where": "inside"},
            r"where: .*got .inside. .*\(2, 2\)",
        ),
        (soft(), CONV, {"where": "border"}, r"where: .*got 'border'"),
        (soft(), CONV, {"sizes": None}, r"x: .*got None"),
        (
            soft(),
            nn.Conv2d(2, 3, 3, dtype=DOUBLE),
            {},
            r"conv: .*output size.*\(5, 5\), got \(3, 3\)",
        ),
        (
            soft(),
            nn.ConvTranspose2d(2, 3, 3, padding=1, dtype=DOUBLE),
            {},
            r"conv: .*got ConvTranspose2d",
        ),
        (soft(), nn.Conv1d(2, 3, 3, dtype=DOUBLE), {}, r"conv: .*got Conv1d"),
        (
            soft(4, 4, groups=2),
            nn.Conv2d(4, 4, 3, padding=1, groups=4, dtype=DOUBLE),
            {},
            r"conv: .*groups \(2\), got 4",
        ),
    ],
)
@pytest.mark.usefixtures("unhooked")
def test_what_does_not_fit_is_refused(layer: Any, conv: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        imitate(layer, conv, **{"sizes": (5, 5), **options})


@pytest.mark.usefixtures("unhooked")
def test_what_is_no_convolution_is_refused() -> None:
    with pytest.raises(TypeError, match=r"conv: .*got torch.nn.modules.linear.Linear"):
        imitate(soft(), nn.Linear(1, 1), sizes=(5, 5))  # type: ignore[arg-type]


def test_nearly_equal_heads_do_not_amplify_the_rounding_of_half_precision() -> None:
    torch.manual_seed(0)
    layer, conv = SelfAttention2d(3, 2, heads=9).requires_grad_(False), nn.Conv2d(3, 2, 3, padding=1)
    layer.encoding.get_parameter("centres").mul_(0.05)
    layer.encoding.get_parameter("spread").fill_(0.5)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made = imitate(layer.to(dtype), conv.to(dtype), sizes=(6, 6))
        assert imitation_error(made, conv, sizes=(6, 6)).everywhere <= 1  # that of weights of 0
        made = from_conv(conv, alpha=0.01, weights="nearest")
        assert imitation_error(made, conv, sizes=(12, 12)).everywhere <= 1
