"""Errors on resuming: a damaged or missing state, the state of another run, changed settings, a folder in use."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnconv.data import digits, load_splits
from attnconv.training.fitting import fit
from attnconv.training.run_folder import RunFolder, append_line, write_json, writing
from attnconv.training.run_recorder import read_state, save_state
from attnconv.training.settings import RunSettings, SettingsError
from tests.training.making import MODEL, CutError, before_epoch, tiny


def cut_after_one(folder: Path, settings: RunSettings) -> RunFolder:
    with before_epoch(1), pytest.raises(CutError):
        fit(settings, folder, progress=False)
    return RunFolder(folder)


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Run of three epochs that was interrupted after the first."""
    return cut_after_one(tmp_path_factory.mktemp("runs") / "cut", tiny(epochs=3))


@pytest.fixture
def copy(cut: RunFolder, tmp_path: Path) -> RunFolder:
    shutil.copytree(cut.path, tmp_path / "copy")
    return RunFolder(tmp_path / "copy")


def contents(folder: RunFolder) -> Mapping[str, bytes]:
    return {str(path.relative_to(folder.path)): path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}


def refused(folder: RunFolder, settings: RunSettings, error: type[Exception], match: str) -> None:
    """Check that resuming raises `error` and does not change the folder."""
    before = contents(folder)
    with pytest.raises(error, match=match):
        fit(settings, folder.path, resume=True, progress=False)
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"train": {"seed": 7}}, [r"train\.seed: .* 42 .* 7"]),
        ({"train": {"batch_size": 30}}, [r"train\.batch_size: .* 20 .* 30"]),
        ({"train": {"epochs": 1}}, [r"train\.epochs: .* 3 .* 1"]),
        (
            {"train": {"epochs": 30}, "optim": {"clip": 2.0}},
            [r"train\.epochs: .* 3 .* 30", r"optim\.clip: .* 1\.0 .* 2\.0"],
        ),
        ({"model": {"width": 32}}, [r"model\.width: .* 16 .* 32"]),
        ({"model": {"heads": 4}, "data": {"limit": 100}}, [r"model\.heads: .* 3 .* 4", r"data\.limit: .* 120 .* 100"]),
    ],
)
def test_settings_that_were_edited_are_named(
    copy: RunFolder, changes: Mapping[str, Mapping[str, Any]], names: list[str]
) -> None:
    record = json.loads(copy.settings_file.read_text())
    for group, values in changes.items():
        record["settings"][group] |= values
    write_json(copy.settings_file, record)
    settings = copy.settings()
    for name in names:
        refused(copy, settings, SettingsError, rf"{name} \(state .*state\.ckpt\)")


def test_what_changes_nothing_about_a_run_may_be_edited(copy: RunFolder) -> None:
    record = json.loads(copy.settings_file.read_text())
    record["settings"]["train"] |= {"checkpoint_every": 2, "tensorboard": True}  # of an earlier version
    record["settings"]["data"] |= {"root": "elsewhere"}
    write_json(copy.settings_file, record)
    save_state(
        copy.state_file, read_state(copy.state_file) | {"run": {"name": record["run"], "settings": record["settings"]}}
    )
    assert fit(copy.settings(), copy.path, resume=True, progress=False).result() is not None


def test_a_state_of_another_run_is_refused(copy: RunFolder, tmp_path: Path) -> None:
    seeded = cut_after_one(tmp_path / "seeded", tiny(epochs=3, seed=7))
    shutil.copy(seeded.state_file, copy.state_file)
    refused(copy, tiny(epochs=3), SettingsError, r"train\.seed: .* 7 .* 42 \(state .*state\.ckpt\)")
    wider = cut_after_one(tmp_path / "wider", replace(tiny(epochs=3), model=replace(MODEL, width=32)))
    shutil.copy(wider.state_file, copy.state_file)
    refused(copy, tiny(epochs=3), SettingsError, r"model\.width: .* 32 .* 16 \(state .*state\.ckpt\)")
    twin = cut_after_one(tmp_path / "twin", tiny(epochs=3))
    shutil.copy(twin.state_file, copy.state_file)
    refused(copy, tiny(epochs=3), ValueError, rf"state: .*{copy.path}, got .*state\.ckpt")


def test_a_state_that_names_no_run_is_refused(copy: RunFolder) -> None:
    state = read_state(copy.state_file)
    for run in (None, {}, {"name": "x", "settings": 3}):
        save_state(copy.state_file, {**state, "run": run})
        refused(copy, tiny(epochs=3), ValueError, r"state: must .*run.*, got .*state\.ckpt")


def test_a_damaged_state_is_refused(copy: RunFolder) -> None:
    content = bytearray(copy.state_file.read_bytes())
    content[len(content) // 2] ^= 1
    copy.state_file.write_bytes(content)
    refused(copy, tiny(epochs=3), ValueError, r"state: must match its checksum, got .*state\.ckpt")


def test_a_state_that_is_lost_is_not_begun_again(copy: RunFolder) -> None:
    shutil.rmtree(copy.checkpoints)
    refused(copy, tiny(epochs=3), FileNotFoundError, r"state: .* got no file .*state\.ckpt")
    copy.checkpoints.mkdir()
    write_json(copy.result_file, {})
    refused(copy, tiny(epochs=3), FileNotFoundError, r"state: .* got no file .*state\.ckpt")
    copy.result_file.unlink()
    append_line(copy.metrics_file, {**copy.metrics()[-1], "epoch": 2})  # the state of epoch 1 must have existed
    refused(copy, tiny(epochs=3), FileNotFoundError, r"state: .* got no file .*state\.ckpt")


def test_other_images_are_refused(copy: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(copy)
    train, test = digits.read_digits()
    train.images.add_(1)
    monkeypatch.setattr(load_splits, "read_digits", lambda: (train, test))
    with pytest.raises(ValueError, match=r"data\.root: must contain the images .* got other images"):
        fit(tiny(epochs=3), copy.path, resume=True, progress=False)
    assert contents(copy) == before


def test_other_initial_weights_are_refused(copy: RunFolder, tmp_path: Path) -> None:
    with before_epoch(1), pytest.raises(CutError):
        fit(tiny(), tmp_path / "run", start_from=copy.path, progress=False)
    other = fit(tiny(epochs=1, seed=7), tmp_path / "other", progress=False)
    with pytest.raises(ValueError, match=r"start_from: must be the weights that the run .* started with"):
        fit(tiny(), tmp_path / "run", start_from=other.path, resume=True, progress=False)
    assert fit(tiny(), tmp_path / "run", start_from=copy.path, resume=True, progress=False).result() is not None


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_in_use_is_refused(copy: RunFolder, resume: bool) -> None:
    with writing(copy):
        before = contents(copy)
        with pytest.raises(ValueError, match=rf"run_dir: .* {copy.path}, .*process {os.getpid()} "):
            fit(tiny(epochs=3), copy.path, resume=resume, progress=False)
        assert contents(copy) == before


def test_an_interrupt_says_how_to_go_on(tmp_path: Path) -> None:
    interrupted = pytest.raises(KeyboardInterrupt, match=rf"{tmp_path / 'run'}; resume=True")
    with before_epoch(1, lambda: os.kill(os.getpid(), signal.SIGINT)), interrupted:
        fit(tiny(epochs=3), tmp_path / "run", progress=False)


def test_a_full_disk_is_named_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match=r"path: .*got No space left on device for .*metrics") as caught:
        append_line(tmp_path / "metrics.jsonl", {"epoch": 1})
    assert caught.value.errno == errno.ENOSPC
