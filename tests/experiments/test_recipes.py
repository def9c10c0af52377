"""`experiments.recipes`: the candidates, the selection, and kept runs; tests/verify runs the training."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnconv.models.checkpoint import save_weights
from attnconv.models.classifiers import build
from attnconv.models.model_loader import load
from attnconv.models.operation_counts import parameters
from attnconv.models.settings import AttentionSettings
from attnconv.paper.training_plan import settings_at
from attnconv.training.run_folder import RunFolder, write_json
from attnconv.training.settings import RunSettings, problems
from experiments import recipes
from experiments.recipe_candidates import (
    LONG,
    NETWORKS,
    SHORT,
    NetworkName,
    candidates,
    combined,
    over_epochs,
    settings_of,
)
from experiments.recipes import SEARCH_SEED, Settings, main, plan

SCALES = ("tiny", "mini", "small", "paper")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("network", NETWORKS)
class TestCandidates:
    def test_all_can_be_run(self, scale: Any, network: NetworkName) -> None:
        for candidate in candidates(scale, network).all:
            run = settings_of(scale, network, candidate)
            short = over_epochs(run, 1)
            found = problems(replace(run, data=settings_at("tiny", "quadratic").data)) + problems(short)
            assert [problem for problem in found if not problem.name.startswith("data.")] == []
            assert run.train.epochs == settings_at(scale, network).train.epochs

    def test_each_differs_from_the_others_and_keeps_the_attention(self, scale: Any, network: NetworkName) -> None:
        runs = [settings_of(scale, network, candidate) for candidate in candidates(scale, network).all]
        assert len({repr(replace(run, preset="")) for run in runs}) == len(runs)
        planned = settings_at(scale, network).model
        for run in runs:
            if isinstance(planned, AttentionSettings):
                names = ("encoding", "layers", "heads", "width", "downsampling", "attention_dropout", "head_channels")
                assert [getattr(run.model, n) for n in names] == [getattr(planned, n) for n in names]
            else:
                assert run.model == planned

    def test_none_has_more_parameters_than_the_paper_s(self, scale: Any, network: NetworkName) -> None:
        tried = candidates(scale, network)
        most = parameters(settings_of(scale, network, tried.paper).model)
        spare = 0 if scale == "paper" else most // 1000  # the final norm of the reduced models
        for candidate in tried.all:
            assert parameters(settings_of(scale, network, candidate).model) <= most + spare


def test_both_networks_are_tried_as_often() -> None:
    for known in (SHORT, LONG):
        assert len({len(tried.all) for tried in known.values()}) == 1


def test_the_paper_s_recipe_is_the_paper_s() -> None:
    for network in NETWORKS:
        made = settings_of("paper", network, candidates("paper", network).paper)
        assert replace(made, preset=network) == settings_at("paper", network)
    small = settings_of("mini", "quadratic", SHORT["quadratic"].paper)
    assert isinstance(small.model, AttentionSettings)
    assert (small.model.norm, small.model.dropout, small.model.width) == ("post", 0.1, 64)
    assert (small.optim.name, small.optim.learning_rate, small.train.epochs) == ("sgd", 0.1, 10)
    assert settings_of("mini", "resnet18", SHORT["resnet18"].paper).schedule.milestones == (2, 5, 8)


class TestCombined:
    def test_what_did_better_alone_goes_together(self) -> None:
        tried = LONG["quadratic"]
        scores = {"long": 0.5, "fast": 0.6, "mix": 0.7, "cutout": 0.5, "near": 0.4}
        made = combined(tried, scores)
        assert made is not None
        assert made.name == "fast+mix"
        run = settings_of("paper", "quadratic", made)
        assert (run.optim.learning_rate, run.augment.cutmix, run.augment.cutout) == (2e-3, 1.0, None)
        assert run.augment.recipe == "modern"

    def test_of_two_that_change_the_same_the_better_stands(self) -> None:
        for fast, slow, wanted in ((0.7, 0.6, 0.2), (0.6, 0.7, 0.05)):
            made = combined(SHORT["resnet18"], {"modern": 0.5, "fast": fast, "slow": slow, "mild": 0.0, "decay": 0.0})
            assert made is not None
            assert made.changes == {"optim": {"learning_rate": wanted}}

    def test_one_alone_is_not_tried_again(self) -> None:
        scores = {"modern": 0.5, "fast": 0.6, "slow": 0.5, "mild": 0.4, "near": 0.1}
        assert combined(SHORT["quadratic"], scores) is None


Accuracy = Callable[[RunSettings], float]


class Trainer:
    """Replacement for `fit` that writes a validation accuracy, and a test accuracy with the opposite ranking."""

    def __init__(self, held_out: Accuracy) -> None:
        self.held_out, self.runs = held_out, list[RunSettings]()

    def __call__(self, settings: RunSettings, run_dir: Path, *, resume: bool, command: list[str]) -> RunFolder:
        folder, value = RunFolder(run_dir), self.held_out(settings)
        folder.begin(settings, {})
        score = {"validation": {"accuracy": value}, "test": {"accuracy": 1 - value}}
        result = {"seconds": 6.0, "parameters": 7, "last": {"epoch": 1, **score}, "best": {"epoch": 1, **score}}
        write_json(folder.result_file, result)
        save_weights(folder.last_weights, build(settings.model), settings.model)
        self.runs.append(settings)
        return folder


def by_change(settings: RunSettings) -> float:
    """Score AdamW at a high learning rate and SGD with strong weight decay highest."""
    optim = settings.optim
    if settings.preset.startswith("quadratic"):
        return 0.5 + (optim.name == "adamw") * optim.learning_rate
    return 0.5 + (optim.weight_decay == 1e-3) / 10


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    made = Trainer(by_change)
    monkeypatch.setattr(recipes, "fit", made)
    return made


def test_the_choice_is_by_held_out_images_and_both_recipes_are_run(trainer: Trainer, tmp_path: Path) -> None:
    settings = Settings(scale="mini", kept=tmp_path / "kept", out=tmp_path / "out", seeds=2, root=tmp_path)
    trials, finals = main(settings)
    assert [(f.network, f.candidate, f.seed) for f in finals] == [
        *(("quadratic", "paper", 42), ("quadratic", "paper", 43), ("quadratic", "fast", 42), ("quadratic", "fast", 43)),
        *(("resnet18", "paper", 42), ("resnet18", "paper", 43), ("resnet18", "decay", 42), ("resnet18", "decay", 43)),
    ]
    assert {run.train.epochs for run in trainer.runs if run.train.seed == SEARCH_SEED} == {3}
    assert {run.train.epochs for run in trainer.runs if run.train.seed != SEARCH_SEED} == {10}
    record = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(record["trials"]) == len(trials) == 12
    assert record["trials"][2]["changes"] == {"optim": {"learning_rate": 0.004}}
    assert "test" not in record["trials"][0]
    shown = (tmp_path / "out" / "table.md").read_text()
    assert "| quadratic | fast | 7 | 49.60 % ± 0.00 |" in shown
    assert shown.count("**") == 4  # one candidate per network
    kept = [tmp_path / "out" / network for network in ("quadratic", "resnet18")]
    assert [RunFolder(folder).settings().preset for folder in kept] == ["quadratic-mini-fast", "resnet18-mini-decay"]
    assert all(load(folder / "weights.safetensors").settings is not None for folder in kept)
    count = len(trainer.runs)
    main(settings)
    assert len(trainer.runs) == count


def test_where_the_paper_s_recipe_is_best_it_alone_is_run(trainer: Trainer, tmp_path: Path) -> None:
    trainer.held_out = lambda settings: 0.5
    _, finals = main(Settings(kept=tmp_path, root=tmp_path, networks=("resnet18",)))
    assert {final.candidate for final in finals} == {"paper"}
    assert len(finals) == 3


def test_finished_runs_of_the_paper_are_taken_where_nothing_differs(trainer: Trainer, tmp_path: Path) -> None:
    planned = settings_at("paper", "resnet18")
    for name, seed, precision in (("resnet18", 42, "bf16"), ("resnet18-seed-43", 43, "32")):
        train = replace(planned.train, seed=seed, precision=precision, test_curve=True)  # type: ignore[arg-type]
        trainer(replace(planned, train=train), tmp_path / "runs" / name, resume=True, command=[])
    main(Settings("paper", kept=tmp_path / "kept", root=tmp_path, networks=("resnet18",), paper_runs=tmp_path / "runs"))
    anew = {run.train.seed for run in trainer.runs[2:] if "paper" in run.preset and run.train.seed != SEARCH_SEED}
    assert anew == {43, 44}


def test_the_plan_trains_nothing(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(Settings(scale="paper", plan=True)) == ([], [])
    assert trainer.runs == []
    assert (
        "12 to 14 runs of 60 epochs with seed 41, then 6 to 12 runs of 300 epochs, with precision bf16."
        in capsys.readouterr().out
    )
    assert "of 5 epochs with seed 41" in plan(Settings(scale="paper", epochs=5))
