"""Batches of an image set, in an order that is a function of seed and epoch alone.

The *global* batch is cut from the epoch's order first and then divided among the processes, so two processes see
together exactly the batches that one process sees. Resuming in the middle of an epoch needs nothing but the number of
batches already done.
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
        """The batch on a device; a GPU is not waited for."""
        return Batch(*(part.to(device, non_blocking=device.type == "cuda") for part in self))


class Batches:
    """An iterable over one process's share of each batch.

    Args:
        dataset: the images; batches are on its device.
        batch_size: images of a global batch, over all processes together; a multiple of ``world``.
        seed: seed of the order and of the random numbers, at least 0.
        shuffle: whether each epoch has its own random order; otherwise the set's order.
        rank: number of this process, 0 to world - 1.
        world: number of processes.
        drop_last: leave out an incomplete last batch. Training on several processes needs this: otherwise the last
            batch can be uneven, or leave a process without an image, whose iteration then ends one batch earlier.

    Raises:
        ValueError: if a number is out of range, or ``drop_last`` would leave no batch at all.

    Example:
        >>> digits = ImageSet(torch.zeros(10, 1, 8, 8, dtype=torch.uint8), torch.arange(10))
        >>> batches = Batches(digits, batch_size=4)
        >>> len(batches), [len(batch.labels) for batch in batches]
        (3, [4, 4, 2])
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
        if batch_size < 1:
            raise ValueError(bad("batch_size", "must be at least 1", batch_size))
        if not 0 <= rank < world:
            raise ValueError(bad("rank", f"must be 0 to world - 1 = {world - 1}", rank))
        if batch_size % world:
            fix = "Choose a global batch that divides evenly among the processes."
            raise ValueError(bad("batch_size", f"must be a multiple of the {world} processes", batch_size, fix))
        if drop_last and len(dataset) < batch_size:
            fix = "Take smaller batches, or keep the incomplete one."
            requirement = f"must be at most the {len(dataset)} images when incomplete batches are dropped"
            raise ValueError(bad("batch_size", requirement, batch_size, fix))
        self.dataset = dataset
        self.batch_size, self.seed, self.shuffle, self.drop_last = batch_size, seed, shuffle, drop_last
        self.rank, self.world = rank, world
        self.epoch, self.start = 0, 0

    def set_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Choose the epoch that the next iteration goes through.

        Args:
            epoch: number of the epoch, at least 0.
            start: how many batches of it were already done (after a resume); later epochs must say 0 again.

        Raises:
            ValueError: if a number is out of range.
        """
        if epoch < 0:
            raise ValueError(bad("epoch", "must be at least 0", epoch))
        if not 0 <= start <= len(self):
            raise ValueError(bad("start", f"must be 0 to the epoch's {len(self)} batches", start))
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        """Batches of a whole epoch that hold an image for this process, whatever ``start`` says."""
        whole, rest = divmod(len(self.dataset), self.batch_size)
        begin, end = self._share(rest)
        return whole + (not self.drop_last and end > begin)

    def __iter__(self) -> Iterator[Batch]:
        n, device = len(self.dataset), self.dataset.labels.device
        order = (permutation(self.seed, self.epoch, n) if self.shuffle else torch.arange(n)).to(device)
        uniforms = uniform(self.seed, self.epoch, n).to(device)
        for number in range(self.start, len(self)):
            part = order[number * self.batch_size : (number + 1) * self.batch_size]
            begin, end = self._share(len(part))
            samples = part[begin:end]
            yield Batch(self.dataset.images[samples], self.dataset.labels[samples], uniforms[samples])

    def _share(self, size: int) -> tuple[int, int]:
        """Begin and end of this process's part of a batch: equal parts, or parts that differ by one image."""
        return size * self.rank // self.world, size * (self.rank + 1) // self.world
