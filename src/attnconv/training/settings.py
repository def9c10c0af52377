"""Settings of a training run: frozen dataclasses of plain values, free of torch.

The command line has a flag for each field, and the run folder keeps them as `settings.json`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from attnconv._util.settings import (
    SMALLEST,
    Fine,
    Fraction,
    Magnitude,
    Natural,
    Positive,
    Problem as Problem,
    Seed,
    SettingsError as SettingsError,
    problems as problems,
)
from attnconv.data.settings import AugmentSettings, DataSettings
from attnconv.models.settings import ModelSettings

OptimiserName = Literal["sgd", "adamw"]
ScheduleName = Literal["constant", "cosine", "linear", "steps"]
PrecisionName = Literal["32", "bf16", "64"]
AcceleratorName = Literal["auto", "cpu", "cuda", "mps"]


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """The optimiser. Centres and spreads of heads never get weight decay: it would pull every head to its own pixel.

    Attributes:
        name: Stochastic gradient descent with momentum, or Adam with decoupled weight decay.
        learning_rate: The highest learning rate; the schedule multiplies it by a factor between 0 and 1.
        momentum: Momentum of SGD, and the first beta of AdamW; from 0 up to but not including 1.
        nesterov: Look ahead along the momentum (SGD only).
        second_beta: Decay of AdamW's second moment, from 0 up to but not including 1.
        weight_decay: Strength of weight decay, at least 0.
        decay_vectors: Also decay biases and the scales of normalisation layers, as the paper's code does.
        position_rate: Learning rate of centres and spreads, as a multiple of the others'. Pixels are a larger unit than
            weights: with AdamW, 1 hardly moves the heads in a short run.
        clip: Scale the gradient down to this norm when it is longer; None never does.
        label_smoothing: Share of each label that is spread over all classes, from 0 up to but not including 1.
    """

    name: OptimiserName = "sgd"
    learning_rate: Positive = 0.1
    momentum: Fraction = 0.9
    nesterov: bool = False
    second_beta: Fraction = 0.999
    weight_decay: Magnitude = 1e-4
    decay_vectors: bool = True
    position_rate: Positive = 1.0
    clip: Positive | None = None
    label_smoothing: Fraction = 0.0

    def conflicts(self, fine: Fine) -> Iterator[Problem]:
        """Rules between the fields."""
        if self.nesterov and self.name == "adamw":
            yield Problem("nesterov", "must be off with optim.name='adamw'", fix="Pass optim.nesterov=False.")
        elif self.nesterov and fine("momentum") and not self.momentum:
            yield Problem("nesterov", "must be off when optim.momentum is 0", fix="Pass optim.momentum=0.9.")


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """The learning rate's factor over the run, computed anew at every optimiser step.

    Attributes:
        name: After the warm-up: constant, half a cosine to 0, a straight line to 0, or steps at the milestones.
        warmup: Part of the run during which the factor rises in a straight line, from 0 up to but not including 1.
        milestones: Epochs after which the factor is multiplied by the decay, in rising order (schedule "steps" only).
        decay: What each milestone multiplies the factor by, above 0 and at most 1 (schedule "steps" only).
    """

    name: ScheduleName = "cosine"
    warmup: Fraction = 0.05
    milestones: tuple[Natural, ...] = (80, 150, 250)
    decay: Annotated[float, Meta(ge=SMALLEST, le=1)] = 0.1

    def conflicts(self, fine: Fine) -> Iterator[Problem]:
        """Rules between the fields."""
        rising = all(before < after for before, after in pairwise(self.milestones))
        if self.name == "steps" and fine("milestones") and not rising:
            yield Problem("milestones", "must be growing whole numbers of at least 1")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How long, how exactly and on what to train.

    Attributes:
        epochs: Passes over the training images, at least 1.
        batch_size: Images of one optimiser step, over all processes and accumulated parts together.
        accumulate: Parts into which each process cuts its share of a batch, to need less memory; the step stays the
            same.
        eval_batch_size: Images per batch of evaluation.
        precision: Numbers of 32 bits, bf16 in matrix products (mixed precision), or 64 bits.
        accelerator: Device to train on; "auto" takes a GPU when there is one.
        seed: All randomness is a function of this, the epoch and the sample, at least 0.
        compile: Compile the model with torch.compile before training: slower to start, then faster.
        test_curve: Also measure the test set after every epoch. The choice of an epoch never depends on it.
        log_every: Optimiser steps between two checks that the loss of the epoch is still finite.
        checkpoint_every: Epochs between two checkpoints: metrics, weights and the training state. A run that is killed
            loses at most so many; a larger number saves time where epochs take seconds.
    """

    ignored: ClassVar[tuple[str, ...]] = ("devices", "nodes", "tensorboard")  # of earlier versions

    epochs: Natural = 300
    batch_size: Natural = 100
    accumulate: Natural = 1
    eval_batch_size: Natural = 500
    precision: PrecisionName = "32"
    accelerator: AcceleratorName = "auto"
    seed: Seed = 42
    compile: bool = False
    test_curve: bool = False
    log_every: Natural = 50
    checkpoint_every: Natural = 1


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Everything that decides what a run computes; `fit` refuses wrong values all at once, as `problems` lists them.

    Attributes:
        preset: Name under which the model's settings are known; a label once the settings are changed.
        model: The architecture.
        data: The images and how they are split.
        augment: Changes to training images.
        optim: The optimiser.
        schedule: The learning rate over the run.
        train: Length, precision, device, seed.
    """

    preset: str
    model: ModelSettings
    data: DataSettings = field(default_factory=DataSettings)
    augment: AugmentSettings = field(default_factory=AugmentSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    train: TrainSettings = field(default_factory=TrainSettings)

    def conflicts(self, fine: Fine) -> Iterator[Problem]:
        """Rules between the groups."""
        milestones, epochs = self.schedule.milestones, self.train.epochs
        begun = fine("schedule", "train.epochs") and self.schedule.name == "steps" and milestones
        if begun and milestones[0] >= epochs:
            requirement = f"must begin before the last of the {epochs} epochs"
            yield Problem("schedule.milestones", requirement, fix="Or raise train.epochs.")
