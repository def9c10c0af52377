"""Initialisations of a small vision transformer on CIFAR-10, trained alike, one change at a time.

    python -m experiments.starts --root PATH/TO/CIFAR --out results/starts --seeds 0 1 2

Each run is written to a file and is not trained again. To share the work between processes, let each train other seeds
or other starts, with `--no-tables`, and run the command once more without it.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from attnconv._util.atomic_write import write_atomically
from attnconv.surgery import initialize
from experiments.common import accuracy, cifar10, spread, write_results
from experiments.small_vit import SmallViT
from experiments.vit_as_convolution import augmented

# Arguments of `initialize`; None keeps the initialisation of the model.
STARTS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "mimetic": {"method": "mimetic"},
    "mimetic values": {"method": "mimetic", "attention": "unchanged"},
    "mimetic scores": {"method": "mimetic", "values": "unchanged"},
    "impulse": {"method": "impulse"},
    "conditioned": {"method": "conditioned"},
    "convolution 0.9, default values": {"mass": 0.9, "values": "unchanged"},
    "convolution 0.5, default values": {"mass": 0.5, "values": "unchanged"},
    "convolution 0.9": {"mass": 0.9},
    "convolution 0.5": {"mass": 0.5},
    "convolution 0.3": {"mass": 0.3},
    "convolution 0.5, +0.4 I": {"mass": 0.5, "identity": 0.4},
    "convolution 0.5, short positions": {"mass": 0.5, "position_length": 0.5},
}


@dataclass(frozen=True)
class Settings:
    """Arguments of the script."""

    root: Path
    """Folder of CIFAR-10."""
    out: Path | None = None
    """Output folder for the tables; None only prints them."""
    kept: Path = Path("runs/starts")
    """Folder of finished runs; use a separate folder for other settings."""
    starts: tuple[str, ...] = tuple(STARTS)
    """Initialisations, see STARTS."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the runs of each initialisation."""
    width: int = 192
    """Number of channels."""
    heads: int = 3
    """Number of heads per layer."""
    depth: int = 6
    """Number of layers."""
    patch: int = 4
    """Side of a patch in pixels."""
    class_token: bool = False
    """Classify a class token instead of the mean over tokens."""
    images: int = 50_000
    """Number of training images."""
    test_images: int = 10_000
    """Number of test images."""
    epochs: int = 10
    """Number of passes over 50,000 images: with fewer images, the number of steps is the same."""
    batch_size: int = 125
    """Batch size."""
    rate: float = 1e-3
    """Maximum learning rate (AdamW, cosine decay to zero after a linear warm-up)."""
    weight_decay: float = 0.05
    """Weight decay of AdamW."""
    warmup: float = 0.1
    """Fraction of the steps in which the learning rate increases."""
    clip: float = 1.0
    """Maximum norm of the gradient."""
    mixup: float = 0.0
    """Parameter of the beta distribution of mixup weights; 0 disables mixup."""
    tables: bool = True
    """Write the tables after training."""


def main(settings: Settings) -> None:
    """Train the models that are missing, and print and write the table."""
    torch.set_flush_denormal(True)
    torch.set_num_threads(1)
    sets = cifar10(settings.root, {"train": slice(settings.images)}, settings.test_images, held_out=0)
    runs = [(start, seed, run(start, seed, sets, settings)) for seed in settings.seeds for start in settings.starts]
    if settings.tables:
        found = {
            start: [record["accuracy"][-1] for name, _, record in runs if name == start] for start in settings.starts
        }
        text = table(found)
        print(text)
        if settings.out is not None:
            records = [{"start": start, "seed": seed, **record} for start, seed, record in runs]
            write_results(settings.out, "starts", settings, text, {"runs": records})


def run(start: str, seed: int, sets: dict[str, tuple[Tensor, Tensor]], settings: Settings) -> dict[str, Any]:
    """Return the record of a run: loss and test accuracy after each epoch; train it if it has no file."""
    file = settings.kept / f"{start.replace(', ', '-').replace(' ', '-')}-{seed}.json"
    recipe = {
        name: value
        for name, value in asdict(settings).items()
        if name not in ("root", "out", "kept", "starts", "seeds", "tables")
    }
    if file.exists():
        record: dict[str, Any] = json.loads(file.read_text())
        if record["recipe"] != recipe:
            raise ValueError(f"{file}: must have the settings of this command, got other ones. Use another --kept.")
        return record
    torch.manual_seed(seed)
    model = SmallViT(
        patch=settings.patch,
        dim=settings.width,
        depth=settings.depth,
        num_heads=settings.heads,
        prefix=int(settings.class_token),
    )
    images, labels = sets["train"]
    for block in model.blocks:
        block.attn.fused_attn = False  # explicit matrices are more than twice as fast to train on one thread
    options = STARTS[start]
    if options is not None:
        initialize(model, images=images[:16], **options)
    record = {"recipe": recipe, "loss": [], "accuracy": []}
    for loss in train(model, images, labels, settings, seed):
        record["loss"].append(loss)
        record["accuracy"].append(accuracy(model, *sets["test"]))
        print(
            start, seed, len(record["loss"]), f"loss {loss:.3f}, test accuracy {record['accuracy'][-1]:.2%}", flush=True
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(record).encode())
    return record


def train(model: nn.Module, images: Tensor, labels: Tensor, settings: Settings, seed: int) -> Iterator[float]:
    """Train with AdamW, bfloat16 autocast, random crops and flips; yield the mean training loss of each epoch."""
    generator = torch.Generator().manual_seed(seed)
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=settings.rate, weight_decay=settings.weight_decay)
    each = 50_000 // settings.batch_size
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser,
        settings.rate,
        total_steps=settings.epochs * each + 1,
        pct_start=settings.warmup,
        cycle_momentum=False,
    )
    order = torch.empty(0, dtype=torch.int64)
    shares = np.random.default_rng(seed)
    for _ in range(settings.epochs):
        model.train()
        total = 0.0
        for _ in range(each):
            if len(order) < settings.batch_size:
                order = torch.randperm(len(images), generator=generator)
            chosen, order = order[: settings.batch_size], order[settings.batch_size :]
            batch, targets = augmented(images[chosen], generator), F.one_hot(labels[chosen], 10).float()
            if settings.mixup > 0:
                share = shares.beta(settings.mixup, settings.mixup)
                batch, targets = (share * part + (1 - share) * part.flip(0) for part in (batch, targets))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(batch), targets)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimiser.step()
            schedule.step()
            total += loss.item()
        yield total / each


def table(found: dict[str, list[float]]) -> str:
    """Return the Markdown table of initialisations, with mean and standard deviation over seeds."""
    lines = ["| initialisation | test accuracy | runs |", "|---|---|---|"]
    lines += [f"| {start} | {spread(values, percent=True)} | {len(values)} |" for start, values in found.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main(tyro.cli(Settings))
