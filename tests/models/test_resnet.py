"""The residual network: its size, its shapes, and that its shortcuts are where they should be."""

import pytest
import torch

from attnconv.models.classifiers import BasicBlock, ResNet
from attnconv.models.presets import PRESETS
from attnconv.models.settings import ResNetSettings
from tests.tolerances import tolerance

TINY = ResNetSettings(widths=(4, 8), blocks=(2, 1), image_size=8, classes=5)


def test_resnet18_has_the_known_number_of_parameters() -> None:
    settings = PRESETS["resnet18"]
    assert isinstance(settings, ResNetSettings)
    with torch.device("meta"):
        model = ResNet(settings)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_173_962


def test_stages_after_the_first_halve_the_image() -> None:
    model = ResNet(ResNetSettings(widths=(4, 8, 16), blocks=(1, 1, 1)))
    sizes = []
    for block in model.stages:
        block.register_forward_hook(lambda _module, _inputs, output: sizes.append(tuple(output.shape[1:])))
    model(torch.zeros(2, 3, 32, 20))
    assert sizes == [(4, 32, 20), (8, 16, 10), (16, 8, 5)]


@pytest.mark.parametrize("size", [(8, 8), (1, 1), (5, 9)])
def test_images_of_any_size(size: tuple[int, int]) -> None:
    assert ResNet(TINY).eval()(torch.randn(2, 3, *size)).shape == (2, 5)


def test_a_block_without_branch_is_its_shortcut() -> None:
    x = torch.rand(2, 4, 6, 6)
    same, other = BasicBlock(4, 4).eval(), BasicBlock(4, 8, stride=2).eval()
    for block in (same, other):
        torch.nn.init.zeros_(block.convolution2.weight)
    torch.testing.assert_close(same(x), x, rtol=0, atol=0)
    torch.testing.assert_close(other(x), torch.relu(other.shortcut(x)), **tolerance(torch.float32))
    assert other(x).shape == (2, 8, 3, 3)


def test_a_gradient_reaches_every_parameter() -> None:
    model = ResNet(TINY)
    model(torch.randn(4, 3, 8, 8)).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_wrong_settings_and_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"settings\.blocks: .*got \(1,\)"):
        ResNet(ResNetSettings(widths=(4, 8), blocks=(1,)))
    with pytest.raises(ValueError, match=r"images: .*got shape \(2, 1, 8, 8\)"):
        ResNet(TINY)(torch.zeros(2, 1, 8, 8))
