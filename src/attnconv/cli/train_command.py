"""`attnconv train PRESET`: every setting of a run is a flag, with the preset's recipe as the defaults."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from attnconv.cli.parsing import parse
from attnconv.data.settings import AugmentSettings, DataSettings
from attnconv.models.presets import PRESETS
from attnconv.models.settings import ModelSettings
from attnconv.training.recipes import RecipeName, recipe
from attnconv.training.settings import OptimSettings, RunSettings, ScheduleSettings, TrainSettings

_SHOWN = "quadratic-small"  # whose flags and defaults the help shows when no preset is named
_EXAMPLES = """\
attnconv train quadratic-digits
attnconv train quadratic-small --data.root PATH/TO/CIFAR --epochs 20 --out runs/short
attnconv train resnet18 --data.root PATH/TO/CIFAR --precision bf16 --devices 2
attnconv train quadratic-small --recipe paper --optim.learning-rate 0.05
attnconv train quadratic-small --data.root PATH/TO/CIFAR --resume
"""


@dataclass(frozen=True)
class TrainCommand:
    """Arguments of `attnconv train` that are no settings of the run."""

    preset: tyro.conf.Positional[str]
    """Name of the model and of its recipe; `attnconv models` lists them."""
    recipe: RecipeName | None = None
    """Where the defaults come from: the paper's hyper-parameters, or the modern recipe of the small presets. None takes
    the one that the preset is made for."""
    out: Path | None = None
    """Run folder; None for runs/PRESET."""
    resume: bool = False
    """Continue the run in the folder after its last complete epoch."""


def run(words: Sequence[str]) -> int:
    """Train, and leave the run folder."""
    preset, name = _choice(words)
    settings = recipe(preset or _SHOWN, name)
    command = _command(settings)
    about = (
        "Train a model and leave a run folder: settings, metrics, heads, checkpoints. The defaults below are those of "
    )
    about += f"the preset {preset or _SHOWN}."
    arguments = parse(command, "train", words, about=about, examples=_EXAMPLES)
    return _train(arguments, settings)


def _train(arguments: Any, settings: RunSettings) -> int:
    chosen = replace(
        settings,
        model=arguments.model,
        data=arguments.data,
        augment=arguments.augment,
        optim=arguments.optim,
        schedule=arguments.schedule,
        train=arguments.train,
    )
    from attnconv.training.fit import fit

    folder = arguments.out or Path("runs") / arguments.preset
    fit(chosen, folder, resume=arguments.resume, command=["attnconv", *sys.argv[1:]])
    print(f"Run: {folder}. Its figures: attnconv report {folder}")
    return 0


def _choice(words: Sequence[str]) -> tuple[str | None, RecipeName | None]:
    """The preset and the recipe that the words name: they decide the defaults of all other flags."""
    preset = words[0] if words and not words[0].startswith("-") else None
    name: RecipeName | None = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        value = following if word == "--recipe" else word.removeprefix("--recipe=")
        if word.startswith("--recipe") and value in ("paper", "modern"):
            name = value  # type: ignore[assignment]
    if preset is not None and preset not in PRESETS:
        recipe(preset)  # raises, with the nearest names
    return preset, name


def _command(settings: RunSettings) -> type[Any]:
    """The arguments of this preset: the command's own, and every setting with the recipe's value as its default.

    Fields of the model and of the training loop have no prefix (--heads, --epochs), those of the other groups have
    (--data.root).
    """
    kind: type[ModelSettings] = type(settings.model)
    groups: list[tuple[str, Any, Any]] = [
        ("model", tyro.conf.OmitArgPrefixes[kind], settings.model),  # type: ignore[valid-type, misc]
        ("train", tyro.conf.OmitArgPrefixes[TrainSettings], settings.train),
        ("data", DataSettings, settings.data),
        ("augment", AugmentSettings, settings.augment),
        ("optim", OptimSettings, settings.optim),
        ("schedule", ScheduleSettings, settings.schedule),
    ]
    fields = [(name, Annotated[hint, tyro.conf.arg()], field(default=value)) for name, hint, value in groups]
    return make_dataclass("Train", fields, bases=(TrainCommand,), frozen=True)
