"""The batches of a run: what each process is given, epoch after epoch."""

from collections.abc import Iterator
from typing import final

import torch
from lightning.pytorch import Trainer

from attnconv.data.batches import Batch, Batches
from attnconv.data.image_set import ImageSet
from attnconv.training.settings import TrainSettings

_PART = 1 / 4  # of a GPU's free memory that a set may take


@final
class EpochBatches:
    """The training batches of this process, in the order of the epoch that the trainer is in.

    Batches that do not fill a whole optimiser step are left out; every epoch leaves out other images.

    Args:
        images: the training set, of at least one whole batch.
        train: ``batch_size`` is over all processes and accumulated parts together.
        trainer: knows the epoch and which process this is.
    """

    def __init__(self, images: ImageSet, train: TrainSettings, trainer: Trainer) -> None:
        self._trainer = trainer
        self._count = len(images) // train.batch_size * train.accumulate
        self._batches = Batches(
            nearby(images, trainer.strategy.root_device),
            batch_size=train.batch_size // train.accumulate,
            seed=train.seed,
            shuffle=True,
            rank=trainer.global_rank,
            world=trainer.world_size,
            drop_last=True,
        )

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        # This line runs when the first batch is asked for: only then does a resumed trainer know its epoch.
        self._batches.set_epoch(self._trainer.current_epoch)
        for _, batch in zip(range(self._count), self._batches, strict=False):
            yield batch


def evaluation_batches(images: ImageSet, train: TrainSettings, trainer: Trainer) -> Batches:
    """This process's share of a set that is measured, in the set's order."""
    world = trainer.world_size
    size = max(1, train.eval_batch_size // world) * world
    return Batches(nearby(images, trainer.strategy.root_device), batch_size=size, rank=trainer.global_rank, world=world)


def nearby(images: ImageSet, device: torch.device) -> ImageSet:
    """A set on the GPU, where a batch is one gather and no copy; as it is where that would take a quarter of the room.

    Example:
        >>> digits = ImageSet(torch.zeros(10, 1, 8, 8, dtype=torch.uint8), torch.arange(10))
        >>> nearby(digits, torch.device("cpu")) is digits
        True
    """
    if device.type != "cuda":
        return images
    free, _ = torch.cuda.mem_get_info(device)
    return images.to(device) if images.images.nbytes + images.labels.nbytes <= _PART * free else images
