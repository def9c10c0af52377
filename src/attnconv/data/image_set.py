"""Image sets in memory, the division of a training set, and batches with their random numbers.

All data sets of this library fit in memory as bytes (CIFAR-10: 184 MB): a batch is one gather, without workers. The
order of batches depends only on the seed and the epoch. The *global* batch is cut from it and then divided among the
processes, so together they see exactly the batches that a single process sees.

Random numbers are a function of (seed, epoch, sample), from numpy's Philox generator, for the whole set at once: they
do not depend on the batch size, the number of processes or where a training was resumed. They are raw words of the bit
generator, which NumPy keeps the same in all releases, unlike the methods of `np.random.Generator`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from attnconv._util.errors import bad

COLUMNS = 36  # random numbers per sample and epoch: `augment` uses the first 8, `mix` the others
SHUFFLE, SPLIT, AUGMENT = range(3)  # streams: what random numbers are for; no two uses share theirs


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images in memory.

    Args:
        images: Pixels as bytes, 0 to 255.
        labels: One class per image, 0 to classes - 1.

    Raises:
        ValueError: The shapes or dtypes do not fit, or a side or the number of channels is zero.

    Example:
        >>> pair = ImageSet(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1]))
        >>> len(pair), pair.channels, pair.size
        (2, 3, (8, 8))
    """

    images: UInt8[Tensor, "n channels height width"]
    labels: Int64[Tensor, " n"]

    def __post_init__(self) -> None:
        shape = tuple(self.images.shape)
        if self.images.ndim != 4 or 0 in shape[1:] or self.images.dtype != torch.uint8:
            got = f"shape {shape} of {self.images.dtype}"
            raise ValueError(bad("images", "must be uint8 of shape (n, channels, height, width)", got))
        if tuple(self.labels.shape) != shape[:1] or self.labels.dtype != torch.int64:
            got = f"shape {tuple(self.labels.shape)} of {self.labels.dtype}"
            raise ValueError(bad("labels", f"must be {shape[0]} int64 numbers, one per image", got))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def channels(self) -> int:
        """Number of channels of each image."""
        return self.images.shape[1]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.images.shape[2], self.images.shape[3]

    def take(self, samples: Int64[Tensor, " k"]) -> "ImageSet":
        """Select images by index, in the order given."""
        return ImageSet(self.images[samples], self.labels[samples])

    def to(self, device: torch.device | str) -> "ImageSet":
        """Move the set to a device."""
        return ImageSet(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True, eq=False)
class Splits:
    """A data set as a run sees it.

    Args:
        train: Training images.
        validation: Images held out of the training set, by which models are selected. May be empty.
        test: Test images.
        classes: Names of the classes, in the order of the labels.
        mean: Mean of each channel, of pixels scaled to [0, 1].
        std: Standard deviation of each channel, likewise.
        source: Where the images came from, for reports.
    """

    train: ImageSet
    validation: ImageSet
    test: ImageSet
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str = ""


def held_out(
    labels: Int64[Tensor, " n"], count: int, *, seed: int, stratify: bool = True
) -> tuple[Int64[Tensor, " kept"], Int64[Tensor, " count"]]:
    """Divide a training set: indices of the images that stay, at least one, and of those held out, each ascending.

    Held out is the beginning of a random order or, stratified, the beginning of each class in it. Shares of classes
    differ from exact proportion by less than one image.
    """
    n = len(labels)
    if not 0 <= count < max(n, 1):
        fix = "At least one image must be left to train on."
        raise ValueError(bad("data.validation", f"must be 0 to {n - 1} for {n} training images", count, fix))
    order = permutation(seed, 0, n, stream=SPLIT)
    strata = (labels if stratify else torch.zeros_like(labels))[order]
    sizes, out = torch.bincount(strata), torch.zeros(n, dtype=torch.bool)
    shares = sizes * count // max(n, 1)
    largest_remainders = torch.argsort(sizes * count % max(n, 1), descending=True, stable=True)
    shares[largest_remainders[: count - int(shares.sum())]] += 1  # ties go to the lower class
    for stratum, share in enumerate(shares.tolist()):
        out[order[strata == stratum][:share]] = True
    return (~out).nonzero()[:, 0], out.nonzero()[:, 0]


