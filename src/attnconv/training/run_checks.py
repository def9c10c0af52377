"""What can only be found wrong with a run on the machine, in the data or in its folder; all before any work."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from attnconv._util.errors import bad
from attnconv.data.image_set import Splits
from attnconv.data.settings import settle
from attnconv.models.checkpoint import check_tensors, read_checkpoint
from attnconv.models.model_loader import LoadedModel, checkpoint_file
from attnconv.models.settings import AttentionSettings
from attnconv.training.processes import is_first_process, local_rank
from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import AcceleratorName, RunSettings, SettingsError
from attnconv.training.settings_json import from_plain, to_plain
from attnconv.training.training_state import read_state

# Moving the data, or fetching it, changes nothing about a run, nor does how often it is written, or curves beside it.
_FREE = (
    ("data", "root"),
    ("data", "cache"),
    ("data", "download"),
    ("train", "checkpoint_every"),
    ("train", "tensorboard"),
)


def machine_problems(settings: RunSettings) -> list[str]:
    """What the settings ask of this machine that it does not have, in the spelling of the flags."""
    train, found = settings.train, missing_accelerator(settings.train.accelerator)
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if train.accelerator in ("auto", "cuda") and cuda and local_rank() >= torch.cuda.device_count():
        requirement = f"must be at most the {torch.cuda.device_count()} GPUs of this machine"
        found.append(bad("torchrun --nproc-per-node", requirement, f"{local_rank() + 1} or more"))
    if train.accelerator == "auto" and mps and not cuda and train.precision == "64":
        fix = "Pass --accelerator cpu."
        found.append(bad("--precision", "must be 32 or bf16 on mps, which has no 64-bit numbers", "'64'", fix))
    return found


def missing_accelerator(name: AcceleratorName) -> list[str]:
    """The sentence that says so where torch does not find the accelerator."""
    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if here.get(name, True):
        return []
    got = f"{name!r}, but torch finds no such device"
    return [bad("--accelerator", "must be one that is here", got, "Pass --accelerator cpu.")]


def fit_problems(loaded: LoadedModel, data: Splits) -> list[str]:
    """How images do not fit a model that was made for others, as far as the model says what it was made for."""
    if loaded.settings is None:
        return []
    where = f"from {data.source}" if data.source else ""
    pairs = (
        ("channels", data.test.channels, loaded.settings.image_channels),
        ("classes", len(data.classes), loaded.settings.classes),
    )
    fix = "Name the images that the model was trained on: --data.name, --data.root."
    return [
        bad("--data", f"must have the {wanted} {what} of {loaded.source}", f"{got} {what}", fix, origin=where)
        for what, got, wanted in pairs
        if got != wanted
    ]


def data_problems(settings: RunSettings, data: Splits) -> list[str]:
    """How the images that were read do not fit the settings, in the spelling of the flags."""
    model, train, images, found = settings.model, settings.train, data.train, []
    height, width = images.size
    where = f"from {data.source}" if data.source else ""
    wanted = {
        "image_channels": images.channels,
        "classes": len(data.classes),
        "image_size": max(height, width),
    }
    for name, value in wanted.items():
        got = getattr(model, name)
        if got != value:
            flag = "--" + name.replace("_", "-")
            found.append(bad(flag, f"must be {value} for these images", got, f"Pass {flag} {value}.", origin=where))
    side = model.downsampling if isinstance(model, AttentionSettings) else 1
    if height % side or width % side:
        requirement = f"must divide the images' {height} x {width} pixels"
        found.append(bad("--downsampling", requirement, side, origin=where))
    if train.batch_size > len(images):
        requirement = f"must be at most the {len(images)} training images"
        found.append(bad("--batch-size", requirement, train.batch_size, origin=where))
    try:
        settle(settings.augment, channels=images.channels, size=min(height, width))
    except ValueError as error:
        found.append(str(error))
    return found


def check_folder(folder: RunFolder, settings: RunSettings, *, resume: bool) -> None:
    """Refuse a folder that cannot take this run.

    Only the first process looks: it fills the folder while the others start.

    Raises:
        ValueError: if the folder holds anything but a run that can be resumed: without ``resume`` anything at all, with
            it other files, a run of other settings, or one whose state is lost, damaged or of another run.
    """
    if not is_first_process():
        return
    path = folder.path
    if not resume and not folder.is_empty():
        held = "a run" if folder.exists() else "other files"
        fix = "Add --resume to continue it, or name another folder." if folder.exists() else "Name another folder."
        raise ValueError(bad("--out", "must be new or empty", f"{path}, which holds {held}", fix))
    if resume and not folder.exists() and (foreign := folder.foreign_files()):
        name = foreign[0].relative_to(path)
        raise ValueError(bad("--out", "must hold a run to resume, or nothing", f"{path}, which holds {name}"))
    if resume and folder.exists():
        _refuse_changes(folder.settings(), settings, origin=f"run {path}")
        _check_state(folder, settings)


def _refuse_changes(before: RunSettings, now: RunSettings, *, origin: str) -> None:
    fix = "Leave it as it was, or start anew in another folder."
    changed = [
        bad(name, f"must stay {old!r} when a run is resumed", repr(new), fix, origin=origin)
        for name, old, new in differences(before, now)
    ]
    if changed:
        raise SettingsError(changed)


def _check_state(folder: RunFolder, settings: RunSettings) -> None:
    """Refuse a state that this run with these settings did not write, or one that it did write and that is gone."""
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
    _refuse_changes(from_plain(run["settings"], origin=f"from {file}"), settings, origin=f"state {file}")
    if run.get("name") != folder.record().get("run"):
        raise ValueError(
            bad("state", f"must be of the run in {folder.path}", "that of another run", fix, origin=str(file))
        )
    if "model" not in state:
        fix = "Resume it with the version of attnconv that wrote it."
        raise ValueError(bad("state", "must be of this version", "one of an earlier version", fix, origin=str(file)))


def check_start(folder: RunFolder, settings: RunSettings, start_from: str | Path | None) -> None:
    """Refuse weights to begin with that are not those of the settings' model, or that come too late.

    Raises:
        ValueError: if they cannot be read, belong to another model, or the run in the folder began without any.
        FileNotFoundError: if there is no such file, or a folder without weights.
    """
    if start_from is None:
        return
    if folder.exists() and not folder.start_weights.is_file() and is_first_process():
        requirement = f"must be left out: the run in {folder.path} began with fresh parameters"
        raise ValueError(bad("--start-from", requirement, str(start_from)))
    checkpoint = read_checkpoint(checkpoint_file(Path(start_from)))
    check_tensors(checkpoint.tensors, settings.model, argument="--start-from", origin=checkpoint.source)


def differences(before: RunSettings, now: RunSettings) -> list[tuple[str, Any, Any]]:
    """Settings in which two runs differ, as (flag, before, now), but for what changes nothing about a run.

    Example:
        >>> from dataclasses import replace
        >>> from attnconv.training.recipes import recipe
        >>> run = recipe("quadratic-digits")
        >>> differences(run, replace(run, train=replace(run.train, seed=7)))
        [('--seed', 42, 7)]
    """
    old, new = to_plain(before), to_plain(now)
    found = []
    for group in (name for name in new if name != "preset"):
        prefix = "--" if group in ("model", "train") else f"--{group}."
        for name in dict.fromkeys([*old[group], *new[group]]):
            pair = old[group].get(name), new[group].get(name)
            if pair[0] != pair[1] and (group, name) not in _FREE:
                found.append((prefix + name.replace("_", "-"), *pair))
    return found
