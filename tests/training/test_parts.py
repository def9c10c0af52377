"""Schedules compared with formulas, parameter groups, the run folder and the training state file."""

import io
import math
import pickle
from pathlib import Path

import pytest
import torch
from rich.console import Console

from attnconv.data.image_set import ImageSet
from attnconv.models.classifiers import build
from attnconv.training import progress_bars
from attnconv.training.evaluation import evaluate
from attnconv.training.loop import step_seed
from attnconv.training.optimisers import make_optimiser, parameter_groups, rate_factor
from attnconv.training.progress_bars import TrainingProgress, downloading
from attnconv.training.run_folder import MetricsLine, RunFolder, append_line, choose_epochs, write_text
from attnconv.training.run_recorder import read_state, save_state, sealed
from attnconv.training.settings import OptimSettings, ScheduleSettings
from tests.training.making import MODEL, tiny

LINE: MetricsLine = {"step": 3, "epoch": 1, "split": "train", "loss": 0.5, "accuracy": 0.25, "lr": 0.1, "seconds": 1.0}


def factors(**values: object) -> list[float]:
    schedule = ScheduleSettings(**values)  # type: ignore[arg-type]
    return [rate_factor(schedule, step, steps_per_epoch=10, epochs=10) for step in range(100)]


def test_cosine_rises_in_a_line_and_falls_in_half_a_wave() -> None:
    got = factors(name="cosine", warmup=0.2)
    assert got[:20] == pytest.approx([(step + 1) / 20 for step in range(20)])
    assert got[20:] == pytest.approx([0.5 * (1 + math.cos(math.pi * step / 80)) for step in range(80)])


def test_other_schedules() -> None:
    assert factors(name="constant", warmup=0.0) == [1.0] * 100
    assert factors(name="linear", warmup=0.0) == pytest.approx([1 - step / 100 for step in range(100)])
    got = factors(name="steps", warmup=0.0, milestones=(3, 8), decay=0.1)
    assert got == pytest.approx([1.0] * 30 + [0.1] * 50 + [0.01] * 20)


def test_centres_and_spreads_are_never_decayed_and_have_their_own_rate() -> None:
    model = build(MODEL)
    groups = parameter_groups(model, OptimSettings(learning_rate=0.1, weight_decay=0.5, position_rate=3.0))
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
    heads = [model.get_parameter(f"blocks.0.attention.encoding.{name}") for name in ("centres", "spread")]
    assert set(map(id, groups[1]["params"])) == set(map(id, heads))
    assert groups[1]["lr"] == pytest.approx(0.3)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    for name in ("sgd", "adamw"):
        optimiser = make_optimiser(model, OptimSettings(name=name, decay_vectors=False))
        assert len(optimiser.param_groups) == 3


def test_every_step_has_its_own_seed() -> None:
    seeds = {
        step_seed(seed, epoch, step, rank)
        for seed in (0, 1)
        for epoch in range(3)
        for step in range(50)
        for rank in (0, 1)
    }
    assert len(seeds) == 2 * 3 * 50 * 2


def test_run_folders_are_read_back_and_rewound(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert not folder.exists()
    with pytest.raises(ValueError, match=r"run: .*settings\.json.*got .*run"):
        folder.settings()
    folder.begin(tiny(), {"versions": {}})
    assert folder.settings() == tiny()
    for epoch in (1, 2, 3):
        append_line(folder.metrics_file, {**LINE, "epoch": epoch})
        append_line(folder.heads_file, {"epoch": epoch, "layers": []})
    with folder.metrics_file.open("a") as stream:
        stream.write('{"epoch": 4, "spl')  # truncated by a kill
    assert [line["epoch"] for line in folder.metrics()] == [1, 2, 3]
    folder.rewind(2)
    assert [line["epoch"] for line in folder.metrics()] == [1, 2]
    assert [line["epoch"] for line in folder.heads()] == [1, 2]


def test_broken_run_folders_are_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.begin(tiny(), {})
    append_line(folder.metrics_file, LINE)
    folder.metrics_file.write_text("{broken\n" + folder.metrics_file.read_text())
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1: must be .*got '\{broken'"):
        folder.metrics()
    write_text(folder.settings_file, '{"format": 99}')
    with pytest.raises(ValueError, match=r"settings\.json: format.*got 99"):
        folder.settings()
    write_text(folder.settings_file, '{"format": 1, "settings": 3}')
    with pytest.raises(ValueError, match=r"settings\.json: settings: .*got 3"):
        folder.settings()
    write_text(folder.settings_file, "{")
    with pytest.raises(ValueError, match=r"settings\.json: must be JSON, got"):
        folder.settings()


@pytest.mark.parametrize(
    "line", ["3", "[]", "{}", '{"epoch": "1"}', "[" * 100_000, '{"epoch": 1, "layers": [3]}', "\xff"]
)
def test_lines_of_another_kind_are_refused(line: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for file, read in ((folder.metrics_file, folder.metrics), (folder.heads_file, folder.heads)):
        file.write_text(line + "\n", encoding="latin-1")
        with pytest.raises(ValueError, match=rf"{file.name}, line 1: must be "):
            read()


@pytest.mark.parametrize("text", ["", "[" * 100_000, "3", "\xff"])
def test_a_result_or_settings_that_are_no_map_are_refused(text: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for file, read in ((folder.result_file, folder.result), (folder.settings_file, folder.settings)):
        file.write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match=rf"{file.name}(: format)?: must be "):
            read()


def test_images_of_unknown_classes_are_not_measured() -> None:
    images = ImageSet(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 7]))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 5))
    with pytest.raises(ValueError, match=r"images: .*5.*, got 7"):
        evaluate(model, images, mean=(0.5,), std=(0.5,))
    with pytest.raises(ValueError, match=r"images: .*got none"):
        evaluate(model, images.take(torch.tensor([], dtype=torch.int64)), mean=(0.5,), std=(0.5,))


