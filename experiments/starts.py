"""Initialisations of a small vision transformer on CIFAR-10, trained in the same way, one change at a time.

    python -m experiments.starts --root PATH/TO/CIFAR --out results/starts

Each run is kept and is not trained again; an interrupted run continues. To share the work between processes, let each
train other seeds or other rows; the last call writes the table.
"""

import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro

from attnconv.data.augmentation import normalise
from attnconv.data.image_set import Splits
from attnconv.data.settings import AugmentSettings
from attnconv.surgery import initialize
from attnconv.training.evaluation import device_of
from attnconv.training.settings import AcceleratorName, OptimSettings, ScheduleSettings, TrainSettings
from experiments.small_vit import SmallViT
from experiments.training import Recipe, data_of, report, trained


@dataclass(frozen=True)
class Row:
    """One row of the table: an initialisation, and changes to the recipe."""

    options: dict[str, Any] | None
    """Arguments of `initialize`; None keeps the initialisation of the model."""
    rate: float = 1e-3
    weight_decay: float = 0.05
    clip: float | None = 1.0
    warmup: float = 0.1
    class_token: bool = False
    free: bool = False
    """Restore the patch embedding and the MLPs, which `initialize` projects off the subspace of positions."""


CONVOLUTION = {"mass": 0.5}  # and position_length=1, see build
HALF = {**CONVOLUTION, "position_length": 0.5}  # the defaults of initialize
ROWS: dict[str, Row] = {
    "default": Row(None),
    "default, rate 0.0005": Row(None, rate=5e-4),
    "default, rate 0.002": Row(None, rate=2e-3),
    "default, rate 0.004": Row(None, rate=4e-3),
    "default, weight decay 0.2": Row(None, weight_decay=0.2),
    "default, class token": Row(None, class_token=True),
    "default, no clipping, short warm-up": Row(None, clip=None, warmup=0.01),
    "mimetic": Row({"method": "mimetic"}),
    "mimetic, rate 0.002": Row({"method": "mimetic"}, rate=2e-3),
    "mimetic values": Row({"method": "mimetic", "attention": "unchanged"}),
    "mimetic scores": Row({"method": "mimetic", "values": "unchanged"}),
    "impulse": Row({"method": "impulse"}),
    "conditioned": Row({"method": "conditioned"}),
    "convolution": Row(CONVOLUTION),
    "convolution, mass 0.9": Row({"mass": 0.9}),
    "convolution, mass 0.3": Row({"mass": 0.3}),
    "convolution, default values": Row({**CONVOLUTION, "values": "unchanged"}),
    "convolution, mass 0.9, default values": Row({"mass": 0.9, "values": "unchanged"}),
    "convolution, values +0.4 I": Row({**CONVOLUTION, "identity": 0.4}),
    "convolution, half as long positions": Row(HALF),
    "convolution, writers not projected": Row(CONVOLUTION, free=True),
    "convolution, class token": Row(CONVOLUTION, class_token=True),
    "convolution, no clipping, short warm-up": Row(CONVOLUTION, clip=None, warmup=0.01),
    "convolution, rate 0.002": Row(CONVOLUTION, rate=2e-3),
    "convolution, rate 0.004": Row(CONVOLUTION, rate=4e-3),
    "convolution, half as long positions, rate 0.002": Row(HALF, rate=2e-3),
    "convolution, half as long positions, rate 0.002, without images": Row({**HALF, "images": None}, rate=2e-3),
    "default, class token, rate 0.002": Row(None, rate=2e-3, class_token=True),
    "convolution, half as long positions, class token, rate 0.002": Row(HALF, rate=2e-3, class_token=True),
}


@dataclass(frozen=True)
class Settings:
    """Arguments of the script."""

    root: Path
    """Folder of CIFAR-10."""
    out: Path | None = None
    """Output folder for the tables; None only prints them."""
    kept: Path = Path("results/starts/runs")
    """Folder of finished and interrupted runs."""
    rows: tuple[str, ...] = tuple(ROWS)
    """Rows of the table, see ROWS."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the runs of each row."""
    width: int = 96
    """Number of channels."""
    heads: int = 3
    """Number of heads per layer."""
    depth: int = 4
    """Number of layers."""
    patch: int = 2
    """Side of a patch in pixels."""
    epochs: int = 4
    """Number of epochs."""
    batch_size: int = 125
    """Batch size."""
    limit: int | None = None
    """Number of training images; None for all 50,000."""
    augment: AugmentSettings = field(default_factory=AugmentSettings)
    """Augmentation of training images."""
    device: AcceleratorName = "auto"
    """Device to train on."""


def main(settings: Settings) -> None:
    """Train the models that are missing, and print and write the table."""
    data = data_of(recipe(ROWS["default"], settings), settings.root)
    runs = [(row, seed, run(row, seed, data, settings)) for seed in settings.seeds for row in settings.rows]
    report("starts", runs, settings, settings.out)


def recipe(row: Row, settings: Settings) -> Recipe:
    """Return the recipe of a row."""
    return Recipe(
        OptimSettings(
            name="adamw",
            learning_rate=row.rate,
            weight_decay=row.weight_decay,
            decay_vectors=False,
            clip=row.clip,
        ),
        TrainSettings(
            epochs=settings.epochs, batch_size=settings.batch_size, precision="bf16", accelerator=settings.device
        ),
        ScheduleSettings(warmup=row.warmup),
        settings.augment,
        settings.limit,
    )


def run(name: str, seed: int, data: Splits, settings: Settings) -> dict[str, Any]:
    """Return the curve of a run; train it if it is missing."""
    row, sizes = ROWS[name], (settings.width, settings.heads, settings.depth, settings.patch)
    key = [seed, row.options, row.free, row.class_token, *sizes]
    training = recipe(row, settings).settings(settings.root, seed)
    return trained(settings.kept, f"{name} {seed}", key, partial(build, row, seed, data, settings), training, data)


def build(row: Row, seed: int, data: Splits, settings: Settings) -> SmallViT:
    """Return an initialised model."""
    torch.manual_seed(seed)
    model = SmallViT(
        patch=settings.patch,
        dim=settings.width,
        depth=settings.depth,
        num_heads=settings.heads,
        prefix=int(row.class_token),
    )
    for block in model.blocks:  # explicit matrices are more than twice as fast to train on one thread of a CPU
        block.attn.fused_attn = device_of(settings.device).type == "cuda"
    if row.options is not None:
        images, before = data.train.images[:16], copy.deepcopy(model.state_dict())
        options = {"images": normalise(images, data.mean, data.std), "position_length": 1.0, **row.options}
        initialize(model, **options)
        if row.free:
            kept = {name: value for name, value in before.items() if name.startswith("patch_embed") or ".mlp." in name}
            model.load_state_dict(kept, strict=False)
    return model


if __name__ == "__main__":
    main(tyro.cli(Settings))
