"""Whole networks recast as attention and restored: outputs, weights, and everything that must not change."""

import copy
import math
import random
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from attnconv import SelfAttention2d
from attnconv.convert import compare, no_convolutions, plan_shifts, recast, restore
from attnconv.layers import SelfAttention
from attnconv.theory.conv_taps import Convolution
from tests.drawn_recasts import Drawn, laid_out, wrong
from tests.tolerances import tolerance


class Network(nn.Module):
    """Network with a frozen layer, a shared module, a tied weight, groups, strides, dilation and a transposed layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stem.weight.requires_grad_(False)
        self.norm = nn.BatchNorm2d(8)
        self.first = nn.Conv2d(8, 8, 3, 2, 1, groups=2, bias=False)
        self.second = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2, padding_mode="reflect")
        self.second.weight = self.first.weight
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.alias = self.up
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(torch.relu(self.norm(self.stem(x)))))
        y = self.alias(torch.relu(self.second(y)), output_size=(2 * y.shape[2] + 1, 2 * y.shape[3]))
        out: Tensor = self.head(y.mean((2, 3)))
        return out


@pytest.fixture
def network() -> Network:
    made = Network().double()
    made(torch.randn(4, 3, 12, 9, dtype=torch.float64))  # running statistics that differ from their defaults
    return made.eval()


@pytest.mark.parametrize("fast", [True, False])
def test_outputs_are_equal_and_come_back_bit_for_bit(network: Network, fast: bool) -> None:
    x = torch.randn(2, 3, 11, 14, dtype=torch.float64)
    expected, attention = network(x), recast(network, fast=fast)
    assert not any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in attention.modules())
    with nullcontext() if fast else no_convolutions():
        torch.testing.assert_close(attention(x), expected, **tolerance(torch.float64, scale=10))
    back = restore(attention)
    torch.testing.assert_close(back(x), expected, rtol=0, atol=0)
    for (name, ours), (other, theirs) in zip(network.state_dict().items(), back.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(ours, theirs)


def test_through_the_softmax_no_convolution_runs() -> None:
    attention, x = recast(nn.Conv2d(1, 1, 3)), torch.zeros(1, 1, 4, 4)
    forbidden = pytest.raises(RuntimeError, match=r"aten::convolution was run")
    with forbidden, no_convolutions():
        attention(x)  # planned as a shift, which is a convolution
    with no_convolutions():
        recast(nn.Conv2d(1, 1, 3), fast=False)(x)


def test_the_model_is_left_alone_and_the_copy_keeps_what_it_had(network: Network) -> None:
    before = {name: value.clone() for name, value in network.state_dict().items()}
    network.train()
    network.norm.eval()
    for twin in (recast(network), restore(recast(network))):
        made: Any = twin
        assert made.first.weight is made.second.weight
        assert made.up is made.alias
        assert made.stem.weight.requires_grad is False
        assert made.first.weight.requires_grad is True
        assert made.training
        assert made.stem.training
        assert not made.norm.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert isinstance(network.stem, nn.Conv2d)


def test_hooks_move_along(network: Network) -> None:
    seen: list[str] = []
    network.stem.register_forward_hook(lambda module, inputs, output: seen.append(type(module).__name__))
    network.stem.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    x = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    attention = recast(network)
    torch.testing.assert_close(attention(x), network(x), **tolerance(torch.float64, scale=10))
    restore(attention)(x)
    assert seen == ["SelfAttention2d", "Conv2d", "Conv2d"]


def test_a_filter_chooses_by_pattern_or_function(network: Network) -> None:
    by_name: Any = recast(network, only=["st*"])
    assert [isinstance(m, SelfAttention) for m in (by_name.stem, by_name.first, by_name.up)] == [True, False, False]
    by_kind: Any = recast(network, only=lambda name, module: isinstance(module, nn.ConvTranspose2d))
    assert [isinstance(m, SelfAttention) for m in (by_kind.stem, by_kind.up)] == [False, True]
    every_but: Any = recast(network, only=["!st*", "!up"])
    assert [isinstance(m, SelfAttention) for m in (every_but.stem, every_but.first, every_but.up)] == [
        False,
        True,
        False,
    ]
    by_alias: Any = recast(network, only=(name for name in ["alias"]))
    assert isinstance(by_alias.up, SelfAttention)
    with pytest.raises(ValueError, match=r"only: .*got 'absent', which matches none of stem, first, "):
        recast(network, only=["stem", "absent"])
    empty: tuple[Any, ...] = (lambda name, module: False, [], (), iter([]))
    for nothing in empty:
        with pytest.raises(ValueError, match=r"only: .*got none of 4 \(stem, "):
            recast(network, only=nothing)
    with pytest.raises(ValueError, match=r"only: .*got none of 4 \(stem, "):
        restore(recast(network), only=())


@pytest.mark.usefixtures("unhooked")
def test_a_filter_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match=r"only: .*got 3"):
        recast(nn.Conv1d(1, 1, 1), only=[3])  # type: ignore[list-item]


class Listed(nn.Module):
    """Network that runs its layers from a plain list, and one of them from a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Conv2d(2, 2, 3, padding=1)
        self.steps = [self.only, nn.ReLU(), self.only]
        self.seen: list[nn.Module] = []
        self.only.register_forward_hook(self.note)

    def note(self, module: nn.Module, *_: object) -> None:
        self.seen.append(module)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


