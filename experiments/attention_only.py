"""Initial values, centres and block designs of attention-only networks on CIFAR-10, one change at a time.

    python -m experiments.attention_only --root PATH/TO/CIFAR --out results/attention-only

With `--width 128`, models have the sizes of the preset `quadratic-small`, "three stages" is `quadratic-fast`, and
"ResNet" has as many multiply-adds in its convolutions as these have in their linear maps. With `--width 64`, all models
have half as many channels, as at scale `mini`. Runs are kept as in `experiments.starts`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor, nn

from attnconv.layers import GatedPositionalAttention
from attnconv.models import build
from attnconv.models.presets import PRESETS
from attnconv.models.settings import AttentionSettings, ModelSettings, ResNetSettings, StagedSettings
from attnconv.training.recipes import recipe as preset_recipe
from attnconv.training.settings import AcceleratorName
from experiments.training import Recipe, data_of, report, trained

Values = Literal["default", "+I", "-I", "mimetic"]


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the settings of the model."""
    values: Values = "default"
    """Sum over heads of the initial value and output matrices; each head reads its own slice of the channels."""
    spread: float | None = None
    """Initial inverse width of all heads, in 1 / position; None keeps that of the model."""
    staged: bool = False
    """Use the staged classifier, whose initial centres are the shifts nearest to 0."""
    anywhere: bool = False
    """Move the initial centres of staged classifiers to random shifts, as in the paper."""
    gated: bool = False
    """Use ConViT's layers, with attention to content beside attention to positions, and heads of width / 9 channels."""
    resnet: bool = False
    """Use a ResNet instead."""

    def key(self) -> dict[str, Any]:
        """Return the changes as plain values, which identify the row."""
        return {name: value for name, value in asdict(self).items() if value != getattr(Row(), name)}


LEARNED = {"encoding": "learned"}
ROWS: dict[str, Row] = {
    "quadratic": Row(),
    "quadratic, +I": Row(values="+I"),
    "quadratic, -I": Row(values="-I"),
    "quadratic, mimetic": Row(values="mimetic"),
    "quadratic, 3 x 3 centres": Row({"centres": "near"}),
    "quadratic, 3 x 3 centres, -I": Row({"centres": "near"}, values="-I"),
    "quadratic, 3 x 3 centres, mimetic": Row({"centres": "near"}, values="mimetic"),
    "quadratic, 3 x 3 centres, width 1, mimetic": Row({"centres": "near"}, values="mimetic", spread=1.0),
    "quadratic, post-norm": Row({"norm": "post"}),
    "quadratic, factored heads, 8 layers": Row({"head_channels": 16, "layers": 8}),
    "learned": Row(LEARNED),
    "learned, -I": Row(LEARNED, values="-I"),
    "learned, mimetic": Row(LEARNED, values="mimetic"),
    "gated": Row(gated=True),
    "three stages": Row(staged=True),
    "three stages, centres anywhere": Row(staged=True, anywhere=True),
    "three stages, width 1": Row(staged=True, spread=1.0),
    "three stages, width 0.25": Row(staged=True, spread=4.0),
    "three stages, -I": Row(staged=True, values="-I"),
    "three stages, mimetic": Row(staged=True, values="mimetic"),
    "ResNet": Row(resnet=True),
}


@dataclass(frozen=True)
class Settings:
    """Arguments of the script."""

    root: Path
    """Folder of CIFAR-10."""
    out: Path | None = None
    """Output folder for the tables; None only prints them."""
    kept: Path = Path("results/attention-only/runs")
    """Folder of finished and interrupted runs."""
    rows: tuple[str, ...] = tuple(ROWS)
    """Rows of the table, see ROWS."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the runs of each row."""
    width: int = 64
    """Number of channels; the MLPs have twice as many."""
    epochs: int = 10
    """Number of epochs."""
    limit: int | None = None
    """Number of training images; None for all 50,000."""
    device: AcceleratorName = "auto"
    """Device to train on."""


class Gated(nn.Module):
    """ConViT's gated layer for images (b, c, height, width)."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.layer = GatedPositionalAttention(channels, heads)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.layer(x.flatten(2).mT, x.shape[2:])
        return tokens.mT.unflatten(2, x.shape[2:])


def main(settings: Settings) -> None:
    """Train the models that are missing, and print and write the table."""
    recipe = recipe_of(settings)
    data = data_of(recipe, settings.root)
    runs = []
    for seed in settings.seeds:
        for name in settings.rows:
            row = ROWS[name]
            key = [seed, row.key(), settings.width]
            training, make = recipe.settings(settings.root, seed), partial(model_of, row, seed, settings)
            runs.append((name, seed, trained(settings.kept, f"{name} {seed}", key, make, training, data)))
    report("attention_only", runs, settings, settings.out)


def recipe_of(settings: Settings) -> Recipe:
    """Return the recipe of `quadratic-small`."""
    known = preset_recipe("quadratic-small")
    train = replace(known.train, epochs=settings.epochs, accelerator=settings.device)
    return Recipe(known.optim, train, known.schedule, known.augment, settings.limit)


def model_of(row: Row, seed: int, settings: Settings) -> nn.Module:
    """Return an initialised model."""
    torch.manual_seed(seed)
    sizes, heads = PRESETS["quadratic-small"], 9
    assert isinstance(sizes, AttentionSettings)
    width = settings.width + (-settings.width % heads if row.gated else 0)  # a multiple of the number of heads
    changed: ModelSettings = replace(sizes, **{"width": width, "mlp_width": 2 * settings.width, **row.changes})
    if row.staged:
        changed = StagedSettings(widths=(width // 2, width, 3 * width // 2))
    if row.resnet:
        base = round(width * 35 / 128)
        changed = ResNetSettings(widths=(base, 2 * base, 4 * base), blocks=(1, 1, 1))
    model: Any = build(changed)
    if row.resnet:
        return model.to(memory_format=torch.channels_last)  # faster on CPUs
    for block in model.blocks:
        if row.anywhere:
            nn.init.normal_(block.attention.encoding.centres, std=2.0)
        if row.gated:
            block.attention = Gated(width, heads)
        if row.spread is not None:
            nn.init.constant_(block.attention.encoding.spread, row.spread)
        if row.values != "default":
            start_values(block, row.values)
    return model


@torch.no_grad()
def start_values(block: Any, values: Values) -> None:
    """Set the sum of the heads' matrices to I, -I or -0.4 I + 0.4 Z; each head reads its own slice of the channels."""
    weight = block.attention.weight
    heads, channels, outputs = weight.shape
    total = torch.eye(channels, outputs) * (1.0 if values == "+I" else -1.0)
    if values == "mimetic":
        total = 0.4 * total + 0.4 * torch.randn(channels, outputs) / outputs**0.5
    weight.zero_()
    for head, rows in enumerate(torch.arange(channels).tensor_split(heads)):
        weight[head, rows] = total[rows]
    if hasattr(block, "output"):  # the paper's classifier
        nn.init.eye_(block.output.weight)
        for bias in (block.attention.bias, block.output.bias):
            nn.init.zeros_(bias)


if __name__ == "__main__":
    main(tyro.cli(Settings))
