"""Batches of an image set, in an order that depends only on the seed and the epoch.

The *global* batch is cut from the epoch's order and then divided among the processes, so together they see exactly the
batches that a single process sees.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.data.image_set import ImageSet
from attnconv.data.random_numbers import permutation, uniform


class Batch(NamedTuple):
    """Images as bytes, their labels, and the random numbers of their augmentation in this epoch."""

    images: UInt8[Tensor, "b channels height width"]
    labels: Int64[Tensor, " b"]
    uniforms: Float32[Tensor, "b 36"]

    def to(self, device: torch.device) -> "Batch":
        """Move the batch to a device, without waiting for a GPU."""
        return Batch(*(part.to(device, non_blocking=device.type == "cuda") for part in self))


class Batches:
    """Iterable over one process's share of each batch of an epoch; batches are on the device of the dataset.

    `batch_size` counts the images of a global batch and is a multiple of `world`. Training on several processes needs
    `drop_last`: otherwise the last batch can be uneven, or empty on some processes.
    """

    def __init__(
        self,
        dataset: ImageSet,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = False,
        rank: int = 0,
        world: int = 1,
        drop_last: bool = False,
    ) -> None:
        if batch_size < 1 or batch_size % world:
            raise ValueError(bad("batch_size", f"must be a positive multiple of the {world} processes", batch_size))
        if drop_last and len(dataset) < batch_size:
            requirement = f"must be at most the {len(dataset)} images when incomplete batches are dropped"
            raise ValueError(bad("batch_size", requirement, batch_size))
        self.dataset = dataset
        self.batch_size, self.seed, self.shuffle, self.drop_last = batch_size, seed, shuffle, drop_last
        self.rank, self.world, self.epoch = rank, world, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, at least 0, of the next iteration."""
        self.epoch = epoch

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
