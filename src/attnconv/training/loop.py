"""The training loop, in plain torch.

    for each epoch
        for each batch: loss, gradients, clip, optimiser step, learning rate of the next step
        evaluate

Under torchrun every process computes its share of each batch, and DistributedDataParallel averages the gradients.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from attnconv.data.batches import Batch, Batches
from attnconv.data.image_set import ImageSet, Splits
from attnconv.data.random_numbers import WordsOfASet
from attnconv.models.settings import ResNetSettings
from attnconv.training.evaluation import Score, dtype_of, score, tally_batches, zero_tally
from attnconv.training.optimisers import make_optimiser, make_scheduler
from attnconv.training.processes import all_sum, rank, world_size
from attnconv.training.schedules import factor
from attnconv.training.settings import RunSettings
from attnconv.training.training_step import TrainingStep

_PART = 1 / 4  # of a GPU's free memory that a set of images may take


@final
class TrainingLoop:
    """Trains a model on a set of images and evaluates it.

    Args:
        settings: of the run.
        model: at its start; it is moved to the device.
        data: the images.
        device: of this process.

    Attributes:
        epoch: complete epochs.
        step: optimiser steps taken.
        steps_per_epoch: optimiser steps of one epoch. Images that do not fill a batch are left out, other ones in
            every epoch.
    """

    def __init__(self, settings: RunSettings, model: nn.Module, data: Splits, device: torch.device) -> None:
        train = settings.train
        self.settings, self.device = settings, device
        self.mean, self.std = data.mean, data.std
        self.epoch = self.step = 0
        self.steps_per_epoch = len(data.train) // train.batch_size
        self.model = model.to(device=device, dtype=dtype_of(train.precision))
        if isinstance(settings.model, ResNetSettings):
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # it does take it alone
        if train.compile:
            self.model.compile()
        self._parallel = DistributedDataParallel(self.model) if world_size() > 1 else self.model
        self._optimiser = make_optimiser(self.model, settings.optim)
        self._scheduler = make_scheduler(self._optimiser, lambda step: self._factor(step))  # noqa: PLW0108  # its state keeps a method's attributes
        self._step = TrainingStep(settings, mean=data.mean, std=data.std, draw=WordsOfASet(len(data.train)))
        self._batches = Batches(
            nearby(data.train, device),
            batch_size=train.batch_size // train.accumulate,
            seed=train.seed,
            shuffle=True,
            rank=rank(),
            world=world_size(),
            drop_last=True,
        )
        measured = {"validation": data.validation, **({"test": data.test} if train.test_curve else {})}
        self._measured = {name: nearby(images, device) for name, images in measured.items() if len(images)}
        self._epoch_sums, self._window_sums = zero_tally(device), zero_tally(device)

    @property
    def learning_rate(self) -> float:
        """Of the last step."""
        return self.settings.optim.learning_rate * self._factor(max(0, self.step - 1))

    def train_epoch(self, on_step: Callable[[], None]) -> None:
        """Take the steps of one epoch.

        Args:
            on_step: called after each of them.
        """
        self.model.train()
        self._epoch_sums.zero_()
        for batches in self.epoch_batches():
            self.train_step(batches)
            on_step()
        self.epoch += 1

    def epoch_batches(self) -> Iterator[Iterator[Batch]]:
        """The batches of the epoch, for each optimiser step those that it accumulates."""
        self._batches.set_epoch(self.epoch)
        batches = iter(self._batches)
        for _ in range(self.steps_per_epoch):
            yield itertools.islice(batches, self.settings.train.accumulate)

    def train_step(self, batches: Iterator[Batch]) -> None:
        """Take one optimiser step, with the mean of the gradients of some batches."""
        accumulate, clip = self.settings.train.accumulate, self.settings.optim.clip
        self._optimiser.zero_grad()
        for part, batch in enumerate(batches):
            index = self.step % self.steps_per_epoch * accumulate + part
            with nullcontext() if part + 1 == accumulate else self._unsynchronised():
                loss, sums = self._step.forward(self._parallel, batch.to(self.device), epoch=self.epoch, index=index)
                (loss / accumulate).backward()
            self._epoch_sums += sums
            self._window_sums += sums
        if clip is not None:
            parameters = [value for group in self._optimiser.param_groups for value in group["params"]]
            nn.utils.clip_grad_norm_(parameters, clip)
        self._optimiser.step()
        self._scheduler.step()
        self.step += 1

    def evaluate(self) -> dict[str, Score]:
        """Evaluate after an epoch: scores of its training images, as they were met, and of the other sets."""
        scores = {"train": score(all_sum(self._epoch_sums))}
        for name, images in self._measured.items():
            size = max(1, self.settings.train.eval_batch_size // world_size()) * world_size()
            batches = Batches(images, batch_size=size, rank=rank(), world=world_size())
            precision = self.settings.train.precision
            sums = tally_batches(
                self.model, batches, mean=self.mean, std=self.std, precision=precision, device=self.device
            )
            scores[name] = score(all_sum(sums))
        return scores

    def recent(self) -> Score:
        """The score on training images since the last call, of all processes together."""
        sums = all_sum(self._window_sums)
        self._window_sums.zero_()
        return score(sums)

    def state(self) -> dict[str, Any]:
        """What continues the training after a complete epoch, as plain values and tensors."""
        return {
            "epoch": self.epoch,
            "model": self.model.state_dict(),
            "optimizer": self._optimiser.state_dict(),
            "scheduler": self._scheduler.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.epoch, self.step = state["epoch"], state["epoch"] * self.steps_per_epoch
        self.model.load_state_dict(state["model"])
        self._optimiser.load_state_dict(state["optimizer"])
        self._scheduler.load_state_dict(state["scheduler"])

    def _unsynchronised(self) -> AbstractContextManager[None]:
        """Keep gradients to this process until the last part of a batch."""
        return self._parallel.no_sync() if isinstance(self._parallel, DistributedDataParallel) else nullcontext()

    def _factor(self, step: int) -> float:
        epochs = self.settings.train.epochs
        return factor(self.settings.schedule, step, steps_per_epoch=self.steps_per_epoch, epochs=epochs)


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
