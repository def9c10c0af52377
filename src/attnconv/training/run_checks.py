"""Validation of a run's settings against the machine, the data set and the run folder."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from attnconv._util.errors import bad
from attnconv._util.processes import is_first_process, local_rank, world_size
from attnconv._util.settings import Problem, SettingsError, flat, plain, read
from attnconv.data.image_set import Splits
from attnconv.data.settings import root_problems, settle
from attnconv.models.checkpoint import check_tensors, read_checkpoint
from attnconv.models.model_loader import checkpoint_file
from attnconv.models.settings import ResNetSettings
from attnconv.training.evaluation import device_of
from attnconv.training.run_folder import RunFolder
from attnconv.training.run_recorder import read_state
from attnconv.training.settings import AcceleratorName, RunSettings

# Settings that do not affect what a run computes; the preset is only a label.
_FREE = ("preset", "data.root", "data.download", "train.checkpoint_every")
_NEW_RUN = "Restore the value, or start a new run in a different folder."


def machine_problems(settings: RunSettings) -> list[Problem]:
    """List the problems of the settings on this machine with the current number of processes."""
    train = settings.train
    found = [*root_problems(settings.data), *missing_accelerator(train.accelerator)]
    parts = world_size() * train.accumulate
    if train.batch_size % parts:
        fix = f"Pass train.batch_size={math.ceil(train.batch_size / parts) * parts}."
        requirement = f"must be a multiple of {parts} (number of processes x train.accumulate)"
        found.append(Problem("train.batch_size", requirement, str(train.batch_size), fix))
    elif train.batch_size == parts and (settings.augment.mixup or settings.augment.cutmix):
        requirement = f"must be above {parts} (number of processes x train.accumulate) to mix images"
        found.append(Problem("train.batch_size", requirement, str(train.batch_size)))
    device, gpus = device_of(train.accelerator), torch.cuda.device_count()
    if device.type == "mps" and train.precision == "64":
        fix = "Pass train.accelerator='cpu'."
        requirement = "must be 32 or bf16 on mps, which does not support 64-bit numbers"
        found.append(Problem("train.precision", requirement, "'64'", fix))
    if device.type == "cuda" and torch.cuda.is_available() and local_rank() >= gpus:
        requirement = f"must be at most {gpus}, the number of GPUs"
        found.append(Problem("torchrun --nproc-per-node", requirement, f"{local_rank() + 1} or more"))
    return found


def missing_accelerator(name: AcceleratorName) -> list[Problem]:
    """Return a list with one problem if an accelerator is not available, and an empty list otherwise."""
    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if here.get(name, True):
        return []
    got = f"{name!r}, but torch finds no such device"
    return [Problem("train.accelerator", "must be available", got, "Pass train.accelerator='cpu'.")]


def data_problems(settings: RunSettings, data: Splits) -> list[Problem]:
    """List the settings that do not match the images."""
    model, train, images = settings.model, settings.train, data.train
    height, width = images.size
    origin = f"from {data.source}" if data.source else ""
    wanted = {"image_channels": images.channels, "classes": len(data.classes), "image_size": max(height, width)}
    found = [
        Problem(f"model.{name}", f"must be {value} for these images", str(got), f"Pass model.{name}={value}.", origin)
        for name, value in wanted.items()
        if (got := getattr(model, name)) != value
    ]
    side = 1 if isinstance(model, ResNetSettings) else model.downsampling
    if height % side or width % side:
        requirement = f"must divide the image size {height} x {width}"
        found.append(Problem("model.downsampling", requirement, str(side), origin=origin))
    if train.batch_size > len(images):
        requirement = f"must be at most {len(images)}, the number of training images"
        found.append(Problem("train.batch_size", requirement, str(train.batch_size), origin=origin))
    try:
        settle(settings.augment, channels=images.channels, size=min(height, width))
    except SettingsError as error:
        found += error.problems
    return found


def check_folder(folder: RunFolder, settings: RunSettings, *, resume: bool) -> None:
    """Raise an error unless the folder is empty or, with `resume`, contains a valid run with these settings.

    Only the first of several processes checks the folder, since it may already write to it while the others start.
    """
    if not is_first_process():
        return
    path = folder.path
    if not resume and not folder.is_empty():
        contents = "a run" if folder.exists() else "other files"
        fix = "Pass a different folder, or resume=True to resume it." if folder.exists() else "Pass a different folder."
        raise ValueError(bad("run_dir", "must be new or empty", f"{path}, which contains {contents}", fix))
    if resume and not folder.exists() and (foreign := folder.foreign_files()):
        name = foreign[0].relative_to(path)
        raise ValueError(bad("run_dir", "must be empty or contain a run", f"{path}, which contains {name}"))
    if resume and folder.exists():
        _reject_changes(folder, folder.settings(), settings, origin=f"run {path}")
        _check_state(folder, settings)


def check_images(folder: RunFolder, data: Splits) -> None:
    """Raise an error if the images, or their division into sets, have changed since the run in the folder started."""
    before = folder.record().get("image_checksum")
    if before not in (None, data.checksum()):  # earlier versions did not record it
        requirement = f"must contain the images with which the run in {folder.path} started"
        fix = "Restore the images; other images need a new run in a different folder."
        raise ValueError(bad("data.root", requirement, "other images", fix, origin=data.source))


def _reject_changes(folder: RunFolder, before: RunSettings, now: RunSettings, *, origin: str) -> None:
    fixes = {"train.epochs": f"To train the model further, start a new run with start_from={str(folder.path)!r}."}
    changed = [
        Problem(name, f"must remain {old!r} when a run is resumed", repr(new), fixes.get(name, _NEW_RUN), origin)
        for name, old, new in differences(before, now)
    ]
    if changed:
        raise SettingsError(changed)


def _check_state(folder: RunFolder, settings: RunSettings) -> None:
    """Raise an error if the training state is missing, or belongs to a different run or different settings."""
    file, fix = folder.state_file, "Restore the file, or start a new run in a different folder."
    if not file.is_file():
        first = max(settings.train.checkpoint_every, folder.settings().train.checkpoint_every)
        later = any(line["epoch"] > first for line in folder.metrics())
        if later or folder.result() is not None or not folder.checkpoints.is_dir():
            where = f"the run in {folder.path}"
            raise FileNotFoundError(bad("state", f"must exist to resume {where}", f"no file {file}", fix))
        return  # the run was killed before its first checkpoint was complete
    state = read_state(file)
    run = state.get("run")
    if not isinstance(run, Mapping) or not isinstance(run.get("settings"), Mapping):
        raise ValueError(bad("state", "must contain the settings of its run", repr(run), fix, origin=str(file)))
    before = read(RunSettings, run["settings"], origin=f"from {file}")
    _reject_changes(folder, before, settings, origin=f"state {file}")
    if run.get("name") != folder.record().get("run"):
        raise ValueError(bad("state", f"must be from {folder.path}", "the state of another run", fix, origin=str(file)))


def check_start(folder: RunFolder, settings: RunSettings, start_from: str | Path | None) -> None:
    """Raise an error if initial weights do not fit the model, or if the run has started with other weights."""
    if start_from is None:
        return
    if folder.exists() and not folder.start_weights.is_file() and is_first_process():
        requirement = f"must be omitted, since the run in {folder.path} started with random weights"
        raise ValueError(bad("start_from", requirement, str(start_from)))
    file = checkpoint_file(Path(start_from))
    if folder.exists() and is_first_process() and file.read_bytes() != folder.start_weights.read_bytes():
        requirement = f"must be the weights that the run in {folder.path} started with, or be omitted"
        raise ValueError(bad("start_from", requirement, str(start_from)))
    checkpoint = read_checkpoint(file)
    check_tensors(checkpoint.tensors, settings.model, argument="start_from", origin=checkpoint.source)


def differences(before: RunSettings, now: RunSettings) -> list[tuple[str, Any, Any]]:
    """List the differences between settings as (name, before, now), except settings that do not affect a run."""
    old, new = flat(plain(before)), flat(plain(now))
    names = [name for name in {**old, **new} if name not in _FREE]
    return [(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]
