"""Modes are restored, and every function that rejects a change leaves the model as it was."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from attnconv import LearnedRelative, from_conv
from attnconv._util.module_state import all_or_nothing, evaluating
from attnconv.convert import plan_shifts
from attnconv.encodings.quadratic import start_at_neighbours
from attnconv.layers import fuse_convit
from attnconv.models.checkpoint import Checkpoint, load_weights
from attnconv.models.classifiers import build
from attnconv.models.settings import AttentionSettings
from attnconv.surgery import initialize
from experiments.small_vit import SmallViT
from tests.layers.test_gated_positional import StandIn
from tests.model_state import model_state


def test_every_module_is_put_back_in_its_own_mode() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2)))
    model[1].eval()
    before = [module.training for module in model.modules()]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before == [True, True, False, False]
    with pytest.raises(NotImplementedError), evaluating(model):
        nn.Module()(model)
    assert [module.training for module in model.modules()] == before


class TestTheHelper:
    def test_every_kind_of_change_is_undone(self) -> None:
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Dropout()))
        model[0].weight.data = torch.tensor([[torch.nan, -0.0], [1e-42, -torch.inf]])  # 1e-42 is denormal
        handle = model[0].register_forward_hook(lambda *_: None)
        before = model_state(model)

        def change() -> None:
            with torch.no_grad():
                model[0].weight.zero_()
                model[1].running_mean.add_(1)
            model.eval().requires_grad_(False)
            model[1].eps = 1.0
            model[0].bias = nn.Parameter(torch.ones(2))
            model[2] = nn.Identity()
            model.register_buffer("more", torch.ones(1), persistent=False)
            handle.remove()
            model[1].register_forward_pre_hook(lambda *_: None)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), all_or_nothing(model):
            change()
        assert model_state(model) == before
        handle.remove()
        assert not model[0]._forward_hooks  # the handle still refers to them

    def test_what_succeeds_stays(self) -> None:
        model = nn.Linear(1, 1)
        with all_or_nothing(model):
            model.weight.data.fill_(3)
        assert model.weight.item() == 3

    def test_tensors_of_inference_are_put_back(self) -> None:
        with torch.inference_mode():
            model = nn.Linear(1, 1)
        before = model_state(model)

        def change() -> None:
            model.weight.zero_()
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), all_or_nothing(model), torch.inference_mode():
            change()
        assert model_state(model) == before


def vit(**options: Any) -> SmallViT:
    return SmallViT(size=16, dim=24, num_heads=2, **options)


def start(**arguments: Any) -> Callable[[nn.Module], object]:
    return lambda model: initialize(model, **arguments)


def diverging() -> nn.Module:
    """Return a model whose last MLP overflows, after every layer has been changed."""
    model = vit()
    model.blocks[1].mlp.fc1.bias.data.fill_(1e20)
    model.blocks[1].mlp.fc2.weight.data.fill_(1e20)
    return model


def hard_layers() -> nn.Module:
    model: Any = nn.Sequential(*(from_conv(nn.Conv2d(1, 1, 3)) for _ in range(2)))
    model[1].bias.data.fill_(torch.nan)
    return model


SETTINGS = AttentionSettings(layers=2, heads=2, width=8, mlp_width=8)


def checkpoint(model: nn.Module) -> Checkpoint:
    """Return valid values for layer 0 and NaN for layer 1."""
    tensors = {name: torch.full_like(tensor, 0.5) for name, tensor in model.state_dict().items()}
    tensors["blocks.1.attention.weight"].fill_(torch.nan)
    return Checkpoint(tensors, SETTINGS)


def convit() -> nn.Module:
    model: Any = nn.Sequential(StandIn(), StandIn())
    model[1].attn_drop.p = 0.1
    return model


def warned(model: nn.Module) -> None:
    """Warnings that are raised as errors come after the change is complete."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        initialize(model, values=torch.randn(72, 72, 3, 3))


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object], str]] = {
    "no images": (vit, start(images=torch.rand(0, 3, 16, 16)), "images: .*got 0"),
    "a length too large": (vit, start(position_length=1e30), r"position_length: .*got 1e\+30"),
    "filters too large": (vit, start(values=torch.full((24, 24, 1, 1), 1e30)), "position_length: .*filters"),
    "filters of NaN": (vit, start(values=torch.full((24, 24, 1, 1), torch.nan)), "values: .*NaN"),
    "an output of infinity": (diverging, start(), "position_length: "),
    "a warning": (lambda: SmallViT(size=16, dim=72, num_heads=9), warned, "values: must have rank"),
    "no layers": (vit, start(layers=[]), r"layers: .*got \[\]"),
    "weights of NaN": (hard_layers, plan_shifts, r"bias: must be finite, got NaN .*\(in 1\)"),
    "no module": (lambda: nn.Linear(1, 1), lambda _: plan_shifts("model"), "model: .*got str"),  # type: ignore[arg-type]
    "a checkpoint of NaN": (
        lambda: build(SETTINGS),
        lambda m: load_weights(m, checkpoint(m)),
        "weight: must be finite",
    ),
    "dropout": (convit, fuse_convit, r"attn_drop: must be 0\b.*got 0\.1"),
    "no centres": (lambda: LearnedRelative(4), start_at_neighbours, "encoding: .*got LearnedRelative"),
}


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_call_leaves_the_model_as_it_was(case: str) -> None:
    make, call, message = REFUSED[case]
    model = make()
    model.register_forward_hook(lambda *_: None)
    before = model_state(model)
    with pytest.raises((ValueError, TypeError, UserWarning), match=message):
        call(model)
    assert model_state(model) == before
