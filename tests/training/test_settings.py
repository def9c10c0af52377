"""All invalid settings are reported at once; the recipes are valid, and `paper` has the settings of the paper."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from attnconv._util.settings import SettingsError, plain, problems, read
from attnconv.models.presets import PRESETS
from attnconv.training.recipes import recipe
from attnconv.training.run_checks import machine_problems
from attnconv.training.settings import (
    OptimSettings,
    RunSettings,
    ScheduleSettings,
    TrainSettings,
)

BASE = RunSettings(preset="quadratic", model=PRESETS["quadratic"])


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("group", "values", "got"),
    [
        ("train", {"epochs": 0}, "0"),
        ("train", {"batch_size": -5}, "-5"),
        ("train", {"seed": -1}, "-1"),
        ("train", {"seed": 2**63}, str(2**63)),
        ("train", {"precision": "16"}, "'16'"),
        ("optim", {"name": "lion"}, "'lion'"),
        ("optim", {"learning_rate": 0.0}, "0.0"),
        ("optim", {"position_rate": -1.0}, "-1.0"),
        ("optim", {"momentum": 1.0}, "1.0"),
        ("optim", {"weight_decay": float("nan")}, "nan"),
        ("optim", {"clip": 0.0}, "0.0"),
        ("optim", {"clip": float("inf")}, "inf"),
        ("optim", {"nesterov": True, "name": "adamw"}, "True"),
        ("optim", {"nesterov": True, "momentum": 0.0}, "True"),
        ("schedule", {"warmup": 1.0}, "1.0"),
        ("schedule", {"decay": 2.0}, "2.0"),
        ("schedule", {"milestones": (3, 2), "name": "steps"}, "(3, 2)"),
        ("schedule", {"milestones": (300,), "name": "steps"}, "(300,)"),
    ],
)
def test_each_mistake_is_named(group: str, values: dict[str, Any], got: str) -> None:
    settings = replace(BASE, **{group: replace(getattr(BASE, group), **values)})
    (found,) = problems(settings)
    assert (found.name, found.got) == (f"{group}.{next(iter(values))}", got)


def test_all_mistakes_are_named_together() -> None:
    wrong = replace(
        BASE,
        model=replace(BASE.model, classes=0),
        optim=OptimSettings(learning_rate=-1.0),
        schedule=ScheduleSettings(warmup=2.0),
        train=TrainSettings(epochs=0),
    )
    found = problems(wrong)
    assert [each.name for each in found] == ["model.classes", "optim.learning_rate", "schedule.warmup", "train.epochs"]
    assert str(SettingsError(found)).count("\n") == len(found) - 1


@pytest.mark.parametrize("preset", list(PRESETS))
def test_recipes_are_legal_and_survive_the_run_folder(preset: str) -> None:
    assert problems(recipe(preset)) == []
    assert read(RunSettings, json.loads(json.dumps(plain(recipe(preset))))) == recipe(preset)


def test_settings_of_earlier_versions_name_processes_that_torchrun_knows() -> None:
    values = plain(BASE)
    values["train"] |= {"devices": 2, "nodes": 1, "tensorboard": True}
    assert read(RunSettings, values) == BASE


def test_a_batch_is_shared_evenly_among_the_processes_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    wrong = replace(BASE, train=TrainSettings(batch_size=100, accumulate=3))
    (found,) = machine_problems(wrong)
    assert re.fullmatch(r"train\.batch_size: .* 12 .*got 100\..*=108\.", str(found))


def test_mps_has_no_64_bit_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    for accelerator in ("mps", "auto"):
        wrong = replace(BASE, train=TrainSettings(accelerator=accelerator, precision="64"))
        assert [found.name for found in machine_problems(wrong)] == ["train.precision"]


def test_each_process_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    (found,) = machine_problems(BASE)
    assert re.fullmatch(r"torchrun --nproc-per-node: .* 1\b.*got 2 .*", str(found))
    assert machine_problems(replace(BASE, train=TrainSettings(accelerator="cpu"))) == []


def test_the_papers_recipe_is_table_2() -> None:
    settings = recipe("quadratic")
    assert (settings.train.epochs, settings.train.batch_size, settings.train.seed) == (300, 100, 42)
    assert (settings.optim.name, settings.optim.learning_rate, settings.optim.momentum) == ("sgd", 0.1, 0.9)
    assert (settings.optim.weight_decay, settings.optim.nesterov, settings.optim.clip) == (1e-4, False, None)
    assert (settings.schedule.name, settings.schedule.warmup) == ("cosine", 0.05)
    assert (settings.optim.label_smoothing, settings.optim.position_rate, settings.train.precision) == (0.0, 1.0, "32")
    resnet = recipe("resnet18").schedule
    assert (resnet.name, resnet.milestones, resnet.decay) == ("steps", (80, 150, 250), 0.1)


@pytest.mark.usefixtures("unhooked")
def test_unknown_presets_and_recipes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"preset: .*got 'quadritic'"):
        recipe("quadritic")
    with pytest.raises(ValueError, match="name: must be paper or modern, got 'fast'"):
        recipe("quadratic", "fast")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values["train"].update(epoch=3), "epoch"),
        (lambda values: values["train"].update(epochs="many"), "epochs"),
        (lambda values: values.pop("model"), "model"),
    ],
)
def test_settings_files_with_unknown_or_wrong_values_are_refused(change: Any, message: str) -> None:
    values = plain(BASE)
    change(values)
    with pytest.raises(ValueError, match=message):
        read(RunSettings, values, origin="from settings.json")