@pytest.mark.parametrize("terminal", [False, True])
def test_downloads_and_epochs_are_shown(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120)
    monkeypatch.setattr(progress_bars, "Console", lambda **_: console)
    with downloading() as report:
        for there in range(0, 1001, 5):
            report(there * 1_000_000, 1_000_000_000)
    progress = TrainingProgress(2, 3)
    progress.begin(0)
    progress.step(3, 1)
    line: MetricsLine = {
        "step": 3,
        "epoch": 1,
        "split": "train",
        "loss": 0.5,
        "accuracy": 0.25,
        "lr": 0.1,
        "seconds": 7.0,
    }
    progress.epoch([line, {**line, "split": "validation"}])
    progress.say("done")
    progress.close()
    text = stream.getvalue()
    assert "accuracy: train 25.0%, validation 25.0%" in text
    assert "done" in text
    if not terminal:
        assert text.splitlines()[:2] == ["downloading: 0 of 1000 MB", "downloading: 100 of 1000 MB"]
        numbers = "accuracy: train 25.0%, validation 25.0%   loss 0.5000   learning rate 0.1   7 s elapsed"
        assert f"epoch 1/2   {numbers}\n" in text


def test_nothing_is_shown_that_is_not_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with downloading(shown=False) as report:
        report(1, 2)
    TrainingProgress(2, 3, shown=False).say("done")
    assert capsys.readouterr() == ("", "")


class Foreign:
    """Object that would run a command when unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("executed",))


def saved(values: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def test_states_are_read_without_executing_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "state.ckpt"
    with pytest.raises(FileNotFoundError, match=r"state: .*got no file .*state\.ckpt"):
        read_state(path)
    save_state(path, {"epoch": 3, "weights": torch.ones(2)})
    assert read_state(path)["epoch"] == 3
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:-1], whole + b"x", b"", b"hello", saved({"epoch": 3})):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"state: .*checksum.*got .*state\.ckpt"):
            read_state(path)
    path.write_bytes(sealed(b"hello"))
    with pytest.raises(ValueError, match=r"state: .*tensors.*got "):
        read_state(path)
    path.write_bytes(sealed(saved({"epoch": Foreign()})))
    with pytest.raises(ValueError, match=r"state: .*tensors.*got "):
        read_state(path)
    for content in (pickle.dumps(Foreign()), sealed(pickle.dumps(Foreign()))):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="state: must"):
            read_state(path)
    path.write_bytes(sealed(saved([1, 2])))
    with pytest.raises(ValueError, match=r"state: .*tensors.*got "):
        read_state(path)
    assert "executed" not in capsys.readouterr().out


def test_a_failed_save_leaves_the_state_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.ckpt"
    save_state(path, {"epoch": 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_state(path, {"epoch": 2})
    assert read_state(path)["epoch"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["state.ckpt"]


@pytest.mark.parametrize("count", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("last", [0, 1, 4, 7, 300])
def test_chosen_epochs(last: int, count: int) -> None:
    chosen = choose_epochs(range(last + 1), count)
    assert len(chosen) == min(count, last + 1)
    assert chosen == sorted(set(chosen))
    assert chosen[-1] == last
    assert chosen[0] == 0 or count == 1


def test_steps_between_chosen_epochs_grow() -> None:
    assert choose_epochs(range(301), 6) == [0, 2, 9, 30, 95, 300]
