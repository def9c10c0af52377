"""Initialisations of a small vision transformer on CIFAR-10, trained alike, one change at a time.

    python -m experiments.starts --root PATH/TO/CIFAR --out results/starts

Each run is kept and is not trained again; an interrupted run continues. To share the work between processes, let each
train other seeds or other starts, with `--no-tables`, and run the command once more without it.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro

from attnconv.data.augmentation import normalise
from attnconv.data.image_set import Splits
from attnconv.surgery import initialize
from attnconv.training.settings import OptimSettings, TrainSettings
from experiments.common import spread, write_results
from experiments.small_vit import SmallViT
from experiments.training import Recipe, data_of, trained

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
    """Folder of finished and interrupted runs."""
    starts: tuple[str, ...] = tuple(STARTS)
    """Initialisations, see STARTS."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the runs of each initialisation."""
    width: int = 128
    """Number of channels."""
    heads: int = 4
    """Number of heads per layer."""
    depth: int = 4
    """Number of layers."""
    patch: int = 4
    """Side of a patch in pixels."""
    class_token: bool = False
    """Classify a class token instead of the mean over tokens."""
    recipe: Recipe = field(
        default_factory=lambda: Recipe(
            OptimSettings(name="adamw", learning_rate=1e-3, weight_decay=0.05, decay_vectors=False, clip=1.0),
            TrainSettings(epochs=20, batch_size=125, precision="bf16"),
        )
    )
    """Training, the same for all initialisations."""
    tables: bool = True
    """Write the tables after training."""


def main(settings: Settings) -> None:
    """Train the models that are missing, and print and write the table."""
    torch.set_num_threads(1)
    data = data_of(settings.recipe, settings.root)
    runs = [(start, seed, run(start, seed, data, settings)) for seed in settings.seeds for start in settings.starts]
    if settings.tables:
        text = table(runs)
        print(text)
        if settings.out is not None:
            records = [{"start": start, "seed": seed, **record} for start, seed, record in runs]
            write_results(settings.out, "starts", settings, text, {"runs": records})


def run(start: str, seed: int, data: Splits, settings: Settings) -> dict[str, Any]:
    """Return the curve of a run; train it if it is missing."""
    options, sizes = STARTS[start], (settings.width, settings.heads, settings.depth, settings.patch)
    make = partial(build, options, seed, data, settings)
    key = [seed, options, sizes, settings.class_token]
    return trained(settings.kept, f"{start} {seed}", key, make, settings.recipe.settings(settings.root, seed), data)


def build(options: dict[str, Any] | None, seed: int, data: Splits, settings: Settings) -> SmallViT:
    """Return an initialised model."""
    torch.manual_seed(seed)
    model = SmallViT(
        patch=settings.patch,
        dim=settings.width,
        depth=settings.depth,
        num_heads=settings.heads,
        prefix=int(settings.class_token),
    )
    for block in model.blocks:
        block.attn.fused_attn = False  # explicit matrices are more than twice as fast to train on one thread
    if options is not None:
        images = data.train.images[:16]
        initialize(model, images=normalise(images, data.mean, data.std), **options)
    return model


def table(runs: list[tuple[str, int, dict[str, Any]]]) -> str:
    """Return the Markdown table of initialisations, with mean and standard deviation over seeds."""
    lines = ["| initialisation | test accuracy | runs |", "|---|---|---|"]
    for start in dict.fromkeys(start for start, _, _ in runs):
        found = [record["test_accuracy"][-1] for name, _, record in runs if name == start]
        lines.append(f"| {start} | {spread(found, percent=True)} | {len(found)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(tyro.cli(Settings))