def channel_statistics(images: UInt8[Tensor, "n c height width"]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation (1 where it is 0) of each channel, scaled to [0, 1], over all pixels, from exact counts."""
    means, deviations = [], []
    values = torch.arange(256, dtype=torch.float64, device=images.device) / 255
    for channel in images.unbind(1):
        shares = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        means.append(float(shares @ values))
        deviations.append(float(shares @ (values - means[-1]).square()) ** 0.5 or 1.0)
    return tuple(means), tuple(deviations)


def uniform(seed: int, epoch: int, n: int) -> Float32[Tensor, "n 36"]:
    """Draw numbers in [0, 1) for augmentation, multiples of 2^-24, for seeds below 2^63 and epochs below 2^32."""
    words = _words(seed, epoch, AUGMENT, (n, COLUMNS))
    return torch.from_numpy((words >> 40).astype(np.float32) * np.float32(2.0**-24))


def permutation(seed: int, epoch: int, n: int, *, stream: int = SHUFFLE) -> Int64[Tensor, " n"]:
    """Draw a random order of n samples: each draws 64 bits, and the samples are sorted by them."""
    return torch.from_numpy(np.argsort(_words(seed, epoch, stream, (n,)), kind="stable"))


def _words(seed: int, epoch: int, stream: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint64]:
    return np.random.Philox(key=seed << 64 | epoch << 32 | stream).random_raw(shape)


class Batch(NamedTuple):
    """Images as bytes, their labels, and the random numbers of their augmentation in this epoch."""

    images: UInt8[Tensor, "b channels height width"]
    labels: Int64[Tensor, " b"]
    uniforms: Float32[Tensor, "b 36"]

    def to(self, device: torch.device) -> "Batch":
        """Move the batch to a device, without waiting for a GPU."""
        return Batch(*(part.to(device, non_blocking=device.type == "cuda") for part in self))


@dataclass(kw_only=True, eq=False)
class Batches:
    """Iterable over one process's share of each batch of an epoch; batches are on the device of the dataset.

    `batch_size` counts the images of a global batch and is a multiple of `world`. Training on several processes needs
    `drop_last`: otherwise the last batch can be uneven, or empty on some processes.
    """

    dataset: ImageSet = field(kw_only=False)
    batch_size: int
    seed: int = 0
    shuffle: bool = False
    rank: int = 0
    world: int = 1
    drop_last: bool = False
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.batch_size % self.world:
            requirement = f"must be a positive multiple of the {self.world} processes"
            raise ValueError(bad("batch_size", requirement, self.batch_size))

    def __len__(self) -> int:
        """Batches of an epoch that hold an image for this process."""
        whole, rest = divmod(len(self.dataset), self.batch_size)
        begin, end = self._share(rest)
        return whole + (not self.drop_last and end > begin)

    def __iter__(self) -> Iterator[Batch]:
        n, device = len(self.dataset), self.dataset.labels.device
        order = (permutation(self.seed, self.epoch, n) if self.shuffle else torch.arange(n)).to(device)
        uniforms = uniform(self.seed, self.epoch, n).to(device)
        for number in range(len(self)):
            part = order[number * self.batch_size : (number + 1) * self.batch_size]
            begin, end = self._share(len(part))
            samples = part[begin:end]
            yield Batch(self.dataset.images[samples], self.dataset.labels[samples], uniforms[samples])

    def _share(self, size: int) -> tuple[int, int]:
        """Begin and end of this process's part of a batch; parts differ by at most one image."""
        return size * self.rank // self.world, size * (self.rank + 1) // self.world