def test_layers_are_replaced_wherever_the_model_holds_them() -> None:
    model, x = Listed(), torch.randn(1, 2, 5, 5)
    twin: Any = recast(model, fast=False)
    with no_convolutions():
        out = twin(x)
    assert twin.seen == [twin.only, twin.only]
    assert model.seen == []
    torch.testing.assert_close(out, model(x), **tolerance(torch.float32))
    back: Any = restore(twin)
    assert back.steps[0] is back.steps[2] is back.only
    assert torch.equal(back.only.weight, model.only.weight)


class Forgetful(nn.Sequential):
    """Module whose copies are in training mode."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Forgetful":
        twin = Forgetful(*copy.deepcopy(list(self), memo))
        memo[id(self)] = twin
        return twin


class Closed(nn.Sequential):
    """Module whose copies ignore the memo of deepcopy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Closed":
        return Closed(*copy.deepcopy(list(self)))


def test_modes_are_kept_and_copies_that_would_be_half_converted_are_refused() -> None:
    twin = recast(Forgetful(nn.Conv2d(1, 1, 1), nn.Dropout()).eval())
    assert not any(module.training for module in twin.modules())
    with pytest.raises(ValueError, match=r"model: .*got Closed"):
        recast(Closed(nn.Conv2d(1, 1, 1)))


def test_models_that_are_not_ready_are_refused_with_their_place() -> None:
    conv = nn.Conv2d(1, 1, 1)
    with pytest.raises(TypeError, match=r"1: .*got an uninitialised LazyBatchNorm2d"):
        recast(nn.Sequential(conv, nn.LazyBatchNorm2d()))
    with pytest.raises(ValueError, match=r"model: .*got a compiled OptimizedModule"):
        recast(torch.compile(conv, backend="eager"))  # type: ignore[arg-type]
    compiled = nn.Conv2d(1, 1, 1)
    compiled.compile(backend="eager")
    with pytest.raises(ValueError, match=r"0: .*got a compiled Conv2d"):
        recast(nn.Sequential(compiled))
    other = nn.Conv2d(1, 1, 1)
    other.computed = other.weight * 2
    with pytest.raises(ValueError, match=r"model: .*got a computed 1.computed"):
        recast(nn.Sequential(conv, other), only=["0"])


@pytest.mark.parametrize("alpha", [None, 3.0])
@pytest.mark.parametrize("weights", ["slices", "nearest"])
def test_the_meta_device_as_a_place_and_as_the_default(network: Network, alpha: float | None, weights: Any) -> None:
    """A meta model has the shapes of its recast with values; a default device of meta does not create meta layers."""
    network.second.weight = nn.Parameter(network.second.weight.detach().clone())  # untied, for `nearest`
    expected = recast(network, alpha=alpha, weights=weights)
    empty = recast(copy.deepcopy(network).to("meta"), alpha=alpha, weights=weights)
    x = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    with torch.device("meta"):
        made = recast(network, alpha=alpha, weights=weights)
        assert (alpha is None) == (plan_shifts(made) > 0)
        torch.testing.assert_close(made(x), expected(x), rtol=0, atol=0)
        if alpha is None:
            torch.testing.assert_close(restore(made)(x), network(x), rtol=0, atol=0)
    for (name, ours), (other, theirs) in zip(empty.state_dict().items(), expected.state_dict().items(), strict=True):
        assert (name, ours.shape, ours.dtype, ours.is_meta) == (other, theirs.shape, theirs.dtype, True)
    assert empty(x.to("meta")).shape == (1, 5)


class Keeping(nn.Module):
    """Module that keeps a reference to a method of its convolution."""

    def __init__(self, keep: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)
        self.kept = keep(self.conv)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return out


def test_methods_of_convolutions_that_a_model_keeps_are_refused() -> None:
    for keep in (lambda conv: conv.forward, lambda conv: [{"run": (partial(conv._conv_forward),)}]):
        with pytest.raises(ValueError, match=r"model: .*got Keeping, which keeps Conv2d\._?(conv_)?f"):
            recast(Keeping(keep))
    recast(Keeping(lambda conv: conv.__call__))  # calls the replaced module
    with pytest.raises(ValueError, match=r"got Keeping, which keeps SelfAttention\.forward"):
        restore(Keeping(lambda conv: None).apply(_as_attention))


