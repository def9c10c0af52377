from dataclasses import replace
from pathlib import Path

import pytest

from attnconv.models.operation_counts import flops_all
from attnconv.models.settings import AttentionSettings
from attnconv.paper.training_plan import DROPPED, PRUNED, RUNS, SOURCE, plan_runs, runs_in, settings_at
from attnconv.training.recipes import recipe
from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import problems


@pytest.mark.parametrize("scale", ["tiny", "mini", "small", "paper"])
@pytest.mark.parametrize("name", RUNS)
def test_every_run_at_every_scale_is_legal_and_is_its_model(scale: str, name: str) -> None:
    settings = settings_at(scale, name)  # type: ignore[arg-type]
    assert problems(settings) == []
    assert settings.preset.startswith("resnet" if name == "resnet18" else name)
    if isinstance(settings.model, AttentionSettings):
        full = recipe(name if name != PRUNED else SOURCE).model
        assert isinstance(full, AttentionSettings)
        assert (settings.model.encoding, settings.model.heads) == (full.encoding, full.heads)


def test_the_papers_scale_has_the_papers_hyper_parameters() -> None:
    for name in set(RUNS) - {PRUNED}:
        assert settings_at("paper", name) == recipe(name)
    pruned = settings_at("paper", PRUNED)
    assert pruned.train.epochs == 100
    assert pruned.optim.learning_rate == pytest.approx(0.01)


def test_seeds_have_folders_of_their_own(tmp_path: Path) -> None:
    runs = plan_runs("small", tmp_path, names=["learned"], seeds=2, data_root="elsewhere")
    assert [run.folder.path.name for run in runs] == ["learned", "learned-seed-43"]
    assert [run.settings.train.seed for run in runs] == [42, 43]
    assert {run.settings.data.root for run in runs} == {"elsewhere"}
    assert {run.state for run in runs} == {"new"}
    assert all(run.settings.train.test_curve for run in runs)


def test_runs_are_found_by_their_names_and_of_a_seed_the_longest(tmp_path: Path) -> None:
    names = ("quadratic", "quadratic-seed-44", "quadratic-seed-43-20-epochs", "quadratic-20-epochs", "other")
    for name in (*names, "learned-content-100-epochs", "quadratic-generalized-pruned-seed-43"):
        epochs = 20 if "-20-" in name else 100
        settings = settings_at("tiny", "quadratic")
        folder = RunFolder(tmp_path / "runs" / name)
        folder.begin(replace(settings, train=replace(settings.train, epochs=epochs)), {})
    (tmp_path / "runs" / "learned").mkdir()  # not started
    (tmp_path / "runs" / "quadratic-generalized-pruned-start.safetensors").touch()
    assert {name: [run.path.name for run in several] for name, several in runs_in(tmp_path).items() if several} == {
        "quadratic": ["quadratic", "quadratic-seed-43-20-epochs", "quadratic-seed-44"],
        PRUNED: ["quadratic-generalized-pruned-seed-43"],
        "learned-content": ["learned-content-100-epochs"],
    }


def test_the_pruned_model_brings_its_source(tmp_path: Path) -> None:
    assert [run.name for run in plan_runs("tiny", tmp_path, names=[PRUNED])] == [SOURCE, PRUNED]
    small = plan_runs("small", tmp_path, names=[PRUNED])
    assert [run.settings.preset for run in small] == [f"{SOURCE}-small", f"{PRUNED}-small"]


def test_the_mini_residual_network_has_the_budget_of_quadratic() -> None:
    attention, residual = settings_at("mini", "quadratic"), settings_at("mini", "resnet18")
    assert (flops_all(attention.model), flops_all(residual.model)) == (48_628_992, 46_814_944)
    assert attention.train == residual.train
    assert attention.train.epochs == 10


def test_attention_dropout_is_trained_where_it_is_asked_for(tmp_path: Path) -> None:
    assert DROPPED not in [run.name for run in plan_runs("mini", tmp_path)]
    (run,) = plan_runs("mini", tmp_path, names=[DROPPED])
    model, plain = run.settings.model, settings_at("mini", "quadratic").model
    assert isinstance(model, AttentionSettings)
    assert model.attention_dropout == 0.1
    assert replace(model, attention_dropout=0.0) == plain
    assert problems(run.settings) == []
