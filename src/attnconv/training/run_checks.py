"""Checks of a run against the machine, the data and its folder, before any work."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from attnconv._util.errors import bad
from attnconv._util.settings import Problem, SettingsError, plain, read
from attnconv.data.image_set import Splits
from attnconv.data.settings import root_problems, settle
from attnconv.models.checkpoint import check_tensors, read_checkpoint
from attnconv.models.model_loader import checkpoint_file
from attnconv.models.settings import AttentionSettings
from attnconv.training.evaluation import device_of
from attnconv.training.processes import is_first_process, local_rank, world_size
from attnconv.training.run_folder import RunFolder
from attnconv.training.run_recorder import read_state
from attnconv.training.settings import AcceleratorName, RunSettings

# Changing these changes nothing about what a run computes.
_FREE = ("data.root", "data.download", "train.checkpoint_every")


def machine_problems(settings: RunSettings) -> list[Problem]:
    """List what is wrong with the settings on this machine, with these processes."""
    train = settings.train
    found = [*root_problems(settings.data), *missing_accelerator(train.accelerator)]
    parts = world_size() * train.accumulate
    if train.batch_size % parts:
        fix = f"Take {math.ceil(train.batch_size / parts) * parts}."
        requirement = f"must be a multiple of {parts} (processes x accumulate)"
        found.append(Problem("train.batch_size", requirement, str(train.batch_size), fix))
    device, gpus = device_of(train.accelerator), torch.cuda.device_count()
    if device.type == "mps" and train.precision == "64":
        fix = "Pass train.accelerator='cpu'."
        requirement = "must be 32 or bf16 on mps, which has no 64-bit numbers"
        found.append(Problem("train.precision", requirement, "'64'", fix))
    if device.type == "cuda" and torch.cuda.is_available() and local_rank() >= gpus:
        requirement = f"must be at most the {gpus} GPUs of this machine"
        found.append(Problem("torchrun --nproc-per-node", requirement, f"{local_rank() + 1} or more"))
    return found


def missing_accelerator(name: AcceleratorName) -> list[Problem]:
    """The problem with an accelerator that torch does not find."""
    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if here.get(name, True):
        return []
    got = f"{name!r}, but torch finds no such device"
    return [Problem("train.accelerator", "must be one that is here", got, "Pass train.accelerator='cpu'.")]


def data_problems(settings: RunSettings, data: Splits) -> list[Problem]:
    """List where the images do not fit the settings."""
    model, train, images = settings.model, settings.train, data.train
    height, width = images.size
    origin = f"from {data.source}" if data.source else ""
    wanted = {"image_channels": images.channels, "classes": len(data.classes), "image_size": max(height, width)}
    found = [
        Problem(f"model.{name}", f"must be {value} for these images", str(got), f"Pass model.{name}={value}.", origin)
        for name, value in wanted.items()
        if (got := getattr(model, name)) != value
    ]
    side = model.downsampling if isinstance(model, AttentionSettings) else 1
    if height % side or width % side:
        requirement = f"must divide the images' {height} x {width} pixels"
        found.append(Problem("model.downsampling", requirement, str(side), origin=origin))
    if train.batch_size > len(images):
        requirement = f"must be at most the {len(images)} training images"
        found.append(Problem("train.batch_size", requirement, str(train.batch_size), origin=origin))
    try:
        settle(settings.augment, channels=images.channels, size=min(height, width))
    except SettingsError as error:
        found += error.problems
    return found


def check_folder(folder: RunFolder, settings: RunSettings, *, resume: bool) -> None:
    """Reject a folder that holds anything but, with `resume`, a whole run of these settings.

    Only the first process checks: it fills the folder while the others start.
    """
    if not is_first_process():
        return
    path = folder.path
    if not resume and not folder.is_empty():
        held = "a run" if folder.exists() else "other files"
        fix = "Pass resume=True to continue it, or name another folder." if folder.exists() else "Name another folder."
        raise ValueError(bad("run_dir", "must be new or empty", f"{path}, which holds {held}", fix))
    if resume and not folder.exists() and (foreign := folder.foreign_files()):
        name = foreign[0].relative_to(path)
        raise ValueError(bad("run_dir", "must hold a run to resume, or nothing", f"{path}, which holds {name}"))
    if resume and folder.exists():
        _refuse_changes(folder.settings(), settings, origin=f"run {path}")
        _check_state(folder, settings)


def _refuse_changes(before: RunSettings, now: RunSettings, *, origin: str) -> None:
    fix = "Leave it as it was, or start anew in another folder."
    changed = [
        Problem(name, f"must stay {old!r} when a run is resumed", repr(new), fix, origin)
        for name, old, new in differences(before, now)
    ]
    if changed:
        raise SettingsError(changed)


def _check_state(folder: RunFolder, settings: RunSettings) -> None:
    """Reject a state of another run or of other settings, and a run whose state is gone."""
    file, fix = folder.state_file, "Restore it, or start anew in another folder."
    if not file.is_file():
        if folder.result() is not None or not folder.checkpoints.is_dir():
            where = f"the run in {folder.path}"
            raise FileNotFoundError(bad("state", f"must be there to resume {where}", f"nothing at {file}", fix))
        return  # killed before its first epoch was complete
    state = read_state(file)
    run = state.get("run")
    if not isinstance(run, Mapping) or not isinstance(run.get("settings"), Mapping):
        raise ValueError(bad("state", "must name its run", repr(run), fix, origin=str(file)))
    _refuse_changes(read(RunSettings, run["settings"], origin=f"from {file}"), settings, origin=f"state {file}")
    if run.get("name") != folder.record().get("run"):
        raise ValueError(
            bad("state", f"must be of the run in {folder.path}", "that of another run", fix, origin=str(file))
        )
    if "model" not in state:
        fix = "Resume it with the version of attnconv that wrote it."
        raise ValueError(bad("state", "must be of this version", "one of an earlier version", fix, origin=str(file)))


def check_start(folder: RunFolder, settings: RunSettings, start_from: str | Path | None) -> None:
    """Reject initial weights that are not those of the settings' model, or that come after the start of the run."""
    if start_from is None:
        return
    if folder.exists() and not folder.start_weights.is_file() and is_first_process():
        requirement = f"must be left out: the run in {folder.path} began with fresh parameters"
        raise ValueError(bad("start_from", requirement, str(start_from)))
    checkpoint = read_checkpoint(checkpoint_file(Path(start_from)))
    check_tensors(checkpoint.tensors, settings.model, argument="start_from", origin=checkpoint.source)


def differences(before: RunSettings, now: RunSettings) -> list[tuple[str, Any, Any]]:
    """List settings in which two runs differ, as (name, before, now), except those that change nothing about a run."""
    old, new = _flat(before), _flat(now)
    names = [name for name in {**old, **new} if name not in _FREE]
    return [(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]


def _flat(settings: RunSettings) -> dict[str, Any]:
    """Every setting by its dotted name, except the preset, which is a label."""
    groups = {name: values for name, values in plain(settings).items() if name != "preset"}
    return {f"{group}.{name}": value for group, values in groups.items() for name, value in values.items()}
