"""Every wrong setting is found, all at once, in the user's spelling; recipes are legal, the paper's is the paper's."""

from dataclasses import replace
from typing import Any

import pytest

from attnconv.models.presets import PRESETS
from attnconv.training.recipes import recipe
from attnconv.training.run_checks import machine_problems
from attnconv.training.settings import (
    OptimSettings,
    RunSettings,
    ScheduleSettings,
    SettingsError,
    TrainSettings,
    problems,
)
from attnconv.training.settings_json import from_plain, to_plain

BASE = RunSettings(preset="quadratic", model=PRESETS["quadratic"])


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("group", "values", "message"),
    [
        ("train", {"epochs": 0}, "--epochs: must be a whole number of at least 1, got 0."),
        ("train", {"batch_size": -5}, "--batch-size: must be a whole number of at least 1, got -5."),
        ("train", {"seed": -1}, "--seed: must be a whole number of at least 0, got -1."),
        ("train", {"seed": 2**63}, "--seed: must be below 2^63"),
        ("train", {"precision": "16"}, "--precision: must be one of 32, bf16, 64, got '16'."),
        ("train", {"batch_size": 10, "accumulate": 3}, "--batch-size: must be a multiple of 3"),
        ("train", {"accelerator": "mps", "precision": "64"}, "--precision: must be 32 or bf16 on mps"),
        ("optim", {"name": "lion"}, "--optim.name: must be one of sgd, adamw, got 'lion'."),
        ("optim", {"learning_rate": 0.0}, "--optim.learning-rate: must be a finite number above 0, got 0.0."),
        ("optim", {"position_rate": -1.0}, "--optim.position-rate: must be a finite number above 0, got -1.0."),
        ("optim", {"momentum": 1.0}, "--optim.momentum: must be a number of at least 0 and below 1, got 1.0."),
        ("optim", {"weight_decay": float("nan")}, "--optim.weight-decay: must be a finite number of at least 0"),
        ("optim", {"clip": 0.0}, "--optim.clip: must be a finite number above 0, got 0.0."),
        ("optim", {"nesterov": True, "name": "adamw"}, "--optim.nesterov: must be off with --optim.name adamw"),
        ("optim", {"nesterov": True, "momentum": 0.0}, "--optim.nesterov: must be off when --optim.momentum is 0"),
        ("schedule", {"warmup": 1.0}, "--schedule.warmup: must be a number of at least 0 and below 1, got 1.0."),
        ("schedule", {"decay": 2.0}, "--schedule.decay: must be at most 1, got 2.0."),
        ("schedule", {"name": "steps", "milestones": (3, 2)}, "--schedule.milestones: must be growing whole numbers"),
        ("schedule", {"name": "steps", "milestones": (300,)}, "--schedule.milestones: must begin before the last"),
    ],
)
def test_each_mistake_has_its_sentence(group: str, values: dict[str, Any], message: str) -> None:
    settings = replace(BASE, **{group: replace(getattr(BASE, group), **values)})
    found = problems(settings)
    assert len(found) == 1
    assert found[0].startswith(message)


def test_all_mistakes_are_named_together() -> None:
    wrong = replace(
        BASE,
        model=replace(BASE.model, classes=0),
        optim=OptimSettings(learning_rate=-1.0),
        schedule=ScheduleSettings(warmup=2.0),
        train=TrainSettings(epochs=0),
    )
    found = problems(wrong)
    for flag in ("--classes", "--optim.learning-rate", "--schedule.warmup", "--epochs"):
        assert sum(line.startswith(flag) for line in found) == 1
    assert str(SettingsError(found)).count("\n") == len(found) - 1


@pytest.mark.parametrize("preset", list(PRESETS))
def test_recipes_are_legal_and_survive_the_run_folder(preset: str) -> None:
    assert problems(recipe(preset)) == []
    assert from_plain(to_plain(recipe(preset))) == recipe(preset)


def test_settings_of_earlier_versions_name_processes_that_torchrun_knows() -> None:
    values = to_plain(BASE)
    values["train"] |= {"devices": 2, "nodes": 1}
    assert from_plain(values) == BASE


def test_a_batch_is_shared_evenly_among_the_processes_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    wrong = replace(BASE, train=TrainSettings(batch_size=100, accumulate=3))
    assert problems(wrong) == ["--batch-size: must be a multiple of 12 (processes x accumulate), got 100. Take 108."]


def test_each_process_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert machine_problems(BASE) == [
        "torchrun --nproc-per-node: must be at most the 1 GPUs of this machine, got 2 or more."
    ]
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


def test_unknown_presets_are_refused() -> None:
    with pytest.raises(ValueError, match="preset: must be the name of a preset, got 'quadritic'"):
        recipe("quadritic")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values["train"].update(epoch=3), "epoch"),
        (lambda values: values["train"].update(epochs="many"), "epochs"),
        (lambda values: values.pop("model"), "model"),
    ],
)
def test_settings_files_with_unknown_or_wrong_values_are_refused(change: Any, message: str) -> None:
    values = to_plain(BASE)
    change(values)
    with pytest.raises(ValueError, match=message):
        from_plain(values, origin="from settings.json")
