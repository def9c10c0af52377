"""A run as a LightningModule: what one step computes. How long, on what and what is kept stands in ``fit``.

    batch of bytes -> augment (-> mix) -> model -> cross-entropy

All randomness is a function of the seed and of where the run stands: augmentation of (seed, epoch, sample), dropout of
(seed, epoch, batch, process). No generator's state needs to be kept, so a resumed run continues bit for bit.
"""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from attnconv.data.augmentation import augment, normalise
from attnconv.data.batches import Batch
from attnconv.data.mixup import mix
from attnconv.training.evaluation import Score, score, tally
from attnconv.training.optimisers import make_optimiser, make_scheduler
from attnconv.training.schedules import factor
from attnconv.training.settings import RunSettings


@final
class TrainingModule(LightningModule):
    """Loss, optimiser and tallies of a run.

    Args:
        model: normalised images to logits.
        settings: of the run.
        mean: normalisation of each channel.
        std: likewise.
        steps_per_epoch: optimiser steps of one epoch.
        splits: names of the sets that are measured after each epoch, in the order of their loaders.

    Attributes:
        tallies: sums over what this process has seen since ``take``: for "train" and each of the splits, which are
            taken at the end of an epoch, and for "window", taken every few training steps.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: RunSettings,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        steps_per_epoch: int,
        splits: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.settings = settings
        self.mean, self.std = mean, std
        self.steps_per_epoch = steps_per_epoch
        self.splits = tuple(splits)
        self.tallies: dict[str, Tensor] = {}

    def training_step(self, batch: Batch, index: int) -> Tensor:
        seed, epoch = self.settings.train.seed, self.current_epoch
        seed_generators(step_seed(seed, epoch, index, self.global_rank), self.device)
        images, targets = self._prepare(batch)
        logits = full(self.model(images))
        with torch.no_grad():
            self._count(("train", "window"), logits, batch.labels)
        return F.cross_entropy(logits, targets, label_smoothing=self.settings.optim.label_smoothing)

    def validation_step(self, batch: Batch, _index: int, dataloader_idx: int = 0) -> None:
        images = self._cast(normalise(batch.images, self.mean, self.std))
        self._count((self.splits[dataloader_idx],), full(self.model(images)), batch.labels)

    def configure_optimizers(self) -> Any:
        optimiser = make_optimiser(self.model, self.settings.optim)
        # A function, not a method: of a method the scheduler's state would keep the attributes.
        scheduler = make_scheduler(optimiser, lambda step: self.rate_factor(step))  # noqa: PLW0108
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def rate_factor(self, step: int) -> float:
        """What the learning rate is multiplied by at an optimiser step, counted from 0."""
        epochs = self.settings.train.epochs
        return factor(self.settings.schedule, step, steps_per_epoch=self.steps_per_epoch, epochs=epochs)

    def take(self, name: str) -> Score:
        """The score since the last call, over all processes. Every process has to call this.

        Raises:
            ValueError: if nothing was counted since then.
        """
        zero = torch.zeros(3, dtype=torch.float32 if self.device.type == "mps" else torch.float64, device=self.device)
        sums = self.tallies.pop(name, zero)
        return score(self.trainer.strategy.reduce(sums, reduce_op="sum"))

    def _prepare(self, batch: Batch) -> tuple[Tensor, Tensor]:
        changes = self.settings.augment
        images = self._cast(augment(batch.images, batch.uniforms, settings=changes, mean=self.mean, std=self.std))
        if changes.mixup == 0.0 and changes.cutmix == 0.0:
            return images, batch.labels
        classes = self.settings.model.classes
        images, targets = mix(images, batch.labels, batch.uniforms, settings=changes, classes=classes)
        return images, targets.to(images.dtype)

    def _cast(self, images: Tensor) -> Tensor:
        return images.to(next(self.model.parameters()).dtype)

    def _count(self, names: tuple[str, ...], logits: Tensor, labels: Tensor) -> None:
        sums = tally(logits, labels)
        for name in names:
            self.tallies[name] = self.tallies[name] + sums if name in self.tallies else sums


def full(logits: Float[Tensor, "b classes"]) -> Float[Tensor, "b classes"]:
    """Logits in at least 32 bits: the loss is not a matter for half precision."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def seed_generators(seed: int, device: torch.device) -> None:
    """`torch.manual_seed` of the CPU and one device alone; of every other kind it keeps a stack trace, a millisecond.

    Args:
        seed: 63 bits.
        device: where the model computes.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def step_seed(seed: int, epoch: int, batch: int, rank: int) -> int:
    """Seed of torch's generator for one forward pass: another one for each batch and process.

    Example:
        >>> len({step_seed(42, epoch, batch, rank) for epoch in (0, 1) for batch in (0, 1) for rank in (0, 1)})
        8
    """
    return int(np.random.SeedSequence((seed, epoch, batch, rank)).generate_state(1, np.uint64)[0]) >> 1  # 63 bits
