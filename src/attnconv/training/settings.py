"""What a training run is made of: frozen dataclasses of plain values, free of torch.

The command line is derived from them (one flag for each field, its help is the sentence under the field), the run
folder keeps them as ``settings.json``, and ``problems`` names everything that is wrong with them at once, in the
spelling of the flags, before any work begins.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from attnconv._util.errors import bad
from attnconv._util.value_checks import is_real, is_whole
from attnconv.data.settings import AugmentSettings, DataSettings, problems as data_problems
from attnconv.models.settings import ModelSettings, problems as model_problems
from attnconv.training.processes import world_size

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
            weights: with AdamW 1 leaves heads almost where they began in a short run.
        clip: Scale the gradient down to this norm when it is longer; None never does.
        label_smoothing: Part of each label that is spread over all classes, from 0 up to but not including 1.
    """

    name: OptimiserName = "sgd"
    learning_rate: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    second_beta: float = 0.999
    weight_decay: float = 1e-4
    decay_vectors: bool = True
    position_rate: float = 1.0
    clip: float | None = None
    label_smoothing: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """The learning rate's factor over the run, computed anew at every optimiser step."""

    name: ScheduleName = "cosine"
    """After the warm-up: constant, half a cosine to 0, a straight line to 0, or steps at the milestones."""
    warmup: float = 0.05
    """Part of the run during which the factor rises in a straight line, from 0 up to but not including 1."""
    milestones: tuple[int, ...] = (80, 150, 250)
    """Epochs after which the factor is multiplied by --schedule.decay (schedule "steps" only)."""
    decay: float = 0.1
    """What each milestone multiplies the factor by, above 0 and at most 1 (schedule "steps" only)."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How long, how exactly and on what to train.

    Attributes:
        epochs: Passes over the training images, at least 1.
        batch_size: Images of one optimiser step, over all processes and accumulated parts together.
        accumulate: Parts into which each process cuts its share of a batch, to need less memory; the step stays the
            same.
        eval_batch_size: Images at once when measuring accuracy.
        precision: Numbers of 32 bits, bf16 in matrix products (mixed precision), or 64 bits.
        accelerator: Where to train; "auto" takes a GPU when there is one.
        seed: All randomness is a function of this, the epoch and the sample, at least 0.
        compile: Compile the model with torch.compile before training: slower to start, then faster.
        test_curve: Also measure the test set after every epoch. The choice of an epoch never looks at it.
        tensorboard: Write curves for TensorBoard beside metrics.jsonl. Where they cannot be written, training goes on.
        log_every: Optimiser steps between two points of the training curve in TensorBoard, and between two looks at the
            loss.
        checkpoint_every: Epochs between two moments at which metrics, weights and what a resume needs are written. A
            run that is killed loses at most so many; where an epoch takes seconds, writing every time takes a part of
            them.
    """

    epochs: int = 300
    batch_size: int = 100
    accumulate: int = 1
    eval_batch_size: int = 500
    precision: PrecisionName = "32"
    accelerator: AcceleratorName = "auto"
    seed: int = 42
    compile: bool = False
    test_curve: bool = False
    tensorboard: bool = True
    log_every: int = 50
    checkpoint_every: int = 1


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Everything that decides what a run computes.

    Attributes:
        preset: name under which the model's settings are known; a label once the settings are changed.
        model: the architecture.
        data: the images and how they are split.
        augment: what is done to training images.
        optim: the optimiser.
        schedule: the learning rate over the run.
        train: length, precision, device, seed.
    """

    preset: str
    model: ModelSettings
    data: DataSettings = field(default_factory=DataSettings)
    augment: AugmentSettings = field(default_factory=AugmentSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    train: TrainSettings = field(default_factory=TrainSettings)


class SettingsError(ValueError):
    """Settings that cannot be run. The message holds one line for each problem.

    Attributes:
        problems: the lines.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def problems(settings: RunSettings) -> list[str]:
    """Everything that is wrong with the settings, one sentence each, in the spelling of the command line's flags.

    What only the data can tell (too few images, other sizes) is found by ``attnconv.training.fit`` once they are read.

    Example:
        >>> from attnconv.models.presets import PRESETS
        >>> wrong = TrainSettings(epochs=0, batch_size=10, accumulate=3)
        >>> for line in problems(RunSettings(preset="quadratic", model=PRESETS["quadratic"], train=wrong)):
        ...     print(line)
        --epochs: must be a whole number of at least 1, got 0.
        --batch-size: must be a multiple of 3 (processes x accumulate), got 10. Take 12.
    """
    found = [line.replace("--model.", "--", 1) for line in model_problems(settings.model)]
    found += data_problems(settings.data) + data_problems(settings.augment)
    found += _optim_problems(settings.optim)
    found += _schedule_problems(settings.schedule, settings.train.epochs)
    found += _train_problems(settings.train)
    return found


