"""The batches of a run: what each process is given, epoch after epoch."""

from collections.abc import Iterator
from typing import final

from lightning.pytorch import Trainer

from attnconv.data.batches import Batch, Batches
from attnconv.data.images import ImageSet
from attnconv.training.settings import TrainSettings


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
            images,
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
    return Batches(images, batch_size=size, rank=trainer.global_rank, world=world)
