"""How long a training takes on this machine, from some of its batches."""

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from attnconv.data.image_set import Splits
from attnconv.training.determinism import numerics
from attnconv.training.fitting import make_trainer, train_model
from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import RunSettings

_FEWEST = 5  # batches of training; a median over them leaves out the first, which allocate
_EVALUATED = 2  # batches of each set that is measured


def training_seconds(settings: RunSettings, data: Splits, *, seconds: float = 5.0) -> float:
    """Seconds that a whole training takes here, estimated from some of its batches.

        epochs (batches t_batch + images t_image) + 2 (held-out and test images) t_image

    with medians t_batch over batches of training and t_image over those of evaluation, divided by their images. The
    images of the first term are those measured after every epoch; the second stands for the scores of the last and the
    chosen epoch at the end. Nothing is kept of what was trained.

    Args:
        settings: Of the run, in one process.
        data: What it trains on.
        seconds: How long to train, at least; five batches in any case, or the whole run where it has fewer.
    """
    train, clock = settings.train, _Clock(seconds)
    size = _EVALUATED * train.eval_batch_size
    validation, test_images = (part.take(torch.arange(min(size, len(part)))) for part in (data.validation, data.test))
    few = replace(data, validation=validation, test=test_images)
    with numerics(settings), tempfile.TemporaryDirectory() as path:
        folder = RunFolder(Path(path))
        train_model(settings, few, make_trainer(settings, folder, clock), folder)
    batches = len(data.train) // train.batch_size * train.accumulate
    each_batch = statistics.median(clock.batches)
    each_image = statistics.median(clock.images) if clock.images else 0.0
    held_out, test = len(data.validation), len(data.test)
    epoch = batches * each_batch + (held_out + test * train.test_curve) * each_image
    return train.epochs * epoch + 2 * (held_out + test) * each_image


@final
class _Clock(Callback):
    """Times the batches of a training and stops it.

    Args:
        seconds: After which to stop.

    Attributes:
        batches: Seconds of each batch of training.
        images: Seconds of each batch of evaluation, divided by its images.
    """

    def __init__(self, seconds: float) -> None:
        self.batches: list[float] = []
        self.images: list[float] = []
        self._end = time.monotonic() + seconds
        self._start = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._start = _now(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = _now(pl_module)
        self.batches.append(now - self._start)
        trainer.should_stop = len(self.batches) >= _FEWEST and now > self._end

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._start = _now(pl_module)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.images.append((_now(pl_module) - self._start) / len(batch.labels))


def _now(module: LightningModule) -> float:
    """Seconds since some moment, when the module's device has done what it was handed."""
    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)
    elif module.device.type == "mps":
        torch.mps.synchronize()
    return time.monotonic()
