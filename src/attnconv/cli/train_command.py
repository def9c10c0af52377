"""`attnconv train PRESET`: every setting of a run is a flag, with the preset's recipe as the defaults."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from attnconv._util.errors import bad
from attnconv.cli.flag_errors import flags_of, positional_places, sort_out
from attnconv.cli.parsing import parse
from attnconv.training.recipes import RecipeName, recipe
from attnconv.training.settings import (
    RunSettings,
    SettingsError,
    problems,
)

_SHOWN = "quadratic-small"  # whose flags and defaults the help shows when no preset is named
_EXAMPLES = """\
attnconv train quadratic-digits
attnconv train quadratic-small --data.root PATH/TO/CIFAR --epochs 20 --out runs/short
attnconv train quadratic-small --out runs/short --resume
attnconv train quadratic-digits --start-from runs/pruned --epochs 10 --optim.learning-rate 1e-4 --out runs/after
attnconv train quadratic-small --recipe paper --optim.learning-rate 0.05
torchrun --nproc-per-node 2 -m attnconv train resnet18 --data.root PATH/TO/CIFAR --precision bf16
"""


@dataclass(frozen=True)
class TrainCommand:
    """Arguments of `attnconv train` that are no settings of the run.

    Attributes:
        preset: Name of the model and of its recipe; `attnconv models` lists them.
        recipe: Where the defaults come from: the paper's hyper-parameters, or the modern recipe of the small presets.
            None takes the one that the preset is made for.
        out: Run folder; None for runs/PRESET.
        resume: Continue the run in the folder after its last complete epoch, with the settings it has; begin it if
            there is none.
        start_from: Run folder or weights file (.safetensors) whose model to train on, as `attnconv prune` leaves;
            PRESET then only says the recipe. None begins with fresh parameters.
    """

    preset: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="PRESET")]]
    recipe: RecipeName | None = None
    out: Path | None = None
    resume: bool = False
    start_from: Path | None = None


def run(words: Sequence[str]) -> int:
    """Train, and leave the run folder."""
    groups = _groups(recipe(_SHOWN))
    flags = flags_of([("", TrainCommand), *((prefix, type(values)) for _, prefix, values in groups)])
    place = next(iter(positional_places(words, flags)), None)
    preset = None if place is None else words[place]
    if place is not None:  # first, wherever it was typed: a list of values before it has no end of its own
        words = [words[place], *words[:place], *words[place + 1 :]]
    try:
        settings = _defaults(preset or _SHOWN, words)
    except ValueError as error:
        raise SettingsError([str(error)]) from error
    about = "Train a model and leave a run folder: settings, metrics, heads, checkpoints. The defaults below are those "
    about += f"of the preset {preset or _SHOWN}."
    flags = flags_of([("", TrainCommand), *((prefix, type(values)) for _, prefix, values in _groups(settings))])
    del flags["--preset"]
    wrong, readable = sort_out(words, flags)
    arguments = parse(_command(settings), "train", readable, about=about, examples=_EXAMPLES)
    chosen = replace(settings, **{name: getattr(arguments, name) for name, _, _ in _groups(settings)})
    if wrong:
        raise SettingsError([*wrong, *problems(chosen)])
    return _train(arguments, chosen)


def _train(arguments: Any, settings: RunSettings) -> int:
    from attnconv.training.fitting import fit
    from attnconv.training.processes import is_first_process

    folder = arguments.out or Path("runs") / arguments.preset
    command = ["attnconv", *sys.argv[1:]]
    fit(settings, folder, resume=arguments.resume, start_from=arguments.start_from, command=command)
    if is_first_process():
        print(f"Run: {folder}. Its figures: attnconv report {folder}")
    return 0


def _defaults(preset: str, words: Sequence[str]) -> RunSettings:
    """What flags default to: the recipe, with the model of the weights to begin with; of a resumed run its settings.

    Raises:
        ValueError: if there is no such preset, the run to be resumed is of another one, or the weights to begin with
            cannot be read.
    """
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    reader.add_argument("--recipe", nargs="?")
    reader.add_argument("--out", nargs="?")
    reader.add_argument("--resume", action="store_true")
    reader.add_argument("--start-from", nargs="?")
    known, _ = reader.parse_known_args(words)
    name: RecipeName | None = known.recipe if known.recipe in ("paper", "modern") else None
    settings = recipe(preset, name)
    if known.resume:
        from attnconv.training.run_folder import RunFolder

        folder = RunFolder(Path(known.out or f"runs/{preset}"))
        if folder.exists():
            settings = folder.settings()
            if settings.preset != preset:
                fix = f"Resume it with: attnconv train {settings.preset} --out {folder.path} --resume"
                requirement = f"must be {settings.preset!r}, that of the run in {folder.path}"
                raise ValueError(bad("preset", requirement, repr(preset), fix))
            return settings
    if known.start_from is not None:
        from attnconv.models.checkpoint import read_checkpoint
        from attnconv.models.model_loader import checkpoint_file

        settings = replace(settings, model=read_checkpoint(checkpoint_file(Path(known.start_from))).settings)
    return settings


def _groups(settings: RunSettings) -> list[tuple[str, str, Any]]:
    """Name, prefix of the flags and defaults of each group of settings.

    The model's and the training loop's have no prefix (--heads, --epochs), the others have (--data.root).
    """
    return [
        ("model", "", settings.model),
        ("train", "", settings.train),
        ("data", "data.", settings.data),
        ("augment", "augment.", settings.augment),
        ("optim", "optim.", settings.optim),
        ("schedule", "schedule.", settings.schedule),
    ]


def _command(settings: RunSettings) -> type[Any]:
    """The arguments of this preset: the command's own, and every setting with the value it has."""
    fields = []
    for name, prefix, values in _groups(settings):
        hint: Any = type(values) if prefix else tyro.conf.OmitArgPrefixes[type(values)]  # type: ignore[misc]
        fields.append((name, Annotated[hint, tyro.conf.arg()], field(default=values)))
    return make_dataclass("Train", fields, bases=(TrainCommand,), frozen=True)
