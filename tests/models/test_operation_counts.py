"""Operation counts: the numbers of the paper, and formulas compared with torch's counts for actual models."""

import math
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attnconv.encodings import LearnedRelative
from attnconv.encodings.registry import EncodingName
from attnconv.layers import SelfAttention
from attnconv.models.classifiers import build
from attnconv.models.operation_counts import flops_all, flops_paper, parameters
from attnconv.models.presets import PRESETS
from attnconv.models.settings import AttentionSettings, ModelSettings, ResNetSettings
from attnconv.paper.tables import PRUNED

ENCODINGS: tuple[EncodingName, ...] = get_args(EncodingName)

# name -> exact parameters, and exact FLOPs as counted in the paper
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
    return PRUNED if name == "pruned" else PRESETS[name]


def on_meta(settings: ModelSettings) -> nn.Module:
    with torch.device("meta"):
        return build(settings)


def size_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def measured(settings: ModelSettings) -> tuple[int, int]:
    """Return the FLOPs of a model as counted in the paper and in total, with dense attention."""
    model, linear = on_meta(settings).eval(), 0

    def watch(module: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        nonlocal linear
        if isinstance(module, nn.Linear):
            linear += output.numel() * module.in_features
        elif isinstance(module, nn.Conv2d):
            linear += output.numel() * module.in_channels * math.prod(module.kernel_size)
        elif isinstance(module, SelfAttention):
            sides = output.shape[2:]
            weights = [module.weight, module.value_weight, module.output_weight]
            linear += math.prod(sides) * sum(weight.numel() for weight in weights if weight is not None)
            if isinstance(
                module.encoding, LearnedRelative
            ):  # its linear maps apply to all pairs of rows and of columns
                linear += sum(side**2 for side in sides) * module.encoding.tables[0].shape[1] * module.heads

    for module in model.modules():
        module.register_forward_hook(watch)
        if isinstance(module, SelfAttention) and not module.encoding.reads_content:
            module.backend = "reference"
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.empty(1, settings.image_channels, settings.image_size, settings.image_size, device="meta"))
    return 2 * linear, counter.get_total_flops()


@pytest.mark.parametrize("name", ORACLES)
def test_oracles(name: str) -> None:
    settings = settings_named(name)
    assert (parameters(settings), flops_paper(settings)) == ORACLES[name]
    assert size_of(on_meta(settings)) == ORACLES[name][0]


@pytest.mark.parametrize("name", PARAMETER_ORACLES)
def test_oracles_of_parameters(name: str) -> None:
    assert parameters(name) == PARAMETER_ORACLES[name]
    assert size_of(on_meta(PRESETS[name])) == PARAMETER_ORACLES[name]


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
    paper, everything = measured(settings)
    assert flops_paper(settings) == paper
    # Position scores may be computed per pair or per shift, once for all images; all other counts are exact.
    slack = (
        0
        if name.startswith(("quadratic-small", "quadratic-fast", "quadratic-16", "quadratic-digits", "resnet"))
        else 0.02
    )
    assert flops_all(settings) == pytest.approx(everything, rel=slack, abs=0)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("head_channels", [None, 5])
def test_formulas_for_every_encoding(encoding: EncodingName, head_channels: int | None) -> None:
    settings = AttentionSettings(
        encoding=encoding, layers=2, heads=(3, 2), width=16, mlp_width=24, key_channels=6, max_shift=3,
        head_channels=head_channels, norm="pre", image_size=12,
    )  # fmt: skip
    paper, everything = measured(settings)
    assert size_of(build(settings)) == parameters(settings)
    assert flops_paper(settings) == paper
    if encoding.startswith("absolute") or encoding == "quadratic":
        assert flops_all(settings) == everything


@pytest.mark.parametrize("encoding", ["learned-content", "sinusoidal"])
def test_formulas_for_channels_that_the_encoding_rounds_up(encoding: EncodingName) -> None:
    settings = AttentionSettings(encoding=encoding, layers=1, heads=2, width=7, mlp_width=8, image_size=12)
    assert size_of(build(settings)) == parameters(settings)
    assert flops_paper(settings) == measured(settings)[0]


def test_a_resnet_on_odd_images() -> None:
    settings = ResNetSettings(widths=(4, 4, 8), blocks=(1, 2, 1), image_size=9)
    assert measured(settings) == (flops_paper(settings), flops_all(settings))


def test_the_pruned_model_is_a_fifth_cheaper() -> None:
    assert flops_paper(PRUNED) == 4_947_156_800
