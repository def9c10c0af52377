"""Fine-tuning of a recast CNN: accuracy before and after for several alpha, and how far the heads move.

A pretrained ResNet-20 for CIFAR-10 is recast with soft heads of sharpness alpha and fine-tuned on a subset of the
training images. The CNN is fine-tuned in the same way. Alpha is chosen on held-out training images, not on the test
set.

    python -m experiments.finetune_recast --checkpoint resnet20-cifar10.th --root PATH/TO/CIFAR --out results/NAME
"""

import copy
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import tyro
from torch import nn

from attnconv.convert import recast
from attnconv.data.settings import AugmentSettings
from attnconv.layers import SelfAttention
from experiments.common import Images, accuracy, autocast, cifar10_images, percentage, write_results
from experiments.resnet20 import pretrained


@dataclass(frozen=True)
class Settings:
    """Arguments of the script."""

    checkpoint: Path
    """Checkpoint of the pretrained network, a torch file of tensors."""
    root: Path
    """Folder of CIFAR-10."""
    out: Path | None = None
    """Output folder for the table; None only prints it."""
    alphas: tuple[float, ...] = (2.0, 3.0, 4.0, 6.0)
    """Sharpness of the soft heads, in 1 / position^2."""
    weights: Literal["slices", "nearest"] = "nearest"
    """Matrices of the soft heads: slices of the kernels, or those that approximate the convolutions best."""
    images: int = 3_000
    """Number of training images."""
    held_out: int = 2_000
    """Number of additional training images, on which alpha is chosen."""
    test_images: int = 10_000
    """Number of test images."""
    epochs: int = 2
    """Number of epochs."""
    batch_size: int = 125
    """Batch size."""
    rate: float = 0.01
    """Learning rate of weights (SGD with momentum 0.9, cosine decay to zero)."""
    position_rate: float = 0.2
    """Learning rate of centres and spreads, with momentum and without weight decay."""
    weight_decay: float = 1e-4
    """Weight decay of weights; centres and spreads have none."""
    augment: AugmentSettings = field(default_factory=lambda: AugmentSettings("paper"))
    """Augmentation. Use that of the network's original training, since a different one would reduce its
    accuracy."""
    seed: int = 0
    """Seed of the order of images and of their augmentation."""


@dataclass(frozen=True)
class Result:
    """Result of one network; accuracies are between 0 and 1."""

    network: str
    held_out_before: float
    held_out_after: float
    test_before: float
    test_after: float
    moved: int
    heads: int
    farthest: float
    seconds: float


def main(settings: Settings) -> list[Result]:
    """Fine-tune the CNN and its recast copies; print and write the table."""
    torch.set_flush_denormal(True)
    parts = {"train": slice(settings.images), "held out": slice(settings.images, settings.images + settings.held_out)}
    sets = cifar10_images(settings.root, parts, settings.test_images)
    cnn = pretrained(settings.checkpoint)
    results = [run("CNN", copy.deepcopy(cnn), sets, settings)]
    results += [
        run(f"alpha {alpha:g}", recast(cnn, alpha=alpha, weights=settings.weights), sets, settings)
        for alpha in settings.alphas
    ]
    if settings.out is not None:
        found = {"results": [asdict(result) for result in results]}
        write_results(settings.out, "finetune_recast", settings, table(results), found)
    print(table(results))
    return results


def run(name: str, model: nn.Module, sets: Mapping[str, Images], settings: Settings) -> Result:
    """Fine-tune a network, and measure it before and after."""
    measured = {part: sets[part].normalised() for part in ("held out", "test")}
    before = {part: accuracy(model, *images) for part, images in measured.items()}
    centres = [layer.encoding.get_parameter("centres").detach().clone() for layer in attention(model)]
    start = time.perf_counter()
    train(model, sets["train"], settings)
    seconds = time.perf_counter() - start
    after = {part: accuracy(model, *images) for part, images in measured.items()}
    now = [layer.encoding.get_parameter("centres").detach() for layer in attention(model)]
    moves = [(a - b).norm(dim=1) for a, b in zip(now, centres, strict=True)]
    moved = torch.cat(moves) if moves else torch.zeros(0)
    result = Result(
        network=name,
        held_out_before=before["held out"],
        held_out_after=after["held out"],
        test_before=before["test"],
        test_after=after["test"],
        moved=int((moved >= 0.1).sum()),
        heads=moved.numel(),
        farthest=float(moved.max()) if moves else 0.0,
        seconds=seconds,
    )
    print(result, flush=True)
    return result


def train(model: nn.Module, images: Images, settings: Settings) -> None:
    """Train with SGD and cosine decay."""
    generator, device = torch.Generator().manual_seed(settings.seed), images.pixels.images.device
    positions = {id(p) for layer in attention(model) for p in layer.encoding.parameters()}
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in model.parameters() if id(p) not in positions],
            "lr": settings.rate,
            "weight_decay": settings.weight_decay,
        },
        {"params": [p for p in model.parameters() if id(p) in positions], "lr": settings.position_rate},
    ]
    optimiser = torch.optim.SGD([group for group in groups if group["params"]], momentum=0.9)
    steps = settings.epochs * (len(images) // settings.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    model.train()
    for epoch in range(settings.epochs):
        order = torch.randperm(len(images), generator=generator)
        for chosen in order[: len(images) // settings.batch_size * settings.batch_size].split(settings.batch_size):
            x, labels = images.batch(chosen.to(device), settings.augment, seed=settings.seed, epoch=epoch)
            with autocast(device):
                logits = model(x)
            loss = F.cross_entropy(logits.float(), labels)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()


def attention(model: nn.Module) -> list[SelfAttention]:
    """Return the attention layers of a network."""
    return [layer for layer in model.modules() if isinstance(layer, SelfAttention)]


def table(results: list[Result]) -> str:
    """Return the table in Markdown."""
    lines = [
        "| network | held-out accuracy before | after | test accuracy before | after "
        "| heads moved by 0.1 positions or more | largest move, positions | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        numbers = (r.held_out_before, r.held_out_after, r.test_before, r.test_after)
        moved = f"{r.moved} of {r.heads} | {r.farthest:.2f}" if r.heads else "- | -"
        lines.append(f"| {r.network} | {' | '.join(map(percentage, numbers))} | {moved} | {r.seconds:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(tyro.cli(Settings))
