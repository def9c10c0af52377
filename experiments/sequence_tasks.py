"""Tasks and networks for `experiments.sequence`.

    teacher   noise (4 channels, 32 positions); the target is the output of a fixed random network of two convolutions
    digits    scikit-learn's digits in row-major order: 64 positions with one channel, ten classes
    rows      CIFAR-10 with one position per image row: 32 positions with 96 channels, ten classes

The teacher uses replicate padding, which is equivalent to hard heads with a softmax over the sequence only.
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

CHANNELS, PLACES, HIDDEN = 4, 32, 16  # channels and length of the teacher's sequences, and its hidden channels
TEACHER_SHIFTS: tuple[tuple[int, ...], ...] = ((-1, 0, 1), (-2, -1, 0, 1, 2))
KEY_CHANNELS = 8  # channels of each head's queries and keys in attention without positions


@final
@dataclass(frozen=True)
class Task:
    """Training and test sequences of a task.

    Attributes:
        name: Name of the task.
        train: Training sequences (b, c, positions); None if they are sampled at every step.
        train_targets: Labels, or outputs of the teacher.
        test: Test sequences.
        test_targets: Labels, or outputs of the teacher.
        outputs: Number of classes, or of target channels.
        layers: Number of layers of a network for this task.
        heads: Number of heads per layer, and kernel size of convolutions.
        teacher: Network that computes targets for random inputs; None for the other tasks.
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

    @torch.no_grad()
    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return a batch of training sequences with their targets, or of random inputs with the teacher's outputs."""
        if self.train is None or self.train_targets is None:
            assert self.teacher is not None
            noise = torch.randn(size, CHANNELS, PLACES, generator=generator)
            return noise, self.teacher(noise)
        chosen = torch.randint(len(self.train), (size,), generator=generator)
        return self.train[chosen], self.train_targets[chosen]


def make_task(name: TaskName, *, root: Path | None, images: int, test_images: int, seed: int) -> Task:
    """Create a task, deterministically for a seed.

    Args:
        name: `teacher`, `digits` or `rows`.
        root: Folder of CIFAR-10, for `rows`.
        images: Number of training images of `rows`.
        test_images: Maximum number of test sequences.
        seed: Seed of the teacher and of its test inputs.
    """
    if name == "teacher":
        return teacher_task(test_images, seed)
    if name == "digits":
        parts = [(part.images.float() / 127.5 - 1, part.labels) for part in read_digits()]
        train, test = ((pixels.flatten(2), labels) for pixels, labels in parts)
        return Task(name, *train, test[0][:test_images], test[1][:test_images], outputs=10, layers=3, heads=9)
    assert root is not None  # checked by the caller
    sets = cifar10(root, {"train": slice(images)}, test_images)
    as_rows = {part: (pixels.permute(0, 1, 3, 2).flatten(1, 2), labels) for part, (pixels, labels) in sets.items()}
    return Task(name, *as_rows["train"], *as_rows["test"], outputs=10, layers=3, heads=5)


def teacher_task(test_sequences: int, seed: int) -> Task:
    """Create the teacher: two convolutions of kernel size 3 and 5 with normal weights, and outputs of variance 1."""
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
    """Stack of attention or convolution layers with ReLU between them.

    For classification, it also has batch norms, a mean over positions, and a linear head.

    Args:
        task: Task of the network.
        name: Kind of layers.
        width: Number of channels between layers.
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
        """Return logits, or a sequence."""
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = norm(layer(x))
            if self.out is not None or number < len(self.layers) - 1:
                x = x.relu()
        return x if self.out is None else self.out(x.mean(-1))


def mixing_layer(name: ModelName, given: int, made: int, *, heads: int, places: int) -> nn.Module:
    """Return a layer with one matrix per head or kernel position; all kinds have the same number of these matrices.

    Args:
        name: Kind of layer; `no positions` is attention by content only, equation (8) with its first term.
        given: Number of input channels.
        made: Number of output channels.
        heads: Number of heads, or kernel size, odd.
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
