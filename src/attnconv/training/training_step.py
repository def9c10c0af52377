"""The forward pass of a training step.

    batch of bytes -> augment (-> mix) -> model -> cross-entropy

All randomness is a function of the seed and of where the run stands: augmentation of (seed, epoch, sample), dropout of
(seed, epoch, batch, process). No generator's state needs to be kept, so a resumed run continues bit for bit.
"""

from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnconv.data.augmentation import augment
from attnconv.data.batches import Batch
from attnconv.data.mixup import mix
from attnconv.data.random_numbers import MASK, Words, threefry, words
from attnconv.training.evaluation import autocast, dtype_of, full, tally
from attnconv.training.processes import rank
from attnconv.training.settings import RunSettings

_DROPOUT_STREAM = 1 << 16  # far from the streams of attnconv.data.random_numbers


@final
class TrainingStep:
    """Loss of a model on one batch.

    Args:
        settings: of the run.
        mean: normalisation of each channel.
        std: likewise.
        draw: where the random numbers of images come from.
    """

    def __init__(
        self, settings: RunSettings, *, mean: tuple[float, ...], std: tuple[float, ...], draw: Words = words
    ) -> None:
        self.settings = settings
        self.mean, self.std, self.draw = mean, std, draw

    def forward(
        self, model: nn.Module, batch: Batch, *, epoch: int, index: int
    ) -> tuple[Float[Tensor, ""], Float[Tensor, " 3"]]:
        """Loss of a batch, for the backward pass, and its tally (see ``attnconv.training.evaluation``).

        Args:
            model: normalised images to logits, on the batch's device.
            batch: of this process.
            epoch: complete epochs.
            index: number of the batch in its epoch.
        """
        train, device = self.settings.train, batch.images.device
        seed_generators(step_seed(train.seed, epoch, index, rank()), device)
        with autocast(train.precision, device):
            images, targets = self._inputs(batch, epoch)
            logits = full(model(images))
            with torch.no_grad():
                sums = tally(logits, batch.labels)
            return F.cross_entropy(logits, targets, label_smoothing=self.settings.optim.label_smoothing), sums

    def _inputs(self, batch: Batch, epoch: int) -> tuple[Tensor, Tensor]:
        """Augmented images, and their labels or, where images are mixed, the probabilities of their classes."""
        changes, seed = self.settings.augment, self.settings.train.seed
        images = augment(
            batch.images,
            batch.samples,
            seed=seed,
            epoch=epoch,
            settings=changes,
            mean=self.mean,
            std=self.std,
            draw=self.draw,
        ).to(dtype_of(self.settings.train.precision))
        if changes.mixup == 0.0 and changes.cutmix == 0.0:
            return images, batch.labels
        images, targets = mix(
            images,
            batch.labels,
            batch.samples,
            seed=seed,
            epoch=epoch,
            settings=changes,
            classes=self.settings.model.classes,
            draw=self.draw,
        )
        return images, targets.to(images.dtype)


def seed_generators(seed: int, device: torch.device) -> None:
    """`torch.manual_seed` of the CPU and one device only; of every other kind it keeps a stack trace, a millisecond.

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
    key = threefry((seed >> 32, seed & MASK), (epoch, _DROPOUT_STREAM))
    high, low = threefry(key, (batch, rank))
    return (high << 31) ^ low  # 63 bits
