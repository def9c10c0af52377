"""A training step only launches work on its device: reading a value there would stall the queue of a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnconv.data.image_set import Batch, ImageSet, Splits
from attnconv.data.settings import AugmentSettings
from attnconv.models.classifiers import build
from attnconv.paper.training_plan import RUNS, settings_at
from attnconv.training.loop import TrainingLoop, nearby, seed_generators
from attnconv.training.settings import RunSettings

CASES = [(name, AugmentSettings("paper")) for name in RUNS]
CASES.append(("quadratic", AugmentSettings("modern", mixup=0.2, cutmix=1.0)))


class Copies(TorchDispatchMode):
    """Record every tensor created from Python numbers, because the CPU waits while it is copied to the GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "lift_fresh":
            self.found.append(str(args[0]))
        return func(*args, **(kwargs or {}))


def loop_of(settings: RunSettings, device: str) -> tuple[TrainingLoop, Batch]:
    """Return a training loop and a batch for it."""
    channels, side = settings.model.image_channels, settings.model.image_size
    images = ImageSet(torch.randint(0, 256, (10, channels, side, side), dtype=torch.uint8), torch.arange(10) % 2)
    data = Splits(images, images, images, classes=("0", "1"), mean=(0.5,) * channels, std=(0.2,) * channels)
    settings = replace(settings, train=replace(settings.train, batch_size=3))
    batch = Batch(images.images[:3], images.labels[:3], torch.rand(3, 36))
    return TrainingLoop(settings, build(settings.model), data, torch.device(device)), batch.to(torch.device(device))


def take_steps(loop: TrainingLoop, batch: Batch) -> None:
    """Run a training step and an evaluation step."""
    loop.model.train()
    loop.train_step(iter([batch]))
    loop.tally([batch])


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_no_step_waits_for_its_device(name: Any, changes: AugmentSettings) -> None:
    settings = replace(settings_at("tiny", name), augment=changes)
    take_steps(*loop_of(settings, "meta"))  # meta tensors have no values to read
    loop, batch = loop_of(settings, "cpu")
    take_steps(loop, batch)  # the first step creates constants
    with Copies() as copies:
        take_steps(loop, batch)
    assert not copies.found


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(("name", "changes"), CASES)
def test_no_step_waits_for_a_gpu(name: Any, changes: AugmentSettings) -> None:
    loop, batch = loop_of(replace(settings_at("tiny", name), augment=changes), "cuda")
    take_steps(loop, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        take_steps(loop, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_seed_of_a_step_is_torchs_own() -> None:
    for seed in (0, 2**63 - 1):
        torch.manual_seed(seed)
        expected = torch.rand(3)
        seed_generators(seed, torch.device("cpu"))
        assert torch.equal(torch.rand(3), expected)


@pytest.mark.gpu
def test_a_set_of_images_lies_on_the_gpu() -> None:
    images = ImageSet(torch.zeros(10, 1, 8, 8, dtype=torch.uint8), torch.arange(10))
    assert nearby(images, torch.device("cuda")).images.is_cuda
