"""Counts: the oracles exactly, and the formulas against built modules."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import nn

from attnconv.encodings.registry_names import EncodingName
from attnconv.models.factory import build
from attnconv.models.flop_counter import measure_flops
from attnconv.models.operation_counts import flops_all, flops_paper, parameters
from attnconv.models.preset_tables import pruned_settings
from attnconv.models.presets import PRESETS
from attnconv.models.settings import AttentionSettings, ModelSettings, ResNetSettings

ENCODINGS: tuple[EncodingName, ...] = get_args(EncodingName)

# name -> parameters, operations in the paper's way, both exact
ORACLES: dict[str, tuple[int, int]] = {
    "quadratic": (12_086_844, 6_175_956_800),
    "quadratic-generalized": (12_087_006, 6_175_956_800),
    "pruned": (9_686_916, 4_947_156_800),
}
PARAMETER_ORACLES = {
    "resnet18": 11_173_962,
    "learned": 12_278_682,
    "learned-content": 29_484_282,
    "quadratic-16-heads": 18_806_970,
}


def settings_named(name: str) -> ModelSettings:
    return pruned_settings() if name == "pruned" else PRESETS[name]


def on_meta(settings: ModelSettings) -> nn.Module:
    with torch.device("meta"):
        return build(settings)


@pytest.mark.parametrize("name", ORACLES)
def test_oracles(name: str) -> None:
    settings = settings_named(name)
    assert (parameters(settings), flops_paper(settings)) == ORACLES[name]
    assert parameters(on_meta(settings)) == ORACLES[name][0]


@pytest.mark.parametrize("name", PARAMETER_ORACLES)
def test_oracles_of_parameters(name: str) -> None:
    assert parameters(name) == PARAMETER_ORACLES[name]
    assert parameters(on_meta(PRESETS[name])) == PARAMETER_ORACLES[name]


@pytest.mark.parametrize(
    ("name", "paper", "everything"),
    [
        ("resnet18", 1.11, 1.11),
        ("quadratic", 6.18, 9.01),
        ("quadratic-generalized", 6.18, 9.01),
        ("learned", 6.20, 9.03),
        ("learned-content", 15.02, 20.86),
        ("quadratic-16-heads", 9.62, 14.65),
    ],
)
def test_operations_in_units_of_a_thousand_million(name: str, paper: float, everything: float) -> None:
    assert (round(flops_paper(name) / 1e9, 2), round(flops_all(name) / 1e9, 2)) == (paper, everything)


@pytest.mark.parametrize("name", PRESETS)
def test_formulas_equal_what_a_module_does(name: str) -> None:
    settings = PRESETS[name]
    shape = (settings.image_channels, settings.image_size, settings.image_size)
    measured = measure_flops(on_meta(settings), shape)
    assert flops_paper(settings) == measured.paper
    # Scores of positions may be computed for each pair or for each shift, once for all images: the rest is exact.
    slack = 0 if name.startswith(("quadratic-small", "quadratic-16", "quadratic-digits", "resnet")) else 0.02
    assert flops_all(settings) == pytest.approx(measured.everything, rel=slack, abs=0)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("head_channels", [None, 5])
def test_formulas_for_every_encoding_on_images_that_are_not_square(
    encoding: EncodingName, head_channels: int | None
) -> None:
    settings = AttentionSettings(
        encoding=encoding, layers=2, heads=(3, 2), width=16, mlp_width=24, key_channels=6, max_shift=3,
        head_channels=head_channels, norm="pre",
    )  # fmt: skip
    model = build(settings)
    assert parameters(model) == parameters(settings)
    assert flops_paper(model, (3, 8, 12)) == flops_paper(settings, (3, 8, 12))
    if encoding.startswith("absolute") or encoding == "quadratic":
        assert flops_all(model, (3, 8, 12)) == flops_all(settings, (3, 8, 12))


def test_a_resnet_on_odd_images() -> None:
    settings = ResNetSettings(widths=(4, 4, 8), blocks=(1, 2, 1))
    model = build(settings)
    assert flops_paper(model, (3, 9, 7)) == flops_paper(settings, (3, 9, 7)) == flops_all(settings, (3, 9, 7))


def test_the_pruned_model_is_a_fifth_cheaper() -> None:
    assert pruned_settings().heads == (7, 5, 8, 7, 3, 9)
    assert flops_paper(pruned_settings()) == 4_947_156_800


@pytest.mark.parametrize("shape", [(1, 32, 32), (3, 31, 32), (3, 0, 32)])
def test_images_that_the_model_cannot_take_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=rf"image_shape: .*got \({shape[0]}, {shape[1]}, 32\)"):
        flops_paper("quadratic", shape)


def test_a_module_needs_the_shape_of_its_images() -> None:
    model = build(replace(ResNetSettings(), widths=(4,), blocks=(1,)))
    for count in (flops_paper, flops_all):
        with pytest.raises(ValueError, match=r"image_shape: .*got None"):
            count(model)


def test_measuring_leaves_the_module_as_it_was() -> None:
    settings = AttentionSettings(layers=1, heads=2, width=8, mlp_width=8)
    model = build(settings).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measure_flops(model, (3, 8, 8))
    assert model.training
    assert {getattr(module, "backend", "auto") for module in model.modules()} == {"auto"}
    assert not any(module._forward_hooks for module in model.modules())
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_modules_of_torch_are_counted_with_their_attention() -> None:
    layer = nn.Sequential(nn.Flatten(2), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))
    found = measure_flops(layer, (16, 4, 4))  # flattened to 16 tokens of 16 channels
    tokens, width = 16, 16
    products = 2 * tokens * tokens * width  # q.k and the weighted sum
    linear = tokens * width * (4 * width + 2 * 32)
    assert found.everything == 2 * (linear + products)


def test_grouped_convolutions() -> None:
    found = measure_flops(nn.Conv2d(4, 8, 3, groups=2, stride=2), (4, 9, 7))
    assert found.paper == found.everything == 2 * 8 * 4 * 3 * (4 // 2) * 9
