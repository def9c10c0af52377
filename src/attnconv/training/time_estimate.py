"""How long a training takes on this machine, from some of its steps."""

import statistics
import time

import torch

from attnconv.data.image_set import Batches, ImageSet, Splits
from attnconv.models.classifiers import build
from attnconv.training.determinism import numerics
from attnconv.training.evaluation import device_of
from attnconv.training.loop import TrainingLoop
from attnconv.training.settings import RunSettings

_FEWEST = 5  # steps of training; a median over them leaves out the first, which allocate
_EVALUATED = 2  # batches of evaluation


def training_seconds(settings: RunSettings, data: Splits, *, seconds: float = 5.0) -> float:
    """Seconds that a whole training takes here, estimated from at least five of its steps. Nothing of it is kept.

        epochs (steps t_step + images t_image) + 2 (held-out and test images) t_image

    t_step and t_image are medians. The images of the first term are those measured after every epoch; the second term
    is for the last and the chosen epoch.
    """
    train, device = settings.train, device_of(settings.train.accelerator)
    with numerics(device):
        loop = TrainingLoop(settings, build(settings.model), data, device)
        step = statistics.median(_step_seconds(loop, seconds))
        image = _image_seconds(loop, data.validation if len(data.validation) else data.test)
    held_out, test = len(data.validation), len(data.test)
    epoch = loop.steps_per_epoch * step + (held_out + test * train.test_curve) * image
    return train.epochs * epoch + 2 * (held_out + test) * image


def _step_seconds(loop: TrainingLoop, seconds: float) -> list[float]:
    end, found = time.monotonic() + seconds, []
    for _ in range(loop.settings.train.epochs):
        for batches in loop.epoch_batches():
            start = _now(loop.device)
            loop.train_step(batches)
            found.append(_now(loop.device) - start)
            if len(found) >= _FEWEST and time.monotonic() > end:
                return found
        loop.epoch += 1
    return found


def _image_seconds(loop: TrainingLoop, images: ImageSet) -> float:
    """Median over some batches of evaluation; 0 where there are no images."""
    size, found = loop.settings.train.eval_batch_size, []
    few = images.take(torch.arange(min(_EVALUATED * size, len(images))))
    for batch in Batches(few, batch_size=size):
        start = _now(loop.device)
        loop.tally([batch])
        found.append((_now(loop.device) - start) / len(batch.labels))
    return statistics.median(found) if found else 0.0


def _now(device: torch.device) -> float:
    """Seconds from a fixed point, once the device has done its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.monotonic()
