"""Settings of a training run. This module does not import torch.

The command line has a flag for each field, and run folders store the settings in `settings.json`.
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
    """Optimiser. Weight decay does not apply to centres and inverse widths of heads, which it would pull towards 0.

    Attributes:
        name: Adam with decoupled weight decay, or stochastic gradient descent with momentum.
        learning_rate: Maximum learning rate, which the schedule multiplies by a factor from 0 to 1.
        momentum: Momentum of SGD, or first beta of AdamW, in [0, 1).
        nesterov: Use Nesterov momentum (SGD only).
        second_beta: Second beta of AdamW, in [0, 1).
        weight_decay: Coefficient of weight decay, at least 0.
        decay_vectors: Also apply weight decay to biases and to scales of normalisation layers, as in the paper's code.
        position_rate: Learning rate of centres and inverse widths of heads, as a multiple of that of the other
            parameters. If this is 1, the centres move very little in a short run with AdamW.
        clip: Maximum L2 norm of the whole gradient, to which larger gradients are rescaled; None turns clipping off.
        label_smoothing: Label smoothing factor, in [0, 1).
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
        if self.nesterov and self.name == "adamw":
            yield Problem("nesterov", "must be off with optim.name='adamw'", fix="Pass optim.nesterov=False.")
        elif self.nesterov and fine("momentum") and not self.momentum:
            yield Problem("nesterov", "must be off when optim.momentum is 0", fix="Pass optim.momentum=0.9.")


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """Learning rate schedule. The learning rate is updated at every optimiser step.

    Attributes:
        name: Schedule after the warm-up: constant, cosine decay to 0, linear decay to 0, or steps at the milestones.
        warmup: Initial fraction of the run during which the learning rate increases linearly, in [0, 1).
        milestones: Numbers of completed epochs after which the learning rate is multiplied by the decay factor, in
            increasing order (schedule "steps" only).
        decay: Decay factor by which the learning rate is multiplied at each milestone, above 0 and at most 1 (schedule
            "steps" only).
    """

    name: ScheduleName = "cosine"
    warmup: Fraction = 0.05
    milestones: tuple[Natural, ...] = (80, 150, 250)
    decay: Annotated[float, Meta(ge=SMALLEST, le=1)] = 0.1

    def conflicts(self, fine: Fine) -> Iterator[Problem]:
        rising = all(before < after for before, after in pairwise(self.milestones))
        if self.name == "steps" and fine("milestones") and not rising:
            yield Problem("milestones", "must be increasing")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Training loop: duration, precision, device and seed.

    Attributes:
        epochs: Number of epochs, at least 1.
        batch_size: Images per optimiser step, across all processes.
        accumulate: Number of parts into which each batch is split for gradient accumulation, which reduces memory use.
            It changes the optimiser step only through dropout, batch norm, mixup and CutMix, which see one part each.
        eval_batch_size: Images per batch during evaluation.
        precision: 32: float32. 64: float64. bf16: mixed precision, with matrix products in bfloat16; float32 on devices
            that emulate bfloat16 (CPUs without AVX-512 and GPUs older than Ampere), where it would be slower.
        accelerator: Device to train on; auto selects a GPU if there is one.
        seed: Seed of all random numbers except those of the data split, at least 0.
        compile: Compile the model with torch.compile, which delays the start but reduces the time per epoch.
        test_curve: Evaluate on the test set after every epoch. The best epoch is still selected on the validation set.
        log_every: Number of optimiser steps between checks of the loss. The run stops if the loss is NaN or infinite.
        checkpoint_every: Number of epochs between checkpoints, and the maximum number of epochs that are lost if the
            run is killed. Larger numbers save time if epochs take only seconds.
    """

    ignored: ClassVar[tuple[str, ...]] = ("devices", "nodes", "tensorboard")  # settings of earlier versions

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
    """All settings of a run. `problems` lists invalid values; if there are any, `fit` raises an error with all of them.

    Attributes:
        preset: Name of the preset on which the settings are based.
        model: Architecture.
        data: Data set and its splits.
        augment: Augmentation of training images.
        optim: Optimiser.
        schedule: Learning rate schedule.
        train: Duration, precision, device and seed.
    """

    preset: str
    model: ModelSettings
    data: DataSettings = field(default_factory=DataSettings)
    augment: AugmentSettings = field(default_factory=AugmentSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    train: TrainSettings = field(default_factory=TrainSettings)

    def conflicts(self, fine: Fine) -> Iterator[Problem]:
        milestones, epochs = self.schedule.milestones, self.train.epochs
        begun = fine("schedule", "train.epochs") and self.schedule.name == "steps" and milestones
        if begun and milestones[0] >= epochs:
            requirement = f"must start below {epochs}, the number of epochs"
            yield Problem("schedule.milestones", requirement, fix="Increase train.epochs if necessary.")
