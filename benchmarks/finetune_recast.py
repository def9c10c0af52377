"""Does a recast CNN train on as attention? Accuracy before and after for several alpha, and how far heads move.

A pretrained ResNet-20 for CIFAR-10 is recast with soft heads of sharpness alpha and trained on a part of the training
images; the CNN itself is trained in the same way. Alpha is chosen by held-out training images, never by the test set.

    python -m benchmarks.finetune_recast --checkpoint resnet20-cifar10.th --root PATH/TO/CIFAR --out results/NAME
"""

import copy
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from attnconv.layers import SelfAttention
from attnconv.theorem import recast
from benchmarks.common import accuracy, augmented, autocast, cifar10, write_results
from tests.resnet20 import pretrained


@dataclass(frozen=True)
class Settings:
    """Arguments of the script."""

    checkpoint: Path
    """The pretrained network, a torch file of tensors."""
    root: Path
    """Folder of CIFAR-10."""
    out: Path | None = None
    """Folder for the table; None prints it only."""
    alphas: tuple[float, ...] = (2.0, 3.0, 4.0, 6.0)
    """Sharpness of the soft heads, in 1 / pixel^2."""
    weights: Literal["slices", "nearest"] = "nearest"
    """Of the soft heads: the kernels' slices, or those with which they come nearest to the kernels."""
    images: int = 3_000
    """Training images."""
    held_out: int = 2_000
    """Further training images, by which alpha is chosen."""
    test_images: int = 10_000
    """Test images."""
    epochs: int = 2
    """Passes over the training images."""
    batch_size: int = 125
    """Images at once."""
    rate: float = 0.01
    """Learning rate of weights (SGD with momentum 0.9, cosine to zero)."""
    position_rate: float = 0.2
    """Learning rate of centres and spreads, with momentum and without weight decay."""
    weight_decay: float = 1e-4
    """Of weights; centres and spreads have none."""
    padding: int = 4
    """Largest shift of a training image, in pixels."""
    mirror_part: float = 0.5
    """How many of the training images are mirrored, as a part of 1."""
    seed: int = 0
    """Of the order of images and of their augmentation."""


@dataclass(frozen=True)
class Result:
    """What became of one network; accuracies are parts of 1."""

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
    """Train the CNN and its recasts, and print and write the table."""
    torch.set_flush_denormal(True)
    parts = {"train": slice(settings.images), "held out": slice(settings.images, settings.images + settings.held_out)}
    sets = cifar10(settings.root, parts, settings.test_images)
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


def run(name: str, model: nn.Module, sets: dict[str, tuple[Tensor, Tensor]], settings: Settings) -> Result:
    """Measure, train, measure."""
    before = {part: accuracy(model, *sets[part]) for part in ("held out", "test")}
    centres = [layer.encoding.get_parameter("centres").detach().clone() for layer in attention(model)]
    start = time.perf_counter()
    train(model, *sets["train"], settings)
    seconds = time.perf_counter() - start
    after = {part: accuracy(model, *sets[part]) for part in ("held out", "test")}
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


def train(model: nn.Module, images: Tensor, labels: Tensor, settings: Settings) -> None:
    """SGD with a cosine over all steps; images shifted and mirrored; bf16 in matrix products on CUDA."""
    generator = torch.Generator().manual_seed(settings.seed)
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
    for _ in range(settings.epochs):
        order = torch.randperm(len(images), generator=generator)
        for chosen in order[: len(images) // settings.batch_size * settings.batch_size].split(settings.batch_size):
            x = augmented(images[chosen], generator, padding=settings.padding, mirror_part=settings.mirror_part)
            with autocast(images.device):
                logits = model(x)
            loss = F.cross_entropy(logits.float(), labels[chosen])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()


def attention(model: nn.Module) -> list[SelfAttention]:
    """The attention layers of a network."""
    return [layer for layer in model.modules() if isinstance(layer, SelfAttention)]


def table(results: list[Result]) -> str:
    """Markdown."""
    lines = [
        "| network | held out before | after | test before | after | heads moved by 0.1 | farthest move | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        numbers = (r.held_out_before, r.held_out_after, r.test_before, r.test_after)
        moved = f"{r.moved} of {r.heads} | {r.farthest:.2f}" if r.heads else "- | -"
        lines.append(f"| {r.network} | {' | '.join(f'{n:.2%}' for n in numbers)} | {moved} | {r.seconds:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(tyro.cli(Settings))
