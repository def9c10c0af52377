"""What `experiments.sequence` trains on, and the networks that it trains.

    teacher   noise (4 channels, 32 places); the target is what a fixed random stack of two convolutions makes of it
    digits    scikit-learn's digits read row by row: 64 places of one channel, ten classes
    rows      CIFAR-10, one place for each row of an image: 32 places of 96 channels, ten classes

Borders of the teacher are replicated: there hard heads under the softmax over the sequence alone are a convolution.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeAlias, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnconv.data.digits import read_digits
from attnconv.encodings import Encoding, LearnedRelative, Quadratic, Relative
from attnconv.layers import SelfAttention1d
from experiments.common import cifar10

TaskName: TypeAlias = Literal["teacher", "digits", "rows"]
ModelName: TypeAlias = Literal["quadratic", "learned", "convolution", "no positions"]
MODELS: tuple[ModelName, ...] = ("quadratic", "learned", "convolution", "no positions")

CHANNELS, PLACES, HIDDEN = 4, 32, 16  # of the teacher's sequences, and between its two layers
TEACHER_SHIFTS: tuple[tuple[int, ...], ...] = ((-1, 0, 1), (-2, -1, 0, 1, 2))
KEY_CHANNELS = 8  # of each head's query and key where there are no positions


@final
@dataclass(frozen=True)
class Task:
    """Sequences and what is wanted of them.

    Attributes:
        name: Of the task.
        train: Sequences (b, c, places); None where they are drawn anew at every step.
        train_targets: Classes, or the teacher's outputs.
        test, test_targets: Held out.
        outputs: Classes, or channels of the target.
        layers: Of a network for it.
        heads: Of each layer, and places of a convolution's kernel.
        teacher: Makes targets of fresh noise; None for the real tasks.
    """

    name: TaskName
    train: Tensor | None
    train_targets: Tensor | None
    test: Tensor
    test_targets: Tensor
    outputs: int
    layers: int
    heads: int
    teacher: nn.Module | None = None

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sequences to train on, with their targets."""
        if self.train is None or self.train_targets is None:
            return self.fresh(size, generator)
        chosen = torch.randint(len(self.train), (size,), generator=generator)
        return self.train[chosen], self.train_targets[chosen]

    @torch.no_grad()
    def fresh(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Noise, and what the teacher makes of it."""
        assert self.teacher is not None
        noise = torch.randn(size, CHANNELS, PLACES, generator=generator)
        return noise, self.teacher(noise)


def make_task(name: TaskName, *, root: Path | None, images: int, test_images: int, seed: int) -> Task:
    """A task, always the same for a seed.

    Args:
        name: `teacher`, `digits` or `rows`.
        root: Folder of CIFAR-10, for `rows`.
        images: Training images of `rows`.
        test_images: Sequences to measure on, at most.
        seed: Of the teacher and of its noise.
    """
    if name == "teacher":
        return teacher_task(test_images, seed)
    if name == "digits":
        parts = [(part.images.float() / 127.5 - 1, part.labels) for part in read_digits()]
        train, test = ((pixels.flatten(2), labels) for pixels, labels in parts)
        return Task(name, *train, test[0][:test_images], test[1][:test_images], outputs=10, layers=3, heads=9)
    assert root is not None  # Settings has checked it
    sets = cifar10(root, {"train": slice(images)}, test_images)
    as_rows = {part: (pixels.permute(0, 1, 3, 2).flatten(1, 2), labels) for part, (pixels, labels) in sets.items()}
    return Task(name, *as_rows["train"], *as_rows["test"], outputs=10, layers=3, heads=5)


def teacher_task(test_sequences: int, seed: int) -> Task:
    """Two convolutions of 3 and 5 taps with independent normal weights, each output of variance 1."""
    generator = torch.Generator().manual_seed(seed)
    modules: list[nn.Module] = []
    for given, made, shifts in zip((CHANNELS, HIDDEN), (HIDDEN, CHANNELS), TEACHER_SHIFTS, strict=True):
        conv = nn.Conv1d(given, made, len(shifts), padding="same", padding_mode="replicate", bias=False)
        deviation = (len(shifts) * given) ** -0.5
        conv.weight.data = torch.randn(conv.weight.shape, generator=generator) * deviation
        modules += [conv, nn.ReLU()]
    teacher = nn.Sequential(*modules[:-1]).requires_grad_(requires_grad=False)
    noise = torch.randn(1_000, CHANNELS, PLACES, generator=generator)
    last = teacher[-1]
    assert isinstance(last, nn.Conv1d)
    last.weight /= teacher(noise).std((0, 2))[:, None, None]
    test = torch.randn(test_sequences, CHANNELS, PLACES, generator=generator)
    return Task("teacher", None, None, test, teacher(test), outputs=CHANNELS, layers=2, heads=5, teacher=teacher)


@final
class SequenceNet(nn.Module):
    """Layers that mix places, with ReLU between them; for classes also batch norms, the mean over places and a map.

    Args:
        task: What it is for.
        name: Which layers.
        width: Channels between layers.
    """

    def __init__(self, task: Task, name: ModelName, *, width: int) -> None:
        super().__init__()
        classes = task.name != "teacher"
        given, places = task.test.shape[1:]
        channels = [given, *[width] * (task.layers - 1), width if classes else task.outputs]
        self.layers = nn.ModuleList(
            mixing_layer(name, a, b, heads=task.heads, places=places) for a, b in pairwise(channels)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(c) if classes else nn.Identity() for c in channels[1:])
        self.out = nn.Linear(width, task.outputs) if classes else None

    def forward(self, x: Float[Tensor, "b c places"]) -> Float[Tensor, "b outputs *places"]:
        """Logits, or a sequence."""
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = norm(layer(x))
            if self.out is not None or number < len(self.layers) - 1:
                x = x.relu()
        return x if self.out is None else self.out(x.mean(-1))


def mixing_layer(name: ModelName, given: int, made: int, *, heads: int, places: int) -> nn.Module:
    """A layer with one matrix per head, or per place of a kernel: the same number of weights.

    Args:
        name: Which; `no positions` is attention by content alone, eq. (8) with its first term.
        given: Channels in.
        made: Channels out.
        heads: Or places of the kernel, odd.
        places: Length of the sequence, for the learned table.
    """
    encoding: Encoding
    if name == "convolution":
        return nn.Conv1d(given, made, heads, padding="same", padding_mode="replicate")
    if name == "quadratic":
        encoding = Quadratic(heads, dims=1)
    elif name == "learned":
        encoding = LearnedRelative(heads, 1, channels=32, max_shift=places - 1)
    else:
        encoding = Relative(given, heads, 1, head_channels=KEY_CHANNELS, terms=("content-content",))
        return SelfAttention1d(given, made, heads, encoding=encoding, backend="reference")  # faster at these sizes
    return SelfAttention1d(given, made, heads, encoding=encoding)
