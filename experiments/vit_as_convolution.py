"""Convolutions in a small ViT on CIFAR-10: how many heads can be replaced, and does initialising as a convolution help?

Replacement: a model is trained, k of its heads are replaced for several k, and accuracy, output error and speed are
measured. Initialisation: models with default initialisation and with initialisation as a convolution are trained in the
same way, with several seeds.

    python -m experiments.vit_as_convolution --root PATH/TO/CIFAR --out results/NAME

Trained models are kept and not trained again. To share the work between processes, let each of them first train
different seeds, for example with `--seeds 1 --no-measure`.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from attnconv.surgery import initialize, replace_heads
from experiments.common import accuracy, cifar10, percentage, write_results
from experiments.small_vit import SmallViT

Sets = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Settings:
    """Arguments of the script."""

    root: Path
    """Folder of CIFAR-10."""
    out: Path | None = None
    """Output folder for the tables; None only prints them."""
    kept: Path = Path("runs/vit-as-convolution")
    """Folder of trained models; use a separate folder for other settings."""
    width: int = 90
    """Number of channels."""
    heads: int = 9
    """Number of heads per layer."""
    depth: int = 4
    """Number of layers."""
    images: int = 50_000
    """Number of training images."""
    test_images: int = 10_000
    """Number of test images."""
    fit_images: int = 256
    """Number of training images for fitting kernels; a quarter of them is held out to measure errors."""
    epochs: int = 8
    """Number of epochs."""
    tuning_epochs: int = 1
    """Number of epochs of fine-tuning after heads are replaced; 0 for none."""
    batch_size: int = 125
    """Batch size."""
    rate: float = 1e-3
    """Learning rate (AdamW, cosine decay to zero after warm-up for 5 % of the steps)."""
    weight_decay: float = 0.05
    """Weight decay of AdamW."""
    counts: tuple[int, ...] = (0, 4, 8, 12, 18, 24, 30, 36)
    """Numbers of heads to replace."""
    starts: tuple[str, ...] = ("default", "unchanged")
    """Initialisations: `default`, or a convolution with these `values` (see `initialize`)."""
    mass: float = 0.9
    """Share of attention that each head puts on its shift when initialised as a convolution."""
    position_length: float = 1.0
    """Norm of the positional vectors relative to content when initialised as a convolution."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the runs of each initialisation."""
    measure: bool = True
    """Replace heads and write the tables after training."""


def main(settings: Settings) -> None:
    """Train models, replace heads and compare; print and write the tables."""
    torch.set_flush_denormal(True)
    sets = cifar10(settings.root, {"train": slice(settings.images)}, settings.test_images)
    trained: dict[str, list[float]] = {}
    said: dict[str, Any] = {}
    for seed in settings.seeds:
        for start in settings.starts:
            model, said[start] = trained_model(start, seed, sets, settings)
            trained.setdefault(start, []).append(accuracy(model, *sets["test"]))
            print(start, seed, percentage(trained[start][-1]), flush=True)
    if not settings.measure:
        return
    first, _ = trained_model(settings.starts[0], settings.seeds[0], sets, settings)
    rows = [replaced(first, count, sets, settings) for count in settings.counts]
    text = f"{heads_table(rows)}\n\n{starts_table(trained)}"
    print(text)
    if settings.out is not None:
        found = {"heads": rows, "accuracies": trained, "starts": said}
        write_results(settings.out, "vit_as_convolution", settings, text, found)


def trained_model(start: str, seed: int, sets: Sets, settings: Settings) -> tuple[nn.Module, list[dict[str, float]]]:
    """Return a trained model, training it if it is not in the folder, and the measurements of its initialisation."""
    file = settings.kept / f"{start}-{seed}.pt"
    model, said = model_at(start, seed, sets, settings)
    if file.exists():
        model.load_state_dict(torch.load(file, weights_only=True))
    else:
        train(model, *sets["train"], settings, seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), file)
    return model, said


