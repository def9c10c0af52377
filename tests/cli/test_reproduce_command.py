"""`attnconv reproduce` from end to end on a few digits: plan, training, an interruption, a second call, the pages."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnconv import paper
from attnconv.cli import main
from attnconv.models.checkpoint import read_checkpoint
from attnconv.models.settings import AttentionSettings, ResNetSettings
from attnconv.paper import training_plan
from attnconv.surgery import head_pruning
from attnconv.training import fitting
from attnconv.training.run_folder import RunFolder
from attnconv.training.run_recorder import DivergedError
from attnconv.training.settings import RunSettings
from tests.cli.test_commands import call
from tests.training.making import before_epoch

KEPT = training_plan.settings_at


def miniature(scale: training_plan.ScaleName, name: str) -> RunSettings:
    """Return the settings of the tiny scale, reduced further."""
    settings = KEPT(scale, name)
    model = settings.model
    if isinstance(model, AttentionSettings):
        model = replace(model, layers=2, width=16, mlp_width=16, heads=3 if model.heads == 9 else 4)
    elif isinstance(model, ResNetSettings):
        model = replace(model, widths=(4,), blocks=(1,))
    train = replace(settings.train, epochs=2)
    return replace(settings, model=model, data=replace(settings.data, limit=50), train=train)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_plan, "settings_at", miniature)


def tables(out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((out / "tables" / "table-4.json").read_text(encoding="utf-8"))["rows"]
    return rows


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with two trained seeds of one model and its pages."""
    out = tmp_path_factory.mktemp("reproduction") / "finished"
    words = ["--only", "quadratic", "--seeds", "2", "--data-root", "some where", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_plan, "settings_at", miniature)
        with pytest.raises(SystemExit) as end:
            main(["reproduce", "--scale", "tiny", *words])
    assert not end.value.code
    return out


def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the figures, which take longer than the training, in tests of the training."""
    monkeypatch.setattr(paper, "write_paper", lambda runs, out, **_: out)


def test_an_interrupted_run_is_continued(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_pages(monkeypatch)
    words = ("reproduce", "--scale", "tiny", "--only", "quadratic", "--out", str(tmp_path))
    with before_epoch(1, full_disk):
        assert call(capsys, *words)[0] == 1
    run = RunFolder(tmp_path / "runs" / "quadratic")
    assert run.result() is None
    status, out, _ = call(capsys, *words)
    assert status == 0
    assert "quadratic: after epoch 1" in out
    whole = RunFolder(finished / "runs" / "quadratic")
    one, other = (read_checkpoint(folder.last_weights).tensors for folder in (run, whole))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def full_disk() -> None:
    raise OSError("no space left")


def test_the_plan_trains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "reproduce", "--scale", "small", "--plan", "--out", str(tmp_path / "new"))
    assert status == 0
    assert "7 of 7 runs to train, on cifar10." in out
    assert not (tmp_path / "new").exists()


def test_runs_of_any_settings_are_drawn_and_their_differences_said(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def write(runs: object, out: Path, **options: Any) -> Path:
        asked.append(options)
        return out

    monkeypatch.setattr(paper, "write_paper", write)
    monkeypatch.setattr(training_plan, "settings_at", KEPT)
    words = ("--draw", "--only", "learned", "--publication", "--out", str(finished))
    status, out, _ = call(capsys, "reproduce", *words)
    assert status == 0
    assert [options["publication"] for options in asked] == [True]
    assert "quadratic, quadratic-seed-43: --layers 2 instead of 3, " in out
    assert ", --data-limit 50 instead of None, --epochs 2 instead of 5." in out
    assert not (finished / "runs" / "learned").exists()


def test_only_some_leaves_the_others_named_and_seeds_are_counted(finished: Path) -> None:
    here = {row["name"]: row["here"] for row in tables(finished)}
    assert here["quadratic"]["seeds"] == [42, 43]
    assert here["quadratic"]["deviation"] is not None
    assert here["learned"] is None
    text = (finished / "README.md").read_text(encoding="utf-8")
    command = "attnconv reproduce --scale tiny --seeds 2 --data-root 'some where'"
    assert f"Figure 5: no run of learned. To train it: {command} --out {finished} --only" in text


def test_observations_of_complete_runs_are_judged_against_their_own_start(finished: Path) -> None:
    values = json.loads((finished / "tables" / "observations.json").read_text(encoding="utf-8"))
    rows = {row["observation"]: row for row in values["rows"]}
    centres = rows["centres: 9 heads"]
    assert list(centres["seeds"]) == ["42", "43"]
    assert centres["problems"] == []
    assert rows["overlap: 9 heads"]["problems"] == []  # the seed reproduces the recorded initial heads
    assert rows["mirror images"]["verdict"] == "undecided"
    text = (finished / "README.md").read_text(encoding="utf-8")
    assert "Observation 'mirror images': no complete run of learned. To train its runs: attnconv reproduce" in text


def test_what_pruning_alone_costs_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_pages(monkeypatch)
    monkeypatch.setattr(head_pruning, "degenerate_heads", lambda *_: (1,))
    words = ("reproduce", "--only", "quadratic-generalized-pruned", "--seeds", "2", "--out", str(tmp_path))
    assert call(capsys, *words)[0] == 0
    run = RunFolder(tmp_path / "runs" / "quadratic-generalized-pruned-seed-43")
    found = run.result()
    assert found is not None
    assert found["start"]["test"]["images"] == found["last"]["test"]["images"]
    assert run.settings().model.heads == (2, 2)  # type: ignore[union-attr]


def test_nothing_to_prune_and_a_diverged_run_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    true_fit = fitting.fit

    def fit(settings: RunSettings, run_dir: Path, **options: Any) -> RunFolder:
        if settings.preset.startswith("learned"):
            raise DivergedError("the loss is nan")
        return true_fit(settings, run_dir, **options)

    no_pages(monkeypatch)
    monkeypatch.setattr(fitting, "fit", fit)
    monkeypatch.setattr(head_pruning, "degenerate_heads", lambda *_: ())
    only = ("learned", "quadratic-generalized-pruned")
    status, out, _ = call(capsys, "reproduce", "--only", *only, "--out", str(tmp_path))
    assert status == 1
    assert "Failed: learned: the loss is nan" in out
    assert "no head of quadratic-generalized is degenerate" in out


def test_wrong_words_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(capsys, "reproduce", "--only", "vgg", "--out", str(tmp_path))
    assert status == 2
    assert "--only: must be among resnet18" in err
    status, _, err = call(capsys, "reproduce", "--seeds", "0", "--out", str(tmp_path))
    assert status == 2
    assert re.search("--seeds: .*got 0", err)


def test_a_finished_run_of_other_settings_is_refused(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_plan, "settings_at", KEPT)
    status, _, err = call(capsys, "reproduce", "--only", "quadratic", "--out", str(finished))
    assert status == 2
    assert "--epochs: must remain 2" in err
