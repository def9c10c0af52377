"""The commands as users see them: their output, the files they write, and their error messages."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attnconv.cli import COMMANDS, main
from attnconv.cli.parsing import arguments_of, in_flags
from attnconv.models.checkpoint import read_checkpoint, save_weights
from attnconv.models.model_loader import load
from attnconv.training import recipes
from attnconv.training.recipes import recipe
from attnconv.training.run_folder import RunFolder

TINY = ["--epochs=1", "--data-limit=100", "--layers=1", "--width=16", "--mlp-width=16", "--heads=3"]


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return the exit status, standard output and standard error of a command."""
    with pytest.raises(SystemExit) as end:
        main(words)
    printed = capsys.readouterr()
    return int(end.value.code or 0), printed.out, printed.err


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "digit.png"
    Image.fromarray(np.full((8, 8), 128, dtype=np.uint8)).save(path)
    return path


def test_the_first_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "--help")
    assert status == 0
    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert "attnconv train quadratic-digits" in out
    assert call(capsys)[0] == 2


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_help_has_examples_and_fits_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = call(capsys, name, "--help")
    assert status == 0
    assert f"attnconv {name}" in out.split("examples:")[1]
    assert [line for line in (out + call(capsys, "--help")[1]).splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, flag)[1].startswith("attnconv 0.")


def test_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "help") == call(capsys, "--help")
    assert call(capsys, "help", "models") == call(capsys, "models", "--help")
    assert call(capsys, "help", "help") == call(capsys, "--help")
    assert call(capsys, "help", "modles")[0] == 2


@pytest.mark.parametrize("name", list(COMMANDS))
def test_flags_have_dashes_only_and_do_not_collide(name: str) -> None:
    command = importlib.import_module(f"attnconv.cli.{name}_command").Arguments
    names: dict[str, set[str]] = {}
    for argument in arguments_of(command):
        for flag in argument.flags:
            assert argument.positional or re.fullmatch("--[a-z0-9]+(-[a-z0-9]+)*", flag)
            names.setdefault(flag, set()).add(argument.name)
    assert {flag: several for flag, several in names.items() if len(several) > 1} == {}


def test_optional_arguments_are_in_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    usages = [call(capsys, name, "--help")[1].splitlines()[0] for name in ("predict", "train", "report")]
    assert [usage.split("[OPTIONS] ")[1] for usage in usages] == ["IMAGE [MODEL]", "[PRESET]", "RUN"]


def test_a_timm_name_without_its_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    assert "timm:vit_tiny_patch16_224" in call(capsys, "audit", "vit_tiny_patch16_224")[2]
    err = call(capsys, "audit", "resnet50")[2]
    assert ("Did you mean resnet18 or" in err, "pass timm:resnet50." in err) == (True, True)
    assert "timm:quadratic-digit" not in call(capsys, "audit", "quadratic-digit")[2]


def test_arguments_are_renamed_in_messages_but_not_in_python_code() -> None:
    command = importlib.import_module("attnconv.cli.recast_command").Arguments
    assert in_flags("model: must be a preset. Pass size=3.", command) == "MODEL: must be a preset. Pass --image-size 3."
    assert in_flags("model: must be a preset.") == "model: must be a preset."
    assert (
        in_flags("layers: must be 1. Those of this model: 2.", command)
        == "--layers: must be 1. Those of this model: 2."
    )
    assert in_flags("0: alpha: must be 1.") == "0: --alpha: must be 1."
    code = "Load it with: model = attnconv.recast(YOUR_MODEL, alpha=4.0, only=None)."
    assert in_flags(code, command) == code
    assert in_flags("Known settings are settings.model.heads.") == "Known settings are --heads."