def _optim_problems(optim: OptimSettings) -> list[str]:
    check = _Checks(optim, "--optim.")
    check.choice("name", get_args(OptimiserName))
    check.above("learning_rate", 0.0)
    check.above("position_rate", 0.0)
    for name in ("momentum", "second_beta", "label_smoothing"):
        check.fraction(name)
    check.at_least("weight_decay", 0.0)
    if optim.clip is not None:
        check.above("clip", 0.0)
    if optim.nesterov and optim.name == "adamw":
        check.add("nesterov", "must be off with --optim.name adamw", fix="Pass --optim.no-nesterov.")
    elif optim.nesterov and not optim.momentum:
        check.add("nesterov", "must be off when --optim.momentum is 0", fix="Pass --optim.momentum 0.9.")
    return check.messages


def _schedule_problems(schedule: ScheduleSettings, epochs: Any) -> list[str]:
    check = _Checks(schedule, "--schedule.")
    check.choice("name", get_args(ScheduleName))
    check.fraction("warmup")
    check.above("decay", 0.0)
    if check.good("decay") and schedule.decay > 1:
        check.add("decay", "must be at most 1")
    if schedule.name != "steps":
        return check.messages
    stones = schedule.milestones
    if not all(is_whole(stone, 1) for stone in stones) or list(stones) != sorted(set(stones)):
        check.add("milestones", "must be growing whole numbers of at least 1")
    elif stones and is_whole(epochs, 1) and stones[0] >= epochs:
        check.add("milestones", f"must begin before the last of the {epochs} epochs", fix="Or raise --epochs.")
    return check.messages


def _train_problems(train: TrainSettings) -> list[str]:
    check = _Checks(train, "--")
    for name in ("epochs", "batch_size", "accumulate", "eval_batch_size", "log_every", "checkpoint_every"):
        check.whole(name, 1)
    check.whole("seed", 0)
    if check.good("seed") and train.seed >= 2**63:
        check.add("seed", "must be below 2^63")
    check.choice("precision", get_args(PrecisionName))
    check.choice("accelerator", get_args(AcceleratorName))
    if check.good("batch_size", "accumulate"):
        parts = world_size() * train.accumulate
        if train.batch_size % parts:
            fix = f"Take {math.ceil(train.batch_size / parts) * parts}."
            check.add("batch_size", f"must be a multiple of {parts} (processes x accumulate)", fix=fix)
    if train.accelerator == "mps" and train.precision == "64":
        check.add(
            "precision", "must be 32 or bf16 on mps, which has no 64-bit numbers", fix="Or pass --accelerator cpu."
        )
    return check.messages


class _Checks:
    """Collects the messages about one group's fields."""

    def __init__(self, settings: object, prefix: str) -> None:
        self.messages: list[str] = []
        self._settings = settings
        self._prefix = prefix
        self._wrong: set[str] = set()

    def good(self, *names: str) -> bool:
        """Whether none of these fields has a message yet."""
        return self._wrong.isdisjoint(names)

    def add(self, name: str, requirement: str, *, fix: str = "") -> None:
        flag = self._prefix + name.replace("_", "-")
        self.messages.append(bad(flag, requirement, repr(getattr(self._settings, name)), fix))
        self._wrong.add(name)

    def choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self._settings, name) not in choices:
            self.add(name, f"must be one of {', '.join(choices)}")

    def whole(self, name: str, minimum: int) -> None:
        if not is_whole(getattr(self._settings, name), minimum):
            self.add(name, f"must be a whole number of at least {minimum}")

    def above(self, name: str, minimum: float) -> None:
        value = getattr(self._settings, name)
        if not (is_real(value) and value > minimum):
            self.add(name, f"must be a finite number above {minimum:g}")

    def at_least(self, name: str, minimum: float) -> None:
        value = getattr(self._settings, name)
        if not (is_real(value) and value >= minimum):
            self.add(name, f"must be a finite number of at least {minimum:g}")

    def fraction(self, name: str) -> None:
        value = getattr(self._settings, name)
        if not (is_real(value) and 0 <= value < 1):
            self.add(name, "must be a number of at least 0 and below 1")
