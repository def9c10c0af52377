"""`attnconv train [PRESET]`: train a model, with a flag for each setting and defaults from the preset's recipe."""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnconv._util.settings import Fine, Natural, Problem, SettingsError, flat, plain
from attnconv.cli.parsing import Defaults, Nested, Positional, merged
from attnconv.models.presets import PRESETS
from attnconv.training.recipes import RecipeName, recipe
from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import RunSettings

_SHOWN = "quadratic-small"  # the preset whose defaults the help shows if none is given


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train a model, and write its settings, metrics, head centres and checkpoints to a run folder.

    `attnconv train PRESET --help` shows the defaults of a preset; without PRESET, those of quadratic-small are shown.

    Examples:
        attnconv train quadratic-digits
        attnconv train quadratic-small --data-root data --epochs 20 --out runs/short
        attnconv train quadratic-small --out runs/short --resume
        attnconv train --config runs/short/settings.json --seed 7 --out runs/seed-7
        attnconv train quadratic-digits --start-from runs/pruned --out runs/after
        attnconv train quadratic-small --recipe paper --optim-learning-rate 0.05
        attnconv train quadratic-small --data-name folder --data-root PATH/TO/IMAGES
        torchrun --nproc-per-node 2 -m attnconv train resnet18 --precision bf16

    Attributes:
        preset: Preset (a model with a training recipe) listed by `attnconv models`. Required unless --config names one.
        config: JSON file with settings, such as the settings.json of a run. They override the defaults of the preset
            and of the recipe, which apply to settings that are missing from the file. Flags override the file.
        recipe: Recipe that sets the defaults of the optimiser, schedule and train options: modern (for the small
            presets) or paper (the paper's hyperparameters). Neither changes the augmentation. The default is the
            preset's recipe.
        out: Run folder, to which everything is written. The default is runs/PRESET.
        resume: Resume the run in the folder from its last checkpoint; settings that differ from the run's are rejected.
            If the folder contains no run, start a new one.
        start_from: Run folder or weights file (.safetensors) with the initial weights, such as the output of
            `attnconv prune`; PRESET then selects only the recipe. The default is a new model with random weights.
        threads: Number of CPU threads. The default is the number of cores, or the environment variable OMP_NUM_THREADS.
            A small model can train faster with fewer threads if other programs use the cores.
        settings: All settings of the run.
    """

    preset: Positional[str | None] = None
    config: Path | None = None
    recipe: RecipeName | None = None
    out: Path | None = None
    resume: bool = False
    start_from: Path | None = None
    threads: Natural | None = None
    settings: RunSettings

    @staticmethod
    def defaults(given: Mapping[str, Any]) -> Defaults:
        """Return the settings of the recipe or of the run to resume, overridden by the file and the initial weights."""
        config = given.get("config")
        file = {} if config is None else _read_config(config)
        preset = given.get("preset", file.get("preset"))
        if preset != file.get("preset", preset):
            requirement = f"must be {file['preset']!r}, the preset of {config}"
            raise SettingsError([Problem("preset", requirement, repr(preset))])
        values: Nested = {}
        if "model" not in file or preset in PRESETS:  # otherwise the file has all settings
            name = given.get("recipe")
            named = _SHOWN if preset is None else preset
            values = plain(recipe(named, name if name in ("paper", "modern") else None))
        folder = given.get("out") or Path("runs") / str(preset)
        if given.get("resume") and (run := RunFolder(folder)).exists():
            before = run.settings()
            if before.preset != preset:
                fix = f"Resume it with: attnconv train {before.preset} --out {folder} --resume"
                requirement = f"must be {before.preset!r}, the preset of the run in {folder}"
                raise SettingsError([Problem("preset", requirement, repr(preset), fix)])
            chosen = {} if given.get("recipe") is None else {group: values[group] for group in ("optim", "schedule")}
            return {"preset": preset, "settings": merged(merged(plain(before), chosen), file)}, _origins(file, config)
        values = merged(values, file)
        if given.get("start_from") is not None:
            values["model"] = merged(_model_of(given["start_from"]), file.get("model", {}))
        elif "model.classes" not in flat(file) and (count := _classes(values, given)):
            values = merged(values, {"model": {"classes": count}})
        label = {} if preset is None else {"preset": preset}
        return {**label, "settings": {**values, **label}}, _origins(file, config)

    def conflicts(self, _: Fine) -> Iterator[Problem]:
        if self.preset is None:
            yield Problem("preset", "must be given", "no preset", "`attnconv models` lists the presets.")


def run(arguments: Arguments) -> None:
    """Train the model, and print the run folder."""
    import torch

    from attnconv._util.processes import is_first_process
    from attnconv.training.fitting import fit

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    folder = arguments.out or Path("runs") / arguments.settings.preset
    command = ["attnconv", *sys.argv[1:]]
    fit(arguments.settings, folder, resume=arguments.resume, start_from=arguments.start_from, command=command)
    if is_first_process():
        print(f"Run: {folder}. To draw its figures: attnconv report {folder}")


def _model_of(start: Path) -> Nested:
    """Return the settings of the model whose weights --start-from names."""
    from attnconv.models.checkpoint import read_checkpoint
    from attnconv.models.model_loader import checkpoint_file

    try:
        return plain(read_checkpoint(checkpoint_file(start)).settings)
    except (OSError, ValueError) as error:
        if isinstance(error, SettingsError):
            raise
        raise ValueError(re.sub(r"^(model|checkpoint): ", "--start-from: ", str(error))) from error


def _classes(values: Nested, given: Mapping[str, Any]) -> int:
    """Return the number of classes of the image folder to train on, or 0 for other data sets or a missing folder."""
    settings = {**flat({"settings": values}), **given}
    folder = Path(str(settings.get("settings.data.root"))).expanduser()
    if settings.get("settings.data.name") != "folder" or not folder.is_dir():
        return 0
    from attnconv.data.image_files import class_names

    return len(class_names(folder))


def _origins(file: Mapping[str, Any], config: Path | None) -> dict[str, str]:
    return dict.fromkeys(flat({"settings": file}), f"from {config}")


def _read_config(file: Path) -> dict[str, Any]:
    """Read the settings of a run's settings.json, or of a file that contains only settings."""
    try:
        values = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError([Problem("config", "must be a JSON file", f"{file} ({error})")]) from error
    settings = values.get("settings", values) if isinstance(values, dict) else None
    if not isinstance(settings, dict) or not isinstance(settings.get("preset", ""), str):
        requirement = "must contain groups of settings and the name of a preset, like the settings.json of a run"
        raise SettingsError([Problem("config", requirement, repr(settings), origin=str(file))])
    return settings