def test_an_unknown_flag_is_the_only_problem(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("train --epochz 3", "train --epochz 3 quadratic-digits", "prune --out x --critrion code"):
        status, _, err = call(capsys, *words.split())
        assert (status, len(err.splitlines())) == (2, 1)
        assert re.search(r": --(epochz|critrion): .* Did you mean --", err)


def test_errors_show_paths_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    err = call(capsys, "audit", str(tmp_path))[2]
    assert f"got {tmp_path}." in err


def test_completion_in_bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="the extra 'app' is not installed")
    script = tmp_path / "script.bash"
    script.write_text(call(capsys, "completion", "bash")[1])
    expected = {"ev": "evaluate", "train --no-data-d": "--no-data-download", "train --optim-name s": "sgd"}
    for words, word in expected.items():
        last = words.split()[-1]
        calls = f"source {script}; COMP_WORDS=(attnconv {words}); COMP_CWORD={len(words.split())}; "
        calls += f"_shtab_attnconv attnconv {last} x; echo ${{COMPREPLY[@]}}"
        assert subprocess.check_output(["bash", "-c", calls], text=True).strip() == word


def test_predict_rejects_colours_for_a_model_of_grey_images(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (20, 20), (200, 100, 50)).save(tmp_path / "frog.png")
    status, _, err = call(capsys, "predict", str(tmp_path / "frog.png"), str(run))
    assert (status, "IMAGE: must be grey" in err) == (1, True)


