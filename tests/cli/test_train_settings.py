"""Settings of `attnconv train` from flags and files: precedence, and errors for invalid values."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnconv.models.settings import AttentionSettings
from attnconv.training import fitting
from attnconv.training.recipes import recipe
from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import RunSettings
from tests.cli.test_commands import call


def test_every_wrong_flag_is_named_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "--epochs few --optim-nme sgd --batch-size --heads 0 --schedule-milestones 1 x"
    status, _, err = call(capsys, "train", "quadratic-digits", *words.split())
    assert status == 2
    expected = [
        r"attnconv train: --batch-size: .*got no value\.",
        r"--optim-nme: .*got '--optim-nme'\. .* --optim-name or .*\?",
        r"--heads: .* 1 to 65,536, got 0\.",
        r"--schedule-milestones: .*got '1 x'\.",
        r"--epochs: .*got 'few'\.",
    ]
    for pattern, line in zip(expected, err.splitlines(), strict=True):
        assert re.fullmatch(pattern, line)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--test-curve yes", "arguments: must be flags and PRESET, got 'quadratic-digits yes'"),
        ("--test-curve=yes", "--test-curve: must be given without a value"),
        ("--widths 3", "--widths: must be a known setting, got (3,)"),
    ],
)
def test_words_that_have_no_place(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(capsys, "train", "quadratic-digits", *words.split())
    assert (status, message in err) == (2, True)


def test_the_settings_of_a_run_are_a_file_to_train_with(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = ["train", "--config", str(run / "settings.json"), "--out", str(tmp_path / "again")]
    assert call(capsys, *again)[0] == 0
    assert RunFolder(tmp_path / "again").settings() == RunFolder(run).settings()
    assert call(capsys, *again, "--resume", "--epochs=1")[0] == 0
    assert re.search("--seed: must remain 42 .*got 7", call(capsys, *again, "--resume", "--seed=7")[2])
    assert re.search(
        "--optim-name: must remain 'adamw'",
        call(capsys, *again[:1], "quadratic-digits", *again[3:], "--resume", "--recipe=paper")[2],
    )


def test_flags_override_a_file_which_overrides_the_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[RunSettings] = []
    monkeypatch.setattr(fitting, "fit", lambda settings, *_, **__: found.append(settings))
    file = tmp_path / "some.json"
    file.write_text('{"preset": "quadratic-digits", "model": {"heads": [4, 5, 6]}, "train": {"epochs": 7, "seed": 3}}')
    assert call(capsys, "train", "--config", str(file), "--epochs", "9", "--optim-nesterov")[0] == 2
    assert call(capsys, "train", "--config", str(file), "--epochs", "9")[0] == 0
    base = recipe("quadratic-digits")
    assert isinstance(base.model, AttentionSettings)
    expected = replace(base, model=replace(base.model, heads=(4, 5, 6)), train=replace(base.train, epochs=9, seed=3))
    assert found == [expected]


def test_the_number_of_threads_is_set_before_training(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(fitting, "fit", lambda *_, **__: found.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    try:
        for flags in ((), ("--threads", "3")):
            assert call(capsys, "train", "quadratic-digits", *flags)[0] == 0
    finally:
        torch.set_num_threads(before)
    assert found == [before, 3]


def test_a_file_overrides_the_model_of_the_initial_weights(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[RunSettings] = []
    monkeypatch.setattr(fitting, "fit", lambda settings, *_, **__: found.append(settings))
    file = tmp_path / "some.json"
    file.write_text('{"preset": "quadratic-digits", "model": {"dropout": 0.3}}')
    assert call(capsys, "train", "--config", str(file), "--start-from", str(run))[0] == 0
    before = RunFolder(run).settings().model
    assert isinstance(before, AttentionSettings)
    assert found[0].model == replace(before, dropout=0.3)


def test_wrong_values_of_a_file_and_of_flags_are_named_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.json"
    file.write_text('{"train": {"epochs": "many", "seed": 1.5, "tempo": 3}, "optimm": {}, "data": {"limit": true}}')
    status, _, err = call(capsys, "train", "quadratic-digits", "--config", str(file), "--heads=x", "--seed=-1")
    assert status == 2
    lines = err.removeprefix("attnconv train: ").splitlines()
    where = f"(from {file})"
    assert [(line.partition(":")[0], where in line) for line in lines] == [
        ("--heads", False),
        ("--data-limit", True),
        ("--epochs", True),
        ("--seed", False),
        ("train.tempo", True),
        ("optimm", True),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "--config: must be a JSON file, got"),
        ("[]", "--config: must contain groups of settings"),
        ('{"preset": ["a"]}', "--config: must contain groups of settings"),
        ('{"preset": "quadratic"}', "PRESET: must be 'quadratic', the preset of"),
        ('{"model": 3}', "model: must map setting names to values, got 3 (from"),
        ('{"train": {"devices": 2}, "model": {"kind": "tree"}}', "model.kind: must be one of"),
    ],
)
def test_files_that_cannot_be_used(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file.json"
    file.write_text(text)
    status, _, err = call(capsys, "train", "quadratic-digits", "--config", str(file))
    assert (status, message in err) == (2, True)
