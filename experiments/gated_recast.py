"""Fine-tuning of a CNN whose last convolutions are recast as gated attention, compared with that of the CNN itself.

Each 3 x 3 convolution with stride 1 in the last stage of a pretrained ResNet-20 becomes an attention layer with equal
outputs. Then every head h gets attention C_h to content, in addition to its attention P_h to the position of its tap:

    A_h = (1 - g_h) P_h + g_h C_h,        C_h = softmax_k(q_hq . k_hk / sqrt(e)),        g_h = sigmoid(gate_h)

At first, g_h is nearly 0, and the network is nearly the CNN. The idea is that of d'Ascoli et al. (2021), "Transformed
CNNs".

    python -m experiments.gated_recast --checkpoint resnet20-cifar10.th --root PATH/TO/CIFAR --out results/gated-recast

Runs are kept as in `experiments.starts`.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import tyro
from jaxtyping import Float
from torch import Tensor, nn

from attnconv.convert import recast
from attnconv.encodings import Encoding
from attnconv.grid import Grid
from attnconv.layers import SelfAttention
from attnconv.models import load
from attnconv.operators import Dense
from attnconv.training.settings import OptimSettings, TrainSettings
from experiments.resnet20 import MEAN, STD, pretrained
from experiments.training import Recipe, data_of, report, trained

NETWORKS = ("CNN", "gated attention")


@dataclass(frozen=True)
class Settings:
    """Arguments of the script."""

    checkpoint: Path
    """Pretrained network: a torch file of a ResNet-20's tensors, or the run folder of another ResNet."""
    root: Path
    """Folder of CIFAR-10."""
    out: Path | None = None
    """Output folder for the table; None only prints it."""
    kept: Path = Path("results/gated-recast/runs")
    """Folder of finished and interrupted runs."""
    networks: tuple[str, ...] = NETWORKS
    """Networks to train."""
    stage: str = "layer3"
    """Prefix of the names of the convolutions that are recast, except those with a stride above 1."""
    key_channels: int = 16
    """Number of channels e of each head's queries and keys."""
    gate: float = -5.0
    """Initial value of gate_h."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the initial queries and keys, and of the training."""
    recipe: Recipe = field(
        default_factory=lambda: Recipe(
            OptimSettings(name="adamw", learning_rate=1e-3, weight_decay=0.01, decay_vectors=False, position_rate=20.0),
            TrainSettings(epochs=5, batch_size=125, precision="bf16"),
        )
    )
    """Training, the same for both networks. The rate of the gates is a multiple of `position_rate`."""


class Gated(Encoding):
    """Encoding whose heads mix attention to content with that of another, position-only encoding."""

    undecayed = ("gate",)

    def __init__(self, position: Encoding, channels: int, key_channels: int, gate: float) -> None:
        super().__init__(position.heads, position.dims)
        self.position = position.requires_grad_(False)
        self.query_key = nn.Linear(channels, 2 * self.heads * key_channels, bias=False)
        self.gate = nn.Parameter(torch.full((self.heads,), gate))

    def operator(self, grid: Grid, x: Float[Tensor, "b *sizes c"]) -> Dense:
        both = self.query_key(x.flatten(1, -2)).unflatten(-1, (2, self.heads, -1))
        query, key = both.permute(2, 0, 3, 1, 4)  # (b, h, n, e) each
        content = torch.softmax(query @ key.mT / key.shape[-1] ** 0.5, -1)
        share = torch.sigmoid(self.gate)[:, None, None]
        return Dense(grid, (1 - share) * self.position.operator(grid, x).to_dense() + share * content)

    def terms(self, grid: Grid, x: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError("gated attention is not a softmax of one sum of scores")


def main(settings: Settings) -> None:
    """Train the networks that are missing, and print and write the table."""
    recipe = settings.recipe
    data = data_of(recipe, settings.root)
    if settings.checkpoint.is_file():
        data = replace(data, mean=MEAN, std=STD)
    runs = []
    for seed in settings.seeds:
        for name in settings.networks:
            key = [name, seed, settings.stage, settings.key_channels, settings.gate]
            make = partial(build, name, seed, settings)
            record = trained(settings.kept, f"{name} {seed}", key, make, recipe.settings(settings.root, seed), data)
            runs.append((name, seed, record))
    report("gated_recast", runs, settings, settings.out)


def build(name: str, seed: int, settings: Settings) -> nn.Module:
    """Return the CNN, or a copy with gated attention in place of convolutions."""
    torch.manual_seed(seed)
    file = settings.checkpoint
    model: nn.Module = pretrained(file) if file.is_file() else load(file).model
    if name == "CNN":
        return model
    made = recast(
        model,
        only=lambda path, part: path.startswith(settings.stage) and getattr(part, "stride", None) == (1, 1),
        fast=False,
    )
    for layer in made.modules():
        if isinstance(layer, SelfAttention):
            layer.encoding = Gated(layer.encoding, layer.in_channels, settings.key_channels, settings.gate)
    return made


if __name__ == "__main__":
    main(tyro.cli(Settings))