def _as_attention(module: nn.Module) -> None:
    if isinstance(module, Keeping):
        setattr(module, "conv", recast(module.conv))  # noqa: B010
        module.kept = module.conv.forward


def test_convolutions_that_are_prepared_for_quantisation_are_refused() -> None:
    observed = nn.Conv2d(1, 1, 1)
    observed.activation_post_process = (
        nn.Identity()
    )  # what torch.ao.quantization.prepare adds, and a hook that calls it
    with pytest.raises(ValueError, match=r"0: .*got Conv2d with activation_post_process"):
        recast(nn.Sequential(observed))


def test_all_that_cannot_be_converted_is_named() -> None:
    class Odd(nn.Conv2d):
        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002
            return super()._conv_forward(input, weight - weight.mean(), bias)

    message = r"0: .*got Odd with a custom _conv_forward\..* cannot be converted either: 2\."
    with pytest.raises(TypeError, match=message):
        recast(nn.Sequential(Odd(1, 1, 1), nn.Conv2d(1, 1, 1), Odd(1, 1, 1)))
    patched = nn.Conv2d(1, 1, 1)
    patched.forward = lambda input: input  # type: ignore[method-assign]  # noqa: A006
    with pytest.raises(TypeError, match=r"model: .*got Conv2d with a custom forward"):
        recast(patched)
    pruned = prune.random_unstructured(nn.Conv2d(1, 2, 1), "bias", 1)
    with pytest.raises(ValueError, match=r"model: .*got Conv2d with a computed bias"):
        recast(pruned)


def test_weights_that_are_shared_across_geometries_have_no_one_nearest() -> None:
    first, second = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=2, dilation=2)
    second.weight = first.weight
    with pytest.raises(ValueError, match=r"1: weights: .*got 'nearest'"):
        recast(nn.Sequential(first, second), alpha=1.0, weights="nearest")
    recast(nn.Sequential(first, second), alpha=1.0)


def test_hard_heads_do_not_move_whatever_the_optimiser_decays() -> None:
    twin, x = recast(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1))), torch.randn(2, 2, 5, 5)
    optimiser = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(5):
        optimiser.zero_grad()
        twin(x).square().mean().backward()
        optimiser.step()
    torch.testing.assert_close(restore(twin)(x), twin(x), **tolerance(torch.float32))
    soft: Any = recast(nn.Sequential(nn.Conv2d(2, 2, 3)), alpha=3.0)
    assert all(parameter.requires_grad for parameter in soft.parameters())


def test_weights_load_and_save_like_any_others(network: Network) -> None:
    x = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    attention, other = recast(network), recast(Network().double().eval())
    other.load_state_dict(attention.state_dict())
    torch.testing.assert_close(other(x), attention(x), **tolerance(torch.float64, scale=10))


def test_a_convolution_alone_is_a_network() -> None:
    layer = recast(nn.Conv2d(2, 3, 3))
    assert isinstance(layer, SelfAttention2d)
    assert isinstance(restore(layer), nn.Conv2d)


def test_what_cannot_be_recast_is_refused_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"model: .*got Linear"):
        recast(nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"1\.0: .*got an uninitialised LazyConv2d"):
        recast(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Sequential(nn.LazyConv2d(1, 1))))
    tied = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 3, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"1: .*got a weight shared with '0'"):
        recast(tied)
    with pytest.raises(ValueError, match=r"1: .*got a weight shared with '0'"):
        recast(nn.Sequential(tied[0], tied[1]), only=["0"])
    with pytest.raises(ValueError, match=r"0: conv: .*dtype"):
        recast(nn.Sequential(nn.Conv1d(1, 1, 2, dilation=301, dtype=torch.bfloat16)))
    with pytest.raises(ValueError, match=r"0: .*got soft heads"):
        restore(nn.Sequential(SelfAttention2d(1, 1, 1)))
    with pytest.raises(ValueError, match=r"model: .*got Conv2d"):
        restore(nn.Conv2d(1, 1, 1))


@pytest.mark.usefixtures("unhooked")
def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model: .*got str"):
        recast("resnet18")  # type: ignore[arg-type]


def test_messages_about_an_image_name_the_layer() -> None:
    attention = recast(nn.Sequential(nn.Conv2d(3, 3, 5)))
    with pytest.raises(ValueError, match=r"^0: .*got window \(5, 5\)"):
        attention(torch.zeros(1, 3, 4, 4))
    with pytest.raises(ValueError, match=r"input: .*got .* \(at 0\)"):
        attention(torch.zeros(1, 2, 9, 9))


