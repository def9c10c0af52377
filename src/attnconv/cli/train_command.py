"""`attnconv train PRESET`: every setting of a run is a flag, with the preset's recipe as the defaults."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnconv._util.settings import Problem, SettingsError, plain
from attnconv.cli.parsing import Defaults, Nested, Positional, flat, merged
from attnconv.models.presets import PRESETS
from attnconv.training.recipes import RecipeName, recipe
from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import RunSettings

_SHOWN = "quadratic-small"  # whose flags and defaults the help shows when no preset is named


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train a model and write a run folder: settings, metrics, heads, checkpoints.

    The defaults below are those of the preset (quadratic-small where none is named).

    Examples:
        attnconv train quadratic-digits
        attnconv train quadratic-small --data.root PATH/TO/CIFAR --epochs 20 --out runs/short
        attnconv train quadratic-small --out runs/short --resume
        attnconv train --config runs/short/settings.json --seed 7 --out runs/other-seed
        attnconv train quadratic-digits --start-from runs/pruned --epochs 10 --optim.learning-rate 1e-4 --out runs/after
        attnconv train quadratic-small --recipe paper --optim.learning-rate 0.05
        torchrun --nproc-per-node 2 -m attnconv train resnet18 --data.root PATH/TO/CIFAR --precision bf16

    Attributes:
        preset: Name of the model and of its recipe; `attnconv models` lists them. With --config, the file's where none
            is given.
        config: JSON file of settings that take the place of the recipe's, such as the settings.json of a run; flags
            override them. Groups and settings that it leaves out keep the recipe's values.
        recipe: Source of the defaults: the paper's hyper-parameters, or the modern recipe of the small presets. None
            takes the one that the preset is made for.
        out: Run folder; None for runs/PRESET.
        resume: Continue the run in the folder after its last complete epoch, with the settings it has; begin it if
            there is none.
        start_from: Run folder or weights file (.safetensors) whose model to train on, as `attnconv prune` leaves;
            PRESET then only names the recipe. None starts from fresh parameters.
        settings: All settings of the run.
    """

    preset: Positional[str]
    config: Path | None = None
    recipe: RecipeName | None = None
    out: Path | None = None
    resume: bool = False
    start_from: Path | None = None
    settings: RunSettings

    @staticmethod
    def defaults(given: Mapping[str, Any]) -> Defaults:
        """The recipe's settings, or those of the run to resume; over them the file's and the model of the weights."""
        config = given.get("config")
        file = {} if config is None else _read_config(config)
        preset = given.get("preset", file.get("preset"))
        if preset != file.get("preset", preset):
            raise SettingsError([Problem("preset", f"must be {file['preset']!r}, that of {config}", repr(preset))])
        values: Nested = {}
        if "model" not in file or preset in PRESETS:  # elsewhere the preset is but a label of all that the file holds
            name = given.get("recipe")
            named = _SHOWN if preset is None else preset
            values = plain(recipe(named, name if name in ("paper", "modern") else None))
        folder = given.get("out") or Path("runs") / str(preset)
        if given.get("resume") and (run := RunFolder(folder)).exists():
            before = run.settings()
            if before.preset != preset:
                fix = f"Resume it with: attnconv train {before.preset} --out {folder} --resume"
                requirement = f"must be {before.preset!r}, that of the run in {folder}"
                raise SettingsError([Problem("preset", requirement, repr(preset), fix)])
            values = plain(before)
        values = merged(values, file)
        if given.get("start_from") is not None:
            from attnconv.models.checkpoint import read_checkpoint
            from attnconv.models.model_loader import checkpoint_file

            values["model"] = plain(read_checkpoint(checkpoint_file(given["start_from"])).settings)
        origins = dict.fromkeys(flat({"settings": file}), f"from {config}")
        label = {} if preset is None else {"preset": preset}
        return {**label, "settings": {**values, **label}}, origins


def run(arguments: Arguments) -> None:
    """Train, and leave the run folder."""
    from attnconv.training.fitting import fit
    from attnconv.training.processes import is_first_process

    folder = arguments.out or Path("runs") / arguments.preset
    command = ["attnconv", *sys.argv[1:]]
    fit(arguments.settings, folder, resume=arguments.resume, start_from=arguments.start_from, command=command)
    if is_first_process():
        print(f"Run: {folder}. Its figures: attnconv report {folder}")


def _read_config(file: Path) -> dict[str, Any]:
    """Plain settings: of a run's settings.json, or of a file that holds nothing else."""
    try:
        values = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError([Problem("config", "must be a JSON file", f"{file} ({error})")]) from error
    settings = values.get("settings", values) if isinstance(values, dict) else None
    if not isinstance(settings, dict) or not isinstance(settings.get("preset", ""), str):
        requirement = "must hold groups of settings and the name of a preset, as the settings.json of a run does"
        raise SettingsError([Problem("config", requirement, repr(settings), origin=str(file))])
    return settings
