"""What does a convolution cost as hard attention heads?

Every distinct convolution of ResNet-18, made a layer by `from_conv` and planned for its image's size, against itself;
forward, and forward with backward. The first convolution gets no gradient of its input, as in the network.

    attnconv bench hard-heads
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnconv.convert import from_conv
from attnconv.layers import SelfAttention2d
from benchmarks.measure import Ratio, Timed, interleaved
from benchmarks.results import Answer, Row
from benchmarks.settings import HardHeadsSettings

PASSES = ("forward", "forward + backward")


@dataclass(frozen=True)
class Convolution:
    """One of the network's, and how often it stands there."""

    inputs: int
    outputs: int
    kernel: int
    stride: int
    reduction: int  # of the network's image where the convolution reads it
    times: int


RESNET18 = (
    Convolution(3, 64, 7, 2, 1, 1),
    Convolution(64, 64, 3, 1, 4, 4),
    Convolution(64, 128, 3, 2, 4, 1),
    Convolution(64, 128, 1, 2, 4, 1),
    Convolution(128, 128, 3, 1, 8, 3),
    Convolution(128, 256, 3, 2, 8, 1),
    Convolution(128, 256, 1, 2, 8, 1),
    Convolution(256, 256, 3, 1, 16, 3),
    Convolution(256, 512, 3, 2, 16, 1),
    Convolution(256, 512, 1, 2, 16, 1),
    Convolution(512, 512, 3, 1, 32, 3),
)


def answer(settings: HardHeadsSettings) -> Answer:
    """Times of all convolutions, and of all of the network's together."""
    rows: list[Row] = []
    totals = {(name, who): 0.0 for name in PASSES for who in ("convolution", "attention")}
    for entry in RESNET18:
        for name, times, difference in _measured(entry, settings):
            rows += _rows(entry, settings.side // entry.reduction, name, times, difference)
            for who, taken in times.items():
                totals[name, who] += entry.times * taken.median
    facts = {
        f"all 20 convolutions of the network, {name}": totals[name, "attention"] / totals[name, "convolution"]
        for name in PASSES
    }
    return Answer("hard-heads", "times as long as the convolution", tuple(rows), facts)


def _rows(entry: Convolution, side: int, name: str, times: dict[str, Timed], difference: float) -> Iterator[Row]:
    kernel = f"{entry.kernel} x {entry.kernel}" + (f" by {entry.stride}" if entry.stride > 1 else "")
    case = f"{entry.inputs} to {entry.outputs}, {kernel}, {side} x {side}, {name}"
    yield Row(case, "convolution", times["convolution"], pixels=side**2)
    ratio = Ratio.of(times["attention"], times["convolution"])
    yield Row(case, "attention", times["attention"], ratio, pixels=side**2, difference=difference)


def _measured(entry: Convolution, settings: HardHeadsSettings) -> Iterator[tuple[str, dict[str, Timed], float]]:
    """The name of a pass, times by contender, and how far the outputs differ."""
    torch.manual_seed(0)
    side = settings.side // entry.reduction
    convolution = nn.Conv2d(entry.inputs, entry.outputs, entry.kernel, entry.stride, entry.kernel // 2, bias=False)
    layer = from_conv(convolution)
    assert isinstance(layer, SelfAttention2d)
    layer.plan((side, side), choose="shift")
    images = torch.randn(settings.batch, entry.inputs, side, side)
    with torch.no_grad():
        exact: Tensor = convolution(images)
        difference = float((layer(images) - exact).abs().max() / exact.abs().max())
    modules: dict[str, nn.Module] = {"convolution": convolution, "attention": layer}
    for name, make in zip(PASSES, (_forward, _both), strict=True):
        times = interleaved({who: make(module, images) for who, module in modules.items()}, settings.repeats)
        yield name, times, difference


def _forward(module: nn.Module, images: Tensor) -> Callable[[], None]:
    def step() -> None:
        with torch.no_grad():
            module(images)

    return step


def _both(module: nn.Module, images: Tensor) -> Callable[[], None]:
    own = images.detach().requires_grad_(images.shape[1] != RESNET18[0].inputs)

    def step() -> None:
        module.zero_grad()
        own.grad = None
        module(own).sum().backward()

    return step
