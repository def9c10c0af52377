"""Short runs for the tests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from attnconv.data.settings import AugmentSettings, DataSettings
from attnconv.models.settings import AttentionSettings
from attnconv.training.loop import TrainingLoop
from attnconv.training.settings import OptimSettings, RunSettings, ScheduleSettings, TrainSettings

MODEL = AttentionSettings(
    layers=1,
    heads=3,
    width=16,
    mlp_width=16,
    downsampling=2,
    dropout=0.1,
    image_size=8,
    image_channels=1,
    norm="pre",
    norm_epsilon=1e-5,
    max_shift=3,
)


def tiny(*, epochs: int = 2, limit: int | None = 120, **train: object) -> RunSettings:
    """Return settings of a run of a few seconds on the embedded digits; dropout and augmentation use random numbers."""
    settings = TrainSettings(epochs=epochs, batch_size=20, log_every=2)
    return RunSettings(
        preset="tiny",
        model=MODEL,
        data=DataSettings(name="digits", limit=limit, validation=40),
        augment=AugmentSettings(recipe="paper"),
        optim=OptimSettings(name="adamw", learning_rate=5e-3, weight_decay=0.01, position_rate=10.0, clip=1.0),
        schedule=ScheduleSettings(name="cosine", warmup=0.1),
        train=replace(settings, **train),  # type: ignore[arg-type]
    )


class CutError(RuntimeError):
    """Error that interrupts a run in a test."""


def cut() -> None:
    raise CutError


@contextmanager
def before_epoch(epoch: int, act: Callable[[], None] = cut) -> Iterator[None]:
    """Call `act` before an epoch (counted from 0) of every run."""
    train_epoch = TrainingLoop.train_epoch

    def acting(loop: TrainingLoop, on_step: Callable[[], None]) -> None:
        if loop.epoch == epoch:
            act()
        train_epoch(loop, on_step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "train_epoch", acting)
        yield