def test_predict_tests_colours_before_scaling(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pixels = np.random.default_rng(0).integers(256, size=(300, 500, 3), dtype=np.uint8)
    grey = np.repeat(pixels[..., :1], 3, axis=2)
    grey[:5, :5] = (255, 0, 0)  # a few coloured pixels, as at the edges in a scan
    found = []
    for name, image in {
        "colours.png": Image.fromarray(pixels),
        "colours.gif": Image.fromarray(pixels).convert("P"),
        "colours.jpg": Image.fromarray(pixels).convert("CMYK"),
        "grey.png": Image.fromarray(grey),
        "grey.jpg": Image.fromarray(pixels[..., 0]),
    }.items():
        image.save(tmp_path / name)
        found.append(call(capsys, "predict", str(tmp_path / name), str(run))[0])
    assert found == [1, 1, 1, 0, 0]


def test_the_classes_of_an_image_folder_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cat", "dog", "frog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for index in range(10):
            Image.new("RGB", (9, 9), (index, 90, 200)).save(tmp_path / "images" / name / f"{index}.png")
    words = ["train", "quadratic-small", *TINY[2:], "--epochs=1", "--image-size=8", "--batch-size=5"]
    words += ["--data-name=folder", f"--data-root={tmp_path / 'images'}", "--out", str(tmp_path / "run")]
    status, _, err = call(capsys, *words)
    assert status == 0
    assert re.match(r"Device \w+, [\d,]+ parameters, 22 training, 2 validation and 6 test images\.\n", err)
    assert load(tmp_path / "run").classes == ("cat", "dog", "frog")
    assert "6 images" in call(capsys, "evaluate", str(tmp_path / "run"))[1]
    (tmp_path / "images" / "cat" / "0.png").unlink()
    status, _, err = call(capsys, "evaluate", str(tmp_path / "run"))
    assert (status, "--data-root: must contain the images with which the run" in err) == (1, True)
    (tmp_path / "images" / "dog").rename(tmp_path / "images" / "bird")  # classes are numbered in alphabetical order
    status, _, err = call(capsys, "evaluate", str(tmp_path / "run"))
    assert (status, "--data-root: must have the classes of" in err, "'bird' instead of 'cat'" in err) == (2, True, True)
    status, _, err = call(capsys, "evaluate", "quadratic-digits", "--image-size", "8")
    assert (status, "--image-size: must be omitted" in err) == (2, True)


@pytest.mark.parametrize("words", ["--help", "--version", "calibrate --help", "models --help"])
def test_a_reader_that_has_seen_enough(words: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "attnconv", *words.split()]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_an_unknown_command_lists_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(capsys, "tarin")
    assert status == 2
    assert "unknown command 'tarin'. Did you mean train" in err
    assert "The commands are demo, train, evaluate" in call(capsys, "x")[2]


def test_models_prints_exact_counts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = call(capsys, "models")[1]
    assert "12,086,844" in out
    assert "6,175,956,800" in out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80


def test_train_leaves_a_run_of_the_settings_that_were_given(run: Path) -> None:
    settings = RunFolder(run).settings()
    assert settings.train.epochs == 1
    assert settings.data.limit == 100
    assert settings.model.image_channels == 1
    assert (settings.model.width, settings.model.heads) == (16, 3)  # type: ignore[union-attr]
    assert RunFolder(run).result() is not None


def test_evaluate_takes_the_runs_own_data(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, _ = call(capsys, "evaluate", str(run))
    assert status == 0
    assert "on the test images of digits:\naccuracy " in out
    assert "360 images" in out
    assert "200 images" in call(capsys, "evaluate", str(run), "--split", "validation")[1]
    assert "on the test images of digits:" in call(capsys, "evaluate", "quadratic-digits")[1]
    monkeypatch.chdir(run / "checkpoints")
    assert "200 images" in call(capsys, "evaluate", "last.safetensors", "--split", "validation")[1]


def test_predict_prints_classes_and_probabilities(run: Path, picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "predict", str(picture), str(run), "--top", "10")
    assert status == 0
    title, *lines = out.strip().splitlines()
    assert str(run) in title
    rows = [line.split() for line in lines]
    assert sum(float(row[0].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.1)
    assert sorted(row[1] for row in rows) == [str(digit) for digit in range(10)]


def test_report_says_where_it_is(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "report", str(run), "--out", str(tmp_path / "page"))
    assert status == 0
    assert out.strip() == f"Report: {tmp_path / 'page' / 'index.html'}"
    assert (tmp_path / "page" / "index.html").is_file()


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the demo train a tiny model on little data; tests/verify/test_training.py runs the real demo."""
    whole = recipe("quadratic-digits")
    model = replace(whole.model, layers=1, width=16, mlp_width=16, heads=3)  # type: ignore[arg-type]
    settings = replace(whole, model=model, data=replace(whole.data, limit=100))
    monkeypatch.setattr(recipes, "recipe", lambda _: settings)


@pytest.mark.usefixtures("little")
def test_demo_performs_learns_shows_and_clears_an_earlier_one_when_all_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("demo", "--out", str(tmp_path / "demo"), "--epochs")
    status, out, _ = call(capsys, *words, "1")
    assert status == 0
    assert "as 9 heads in float64: maximum relative difference" in out
    assert "test accuracy" in out
    assert Path(out.split("Report: ")[1].strip()).is_file()
    run = RunFolder(tmp_path / "demo")
    of_the_first = run.report / "figures" / "figure-99-of-the-first.png"
    of_the_first.write_text("")
    status, _, err = call(capsys, *words, "0")
    assert (status, "--epochs: must be" in err) == (2, True)
    assert run.result_file.is_file()
    assert of_the_first.exists()
    assert call(capsys, *words, "2")[0] == 0
    assert not of_the_first.exists()
    assert run.settings().train.epochs == 2
    before = set(run.path.rglob("*"))
    assert run.foreign_files() == []
    for name in ("notes.txt", "report/notes.txt", "checkpoints/mine.safetensors", "mine/settings.json"):
        mine = run.path / name
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mine")
        status, _, err = call(capsys, *words, "1")
        assert status == 1
        assert re.search(rf"--out: .*got {re.escape(str(run.path))}, which contains {re.escape(name)}", err)
        assert before < set(run.path.rglob("*"))
        mine.unlink()


def test_demo_does_not_clear_other_folders(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for folder in (tmp_path, run):
        status, _, err = call(capsys, "demo", "--out", str(folder))
        assert status == 1
        assert re.search(f"--out: .*got {re.escape(str(folder))}, which contains other", err)
    assert (tmp_path / "mine.txt").is_file()


@pytest.mark.parametrize(
    ("words", "status", "messages"),
    [
        ("train quadritic", 2, ["PRESET: must be", "got 'quadritic'.", "quadratic"]),
        (
            "train quadratic-digits --epochs 0 --heads 0 --optim-learning-rate -1",
            2,
            ["--epochs: must be", "--heads: must be", "--optim-learning-rate: must be"],
        ),
        ("train quadratic-digits --no-such-flag", 2, ["no-such-flag"]),
        ("train quadratic-small --data-root /nowhere/at/all --no-data-download", 2, ["/nowhere/at/all"]),
        ("evaluate nothing.safetensors", 1, ["MODEL: must be", "checkpoint", "got nothing at nothing.safetensors"]),
        ("evaluate nosuch", 1, ["MODEL: must be a preset, a run folder,", "got 'nosuch'. `attnconv models` lists"]),
        ("evaluate quadratic-digit", 1, ["Did you mean quadratic-digits"]),
        (
            "evaluate quadratic-small --data-name digits",
            2,
            ["must match preset quadratic-small", "(channels: 3, classes: 10), got 1 and 10"],
        ),
        ("evaluate resnet18 --accelerator mps", 2, ["--accelerator: must be", "got 'mps'"]),
        ("evaluate quadratic-digits --batch-size 0", 2, ["--batch-size: must be", "got 0"]),
        ("report /nowhere", 1, ["RUN: must be", "got /nowhere"]),
        ("train quadratic-digits --start-from x", 1, ["--start-from: must be", "got nothing at x."]),
        ("train quadratic-digits --start-from .", 1, ["--start-from: must be a run folder", "got ."]),
        ("train resnet18 --heads 3", 2, ["--heads: must be", "Known settings are --widths, --blocks, --image-size,"]),
        ("predict x.png quadratic-digits", 1, ["MODEL: must contain class names"]),
        ("predict x.png --top 0", 2, ["--top: must be", "got 0"]),
    ],
)
def test_mistakes_are_said_in_words(
    words: str,
    status: int,
    messages: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    found, out, err = call(capsys, *words.split())
    assert found == status
    assert all(message in err + out for message in messages)
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_predict_without_any_run_says_how_to_get_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "runs/ contains no run, got no model." in call(capsys, "predict", "x.png")[2]


def test_an_existing_run_is_not_overwritten(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "quadratic-digits", *TINY, "--out", str(run)]
    assert "--out: must be new or empty" in call(capsys, *words)[2]
    assert call(capsys, *words, "--resume")[0] == 0  # the run is complete, so nothing is trained


def test_a_resumed_run_keeps_its_settings(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "quadratic-digits", "--out", str(run), "--resume"]
    assert call(capsys, *words)[0] == 0  # without the flags it was started with
    status, _, err = call(capsys, *words, "--epochs", "3")
    assert status == 2
    assert re.search(rf"--epochs: must remain 1 .*got 3 \(run {re.escape(str(run))}\)", err)
    assert f"--start-from {run}" in err
    status, _, err = call(capsys, "train", "quadratic", "--out", str(run), "--resume")
    assert status == 2
    assert re.search(rf"PRESET: must be 'quadratic-digits'.*{re.escape(str(run))}, got 'quadratic'", err)


def test_a_weights_file_in_a_run_is_measured_on_the_runs_data(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = run / "checkpoints" / "last.safetensors"
    assert "on the test images of digits" in call(capsys, "evaluate", str(weights))[1]


def test_a_weights_file_beside_its_settings_is_measured_on_the_runs_data(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (run / "settings.json", run / "checkpoints" / "last.safetensors"):
        shutil.copy(file, tmp_path)
    weights = tmp_path / "last.safetensors"
    assert "on the test images of digits" in call(capsys, "evaluate", "--batch-size", "100", str(weights))[1]


def test_a_function_of_ones_own_that_does_not_fit_the_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "from torch import nn\ndef flat(): return nn.Sequential(nn.Flatten(), nn.Linear(9, 10))\n"
    code += "def maps(): return nn.Conv2d(1, 10, 3)\n"
    (tmp_path / "odd_models.py").write_text(code)
    status, _, err = call(capsys, "evaluate", "odd_models:flat", "--data-name", "digits")
    assert (status, "images: must have a shape that the model accepts, got shape (1, 8, 8)." in err) == (1, True)
    status, _, err = call(capsys, "evaluate", "odd_models:maps", "--data-name", "digits")
    assert status == 1
    assert re.search(r"MODEL: .*\(b, classes\), got shape \(360, 10, 6, 6\)", err)


def test_the_preset_may_stand_anywhere_among_the_flags(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "train", "--out", str(run), *TINY, "quadratic-digits", "--resume")[0] == 0
    assert (
        "Train a model"
        in call(capsys, "train", "--schedule-milestones", "3", "5", "--out", "x", "quadratic-digits", "--help")[1]
    )


def test_a_folder_of_other_things_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "quadratic-digits", *TINY, "--resume", "--out", str(tmp_path)]
    (tmp_path / "letter.txt").write_text("dear")
    status, _, err = call(capsys, *words)
    assert status == 1
    assert re.search(rf"--out: .*got {re.escape(str(tmp_path))}, which contains letter\.txt", err)
    (tmp_path / "letter.txt").unlink()
    (tmp_path / "checkpoints").mkdir()
    litter = tmp_path / "checkpoints" / ".last.safetensors.0a1b2c3d.partial"
    litter.write_text("torn")
    assert call(capsys, *words)[0] == 0  # a run killed before its settings were written
    assert not litter.exists()


def test_a_model_in_64_bits_predicts(
    run: Path, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = read_checkpoint(run / "checkpoints" / "last.safetensors")
    model = load(run).model.double()
    named = {"classes": checkpoint.classes, "mean": checkpoint.mean, "std": checkpoint.std}
    save_weights(tmp_path / "double.safetensors", model, checkpoint.settings, **named)  # type: ignore[arg-type]
    assert call(capsys, "predict", str(picture), str(tmp_path / "double.safetensors"))[0] == 0


def test_predict_prints_names_that_a_terminal_would_obey_as_escapes(
    run: Path, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = read_checkpoint(run / "checkpoints" / "last.safetensors")
    named = {"classes": ("\x1b]0;x\x07", "\udcff", *"cdefghij"), "mean": checkpoint.mean, "std": checkpoint.std}
    path = tmp_path / "named.safetensors"
    save_weights(path, load(run).model, checkpoint.settings, **named)  # type: ignore[arg-type]
    out = call(capsys, "predict", str(picture), str(path), "--top", "10")[1]
    assert "  \\x1b]0;x\\x07\n" in out
    assert "  \\udcff\n" in out


def test_predict_refuses_a_model_that_gives_no_numbers(
    run: Path, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = read_checkpoint(run / "checkpoints" / "last.safetensors")
    model = load(run).model
    model.get_parameter("head.weight").data.fill_(3e38)
    named = {"classes": checkpoint.classes, "mean": checkpoint.mean, "std": checkpoint.std}
    save_weights(tmp_path / "w.safetensors", model, checkpoint.settings, **named)  # type: ignore[arg-type]
    status, out, err = call(capsys, "predict", str(picture), str(tmp_path / "w.safetensors"))
    assert (status, out) == (1, "")
    assert re.search(r"MODEL: .*finite.*got \[", err)


def test_the_recipe_decides_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    paper = call(capsys, "train", "quadratic-small", "--recipe", "paper", "--help")[1]
    modern = call(capsys, "train", "quadratic-small", "--recipe=modern", "--help")[1]
    assert "(default: sgd)" in paper
    assert "(default: adamw)" in modern
