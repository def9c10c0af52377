"""In-memory image sets, validation splits, and batches with their random numbers.

All data sets of this library fit in memory as uint8 (CIFAR-10: 184 MB), so that a batch is one gather without worker
processes. The order of the images depends only on the seed and the epoch. *Global* batches are taken from it and then
divided among the processes, which therefore train on the same batches as a single process.

Random numbers are a function of (seed, epoch, sample), computed by NumPy's Philox generator for the whole set at once.
They are its raw output, which is the same in all releases of NumPy, unlike that of `np.random.Generator`.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from attnconv._util.errors import bad

COLUMNS = 36  # random numbers per sample and epoch: 8 for `augment` and 28 for `mix`
SHUFFLE, SPLIT, AUGMENT = range(3)  # independent streams of random numbers


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images in memory.

    Args:
        images: Images (n, channels, height, width), uint8.
        labels: Class index of each image, from 0, int64.

    Raises:
        ValueError: If the shapes or dtypes are invalid, or the images have no pixels or channels.

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
            raise ValueError(bad("labels", f"must be int64 class indices, one per image ({shape[0]})", got))

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
        """Copy the set to a device."""
        return ImageSet(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True, eq=False)
class Splits:
    """Training, validation and test images of a data set.

    Args:
        train: Training images.
        validation: Images held out of the training set for validation; may be empty.
        test: Test images.
        classes: Names of the classes, in the order of the labels.
        mean: Mean of each channel over all training images, before some are held out, for pixels scaled to [0, 1].
        std: Standard deviation of each channel, over the same images.
        source: Description of the source of the images.
    """

    train: ImageSet
    validation: ImageSet
    test: ImageSet
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str = ""

    def checksum(self) -> str:
        """Return a checksum of the images and labels of each set, in hexadecimal."""
        found = 0
        for images in (self.train, self.validation, self.test):
            for tensor in (images.labels, images.images):
                found = zlib.crc32(tensor.contiguous().numpy().data, found)
        return f"{found:08x}"


def held_out(
    labels: Int64[Tensor, " n"], count: int, *, seed: int, stratify: bool = True
) -> tuple[Int64[Tensor, " kept"], Int64[Tensor, " count"]]:
    """Split a training set; return the indices of the remaining images and of the held-out images, both ascending.

    The held-out images are the first `count` images in a random order or, with `stratify`, the first images of each
    class in this order, in numbers that differ from exact proportions by less than one.
    """
    n = len(labels)
    if not 0 <= count < max(n, 1):
        fix = "Training needs at least one image."
        raise ValueError(bad("data.validation", f"must be from 0 to {n - 1} for {n} training images", count, fix))
    order = permutation(seed, 0, n, stream=SPLIT)
    strata = (labels if stratify else torch.zeros_like(labels))[order]
    sizes, out = torch.bincount(strata), torch.zeros(n, dtype=torch.bool)
    shares = sizes * count // max(n, 1)
    largest_remainders = torch.argsort(sizes * count % max(n, 1), descending=True, stable=True)
    shares[largest_remainders[: count - int(shares.sum())]] += 1  # ties are resolved in favour of the lower class
    for stratum, share in enumerate(shares.tolist()):
        out[order[strata == stratum][:share]] = True
    return (~out).nonzero()[:, 0], out.nonzero()[:, 0]


def channel_statistics(images: UInt8[Tensor, "n c height width"]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute the mean and standard deviation (1 instead of 0) of each channel, for pixels scaled to [0, 1]."""
    means, deviations = [], []
    values = torch.arange(256, dtype=torch.float64, device=images.device) / 255
    for channel in images.unbind(1):
        shares = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        means.append(float(shares @ values))
        deviations.append(float(shares @ (values - means[-1]).square()) ** 0.5 or 1.0)
    return tuple(means), tuple(deviations)


def uniform(seed: int, epoch: int, n: int) -> Float32[Tensor, "n 36"]:
    """Sample multiples of 2^-24 in [0, 1), uniformly. The seed must be below 2^63, and the epoch below 2^32."""
    words = _words(seed, epoch, AUGMENT, (n, COLUMNS))
    return torch.from_numpy((words >> 40).astype(np.float32) * np.float32(2.0**-24))


def permutation(seed: int, epoch: int, n: int, *, stream: int = SHUFFLE) -> Int64[Tensor, " n"]:
    """Return a random order of n samples, by sorting random 64-bit numbers."""
    return torch.from_numpy(np.argsort(_words(seed, epoch, stream, (n,)), kind="stable"))


def _words(seed: int, epoch: int, stream: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint64]:
    return np.random.Philox(key=seed << 64 | epoch << 32 | stream).random_raw(shape)


class Batch(NamedTuple):
    """Images as uint8, their labels, and the random numbers for their augmentation in this epoch."""

    images: UInt8[Tensor, "b channels height width"]
    labels: Int64[Tensor, " b"]
    uniforms: Float32[Tensor, "b 36"]

    def to(self, device: torch.device) -> "Batch":
        """Copy the batch to a device, asynchronously for a GPU."""
        return Batch(*(part.to(device, non_blocking=device.type == "cuda") for part in self))


@dataclass(kw_only=True, eq=False)
class Batches:
    """Iterable over the batches of an epoch; yields one process's share of each, on the device of the data set.

    `batch_size` is the size of a global batch, a multiple of the number of processes (`world`). With several processes,
    training requires `drop_last`, since otherwise the shares of the last batch may differ in size or be empty.
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
            requirement = f"must be a positive multiple of {self.world}, the number of processes"
            raise ValueError(bad("batch_size", requirement, self.batch_size))

    def __len__(self) -> int:
        """Number of batches in an epoch with at least one image for this process."""
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
        """Return the start and end of this process's share of a batch; shares differ by at most one image."""
        return size * self.rank // self.world, size * (self.rank + 1) // self.world