def test_comparison_measures_each_layer_on_the_networks_own_images(network: Network) -> None:
    x = torch.randn(2, 3, 11, 14, dtype=torch.float64)
    network.train()
    hard = compare(network, recast(network, fast=False), x)
    assert [layer.name for layer in hard.layers] == ["stem", "first", "second", "up"]
    assert [layer.heads for layer in hard.layers] == [9, 9, 9, 4]
    assert network.training
    for layer in hard.layers:
        assert layer.bound is not None
        assert layer.error <= layer.bound < 1e-11
        assert layer.attention_flops > layer.flops
    assert hard.error < 1e-12 < hard.scale
    fast = compare(network, recast(network), x)
    assert all(layer.flops == layer.attention_flops for layer in fast.layers)
    soft = compare(network, recast(network, alpha=2.0), x)
    for layer in soft.layers:
        assert layer.bound is not None
        assert layer.alpha == pytest.approx(2.0)
        assert 1e-3 < layer.error <= layer.bound
    with pytest.raises(ValueError, match=r"recast: .*got none"):
        compare(network, network, x)


def test_comparison_takes_one_image_and_inputs_by_name() -> None:
    class ByName(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[0](input=x)

    model, images = ByName(nn.Conv2d(3, 4, 3)), torch.randn(1, 3, 9, 8)
    batch, single = (compare(model, recast(model, alpha=3.0), x).layers[0] for x in (images, images[0]))
    assert batch.bound is not None
    assert batch.bound == single.bound
    assert batch.error == pytest.approx(single.error, rel=1e-3)


def test_comparison_reports_nan_of_a_later_output_and_call() -> None:
    class Twice(nn.Sequential):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self[0](x), self[0](2 * x)

    model = Twice(nn.Conv2d(1, 1, 3))
    made: Any = recast(model, alpha=3.0)
    attention = made[0].forward
    made[0].forward = lambda x: attention(x) * torch.where(x.amax() > 1.5, torch.nan, 1.0)
    found = compare(model, made, torch.rand(1, 1, 5, 5).clamp_min(0.9))
    assert math.isnan(found.error)
    assert math.isnan(found.layers[0].error)


@pytest.mark.parametrize(
    ("conv", "sizes"),
    [
        (nn.Conv1d(32, 2, 3, stride=3, padding=1), (2,)),
        (nn.Conv2d(4, 4, (1, 3), stride=(1, 3), padding=(0, 2), groups=4), (4, 2)),
        (nn.Conv2d(32, 2, 3, stride=(2, 3), padding=(0, 2)), (11, 2)),
        (nn.Conv3d(4, 4, (3, 3, 1), padding="same", groups=4), (2, 2, 3)),
    ],
    ids=str,
)
def test_gradients_of_bf16_images_no_larger_than_the_kernel(conv: Convolution, sizes: tuple[int, ...]) -> None:
    """PyTorch computes gradients of these convolutions incorrectly on some CPUs."""
    source, conv = random.Random(0), conv.to(torch.bfloat16)
    for layout in ("row-major", "channels-last"):
        x = laid_out(torch.randn(3, conv.in_channels, *sizes).to(torch.bfloat16), layout, source)
        for _ in range(5):
            assert wrong(Drawn(conv, x, layout, "row-major", fast=True), source) is None


def test_hooks_and_models_that_change_their_input_are_compared() -> None:
    conv = nn.Conv2d(2, 3, 3)
    network = nn.Sequential(nn.ReLU(inplace=True), conv)
    made, x = recast(network), torch.randn(1, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    conv.register_forward_hook(lambda module, given, out: out + 1)
    before = x.clone()
    found = compare(network, made, x)
    assert torch.equal(x, before)
    assert found.layers[0].error < 1e-6
    assert found.error == pytest.approx(1)


def test_a_dtype_that_rounds_shifts_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"long: must keep its shifts .* got different shifts in torch\.bfloat16"):
        recast(nn.Sequential(OrderedDict(long=nn.Conv1d(1, 1, 601)))).bfloat16()(torch.zeros(1, 1, 700).bfloat16())


@pytest.mark.parametrize("channels", [3, 6])
def test_gradients_of_strided_convolutions_with_one_tap_and_few_channels(channels: int) -> None:
    """PyTorch's convolution corrupts memory here on CPUs with AVX2 only, if the channels come last."""
    conv, x = nn.Conv2d(channels, 8, 1, stride=2), torch.randn(20, channels, 8, 8)
    made = recast(conv)
    for _ in range(20):
        (found,) = torch.autograd.grad(made(x).square().sum(), [made.get_parameter("weight")])
    (wanted,) = torch.autograd.grad(conv(x).square().sum(), [conv.weight])
    torch.testing.assert_close(found[0].mT[..., None, None], wanted, rtol=1e-4, atol=1e-3)
