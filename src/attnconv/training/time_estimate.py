"""How long a training takes on this machine, from some of its steps."""

import itertools
import statistics
import time

import torch

from attnconv.data.image_set import Batches, Splits
from attnconv.models.classifiers import build
from attnconv.training.evaluation import device_of
from attnconv.training.loop import TrainingLoop, numerics
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
    held_out, test = len(data.validation), len(data.test)
    with numerics(device):
        loop = TrainingLoop(settings, build(settings.model), data, device)
        steps, images, end = [], [], time.monotonic() + seconds
        for batches in itertools.chain.from_iterable(loop.epoch_batches() for _ in range(train.epochs)):
            start = _now(device)
            loop.train_step(batches)
            steps.append(_now(device) - start)
            if len(steps) >= _FEWEST and time.monotonic() > end:
                break
        measured = data.validation if held_out else data.test
        few = measured.take(torch.arange(min(_EVALUATED * train.eval_batch_size, len(measured))))
        for batch in Batches(few, batch_size=train.eval_batch_size):
            start = _now(device)
            loop.tally([batch])
            images.append((_now(device) - start) / len(batch.labels))
    step, image = statistics.median(steps), statistics.median(images or [0.0])
    epoch = loop.steps_per_epoch * step + (held_out + test * train.test_curve) * image
    return train.epochs * epoch + 2 * (held_out + test) * image


def _now(device: torch.device) -> float:
    """Seconds from a fixed point, once the device has done its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.monotonic()