def model_at(start: str, seed: int, sets: Sets, settings: Settings) -> tuple[nn.Module, list[dict[str, float]]]:
    """Return an initialised model, and how close each layer is to a convolution."""
    torch.manual_seed(seed)
    model = SmallViT(dim=settings.width, depth=settings.depth, num_heads=settings.heads)
    if start == "default":
        return model, []
    found = initialize(
        model,
        values="unchanged",
        images=sets["train"][0][:16],
        mass=settings.mass,
        position_length=settings.position_length,
    )
    return model, [
        {"mass": float(layer.mass.mean()), "least mass": float(layer.mass.min()), "error": layer.error}
        for layer in found.values()
    ]


def train(model: nn.Module, images: Tensor, labels: Tensor, settings: Settings, seed: int) -> None:
    """Train with AdamW and augmentation (random crops with 4 pixels of padding, and flips)."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=settings.rate, weight_decay=settings.weight_decay)
    each = len(images) // settings.batch_size
    steps = max(1, settings.epochs * each)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, settings.rate, total_steps=steps + 1, pct_start=0.05, cycle_momentum=False
    )
    model.train()
    for _ in range(settings.epochs):
        order = torch.randperm(len(images), generator=generator)
        for chosen in order[: each * settings.batch_size].split(settings.batch_size):
            loss = F.cross_entropy(model(augmented(images[chosen], generator)), labels[chosen])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image by up to four pixels with zero padding, and flip it with probability 1/2."""
    count, _, height, width = images.shape
    padded = F.pad(images, (4,) * 4)
    down, right = torch.randint(0, 9, (2, count), generator=generator)
    rows = down[:, None] + torch.arange(height)
    mirrored = torch.rand(count, generator=generator)[:, None] < 0.5
    across = torch.arange(width)
    columns = right[:, None] + torch.where(mirrored, across.flip(0), across)
    taken = padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return taken.permute(0, 3, 1, 2).contiguous()


def replaced(model: nn.Module, count: int, sets: Sets, settings: Settings) -> dict[str, float]:
    """Replace heads of a trained model, and measure accuracy before and after fine-tuning, and speed."""
    result = replace_heads(model, sets["train"][0][: settings.fit_images], count=count)
    before = accuracy(result.model, *sets["test"])
    ratio = speed_ratio(result.model, model, sets["test"][0][:100])
    after = before
    if settings.tuning_epochs > 0:
        tuning = replace(settings, epochs=settings.tuning_epochs, rate=settings.rate / 10)
        train(result.model, *sets["train"], tuning, 0)
        after = accuracy(result.model, *sets["test"])
    row = {
        "heads": count,
        "output error": result.output_error,
        "accuracy": before,
        "accuracy tuned": after,
        "time ratio": ratio,
    }
    print(row, flush=True)
    return row


@torch.inference_mode()
def speed_ratio(new: nn.Module, old: nn.Module, images: Tensor) -> float:
    """Return the median time of the new model divided by that of the old, measured alternately."""
    times: tuple[list[float], list[float]] = ([], [])
    for model in (new, old):
        model.eval()
        model(images)
    for _ in range(9):
        for model, found in zip((new, old), times, strict=True):
            start = time.perf_counter()
            model(images)
            found.append(time.perf_counter() - start)
    return median(times[0]) / median(times[1])


def heads_table(rows: list[dict[str, float]]) -> str:
    """Return the Markdown table of replaced heads, with the largest number that costs at most 0.5 points."""
    lines = [
        "| heads replaced | output error | accuracy | fine-tuned | time relative to the original |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['heads']} | {r['output error']:.3f} | {percentage(r['accuracy'])} | {percentage(r['accuracy tuned'])} "
        f"| {r['time ratio']:.2f} |"
        for r in rows
    ]
    for name in ("accuracy", "accuracy tuned"):
        none = [r[name] for r in rows if r["heads"] == 0]
        if none:
            most = max(int(r["heads"]) for r in rows if r[name] >= none[0] - 0.005)
            lines.append(f"\nLargest number of replaced heads within 0.5 percentage points ({name}): {most}.")
    return "\n".join(lines)


def starts_table(trained: dict[str, list[float]]) -> str:
    """Return the Markdown table of initialisations, with mean and standard deviation over seeds."""
    lines = ["| initialisation | accuracy | standard deviation | runs |", "|---|---|---|---|"]
    for start, found in trained.items():
        spread = percentage(stdev(found)) if len(found) > 1 else "-"
        lines.append(f"| {start} | {percentage(mean(found))} | {spread} | {len(found)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(tyro.cli(Settings))
