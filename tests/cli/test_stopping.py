"""Ctrl-C and SIGTERM end a command with status 130 and 143 and a message; no command writes to a folder in use."""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import attnconv.cli.train_command  # noqa: F401  # binds `recipe` before it is patched
from attnconv.models.settings import AttentionSettings
from attnconv.paper import training_plan
from attnconv.training import recipes
from attnconv.training.recipes import recipe
from attnconv.training.run_folder import RunFolder, writing
from attnconv.training.settings import RunSettings
from tests.cli.test_commands import TINY, call
from tests.training.making import before_epoch

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}
KEPT = training_plan.settings_at


def little(settings: RunSettings) -> RunSettings:
    model = settings.model
    assert isinstance(model, AttentionSettings)
    model = replace(model, layers=1, width=16, mlp_width=16, heads=3)
    return replace(settings, model=model, data=replace(settings.data, limit=100))


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[tuple[str, ...], Path]]:
    """Return the arguments of each command that trains, and its run folder."""
    digits = little(recipe("quadratic-digits"))
    monkeypatch.setattr(recipes, "recipe", lambda *_: digits)
    monkeypatch.setattr(training_plan, "settings_at", lambda scale, name: little(KEPT(scale, name)))
    out = str(tmp_path / "out")
    words = ("reproduce", "--only", "quadratic", "--out", out)
    return {
        "train": (("train", "quadratic-digits", *TINY, "--epochs", "2", "--out", out), tmp_path / "out"),
        "demo": (("demo", "--epochs", "2", "--out", out), tmp_path / "out"),
        "reproduce": (words, tmp_path / "out" / "runs" / "quadratic"),
    }


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="requires the main thread")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", ["train", "demo", "reproduce"])
def test_a_signal_in_training(
    name: str,
    number: signal.Signals,
    commands: dict[str, tuple[tuple[str, ...], Path]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    words, folder = commands[name]

    before = signal.getsignal(number)
    with before_epoch(1, lambda: os.kill(os.getpid(), number)):
        status, out, err = call(capsys, *words)
    assert status == STATUS[number]
    resume = {
        "train": "--resume",
        "demo": f"`attnconv train quadratic-digits --out {folder} --resume`",
        "reproduce": "repeating the command",
    }
    kept = f"Stopped. The last checkpoint is kept in {folder}; {resume[name]} continues the run.\n"
    assert err.count(kept) == 1
    assert "Traceback" not in err + out
    assert signal.getsignal(number) is before
    assert [line["epoch"] for line in RunFolder(folder).metrics()][-1] == 1
    assert not RunFolder(folder).lock_file.exists()
    if name == "demo":
        status, _, err = call(capsys, "train", "quadratic-digits", "--out", str(folder), "--resume")
        assert (status, "after epoch 1 of 2" in err) == (0, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_elsewhere(
    number: signal.Signals, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnconv.cli.models_command.run", lambda _: os.kill(os.getpid(), number))
    assert call(capsys, "models") == (STATUS[number], "", "attnconv: stopped.\n")


@pytest.mark.parametrize("name", ["train", "demo", "reproduce"])
def test_a_folder_in_use(
    name: str, commands: dict[str, tuple[tuple[str, ...], Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    words, folder = commands[name]
    with writing(RunFolder(folder)):
        status, _, err = call(capsys, *words)
        assert (status, f"{folder}, to which process {os.getpid()} writes" in err) == (1, True)
        assert RunFolder(folder).is_empty()


def test_a_folder_in_use_is_not_pruned_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with writing(RunFolder(tmp_path)):
        status, _, err = call(capsys, "prune", "quadratic-digits", "--out", str(tmp_path))
        assert (status, f"{tmp_path}, to which process {os.getpid()} writes" in err) == (1, True)
        assert RunFolder(tmp_path).is_empty()
