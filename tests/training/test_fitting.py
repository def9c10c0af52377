"""Short training runs: the files they write, how they resume, and what they reject."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attnconv.data.settings import AugmentSettings
from attnconv.models.checkpoint import read_checkpoint
from attnconv.models.model_loader import load
from attnconv.training.evaluation import autocast
from attnconv.training.fitting import fit
from attnconv.training.run_folder import RunFolder
from attnconv.training.run_recorder import DivergedError
from attnconv.training.settings import PrecisionName, SettingsError
from tests.training.making import MODEL, CutError, before_epoch, tiny


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Uninterrupted run of three epochs."""
    return fit(tiny(epochs=3), tmp_path_factory.mktemp("runs") / "whole", progress=False, command=["attnconv", "train"])


def same_weights(one: RunFolder, other: RunFolder) -> bool:
    first, second = load_file(one.last_weights), load_file(other.last_weights)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_one_process_needs_no_others(whole: RunFolder) -> None:
    assert whole.result() is not None
    assert not torch.distributed.is_initialized()


def test_a_run_leaves_everything_about_it(whole: RunFolder) -> None:
    record = whole.record()
    assert record["command"] == ["attnconv", "train"]
    assert {"python", "torch", "attnconv"} <= set(record["versions"])
    assert whole.settings() == tiny(epochs=3)
    assert [(line["epoch"], line["split"]) for line in whole.metrics()] == [
        (epoch, split) for epoch in (1, 2, 3) for split in ("train", "validation")
    ]
    assert [line["epoch"] for line in whole.heads()] == [0, 1, 2, 3]
    first, *_, last = [line["layers"][0] for line in whole.heads()]
    assert (first["name"], len(first["centres"])) == ("blocks.0.attention", 3)
    assert first["centres"] != last["centres"]
    result = whole.result()
    assert result is not None
    assert result["last"]["epoch"] == 3
    assert 0 <= result["best"]["test"]["accuracy"] <= 1
    assert load(str(whole.path)).model is not None


def test_the_same_settings_give_the_same_bits(whole: RunFolder, tmp_path: Path) -> None:
    assert same_weights(whole, fit(tiny(epochs=3), tmp_path / "again", progress=False))
    other = fit(tiny(epochs=3, seed=7), tmp_path / "other", progress=False)
    assert not same_weights(whole, other)


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_run_cut_after_an_epoch_resumes_to_the_same_bits(whole: RunFolder, tmp_path: Path, epoch: int) -> None:
    folder = RunFolder(tmp_path / "cut")
    with before_epoch(epoch), pytest.raises(CutError):
        fit(tiny(epochs=3), folder.path, progress=False)
    with folder.metrics_file.open("a") as stream:
        lost = {"step": 9, "epoch": 3, "split": "train", "loss": 0.5, "accuracy": 0.5, "lr": 0.1, "seconds": 1.0}
        stream.write(json.dumps(lost) + '\n{"epo')  # incomplete lines that a kill may leave
    resumed = fit(tiny(epochs=3), folder.path, resume=True, progress=False)
    assert same_weights(whole, resumed)
    plain = [{k: v for k, v in line.items() if k != "seconds"} for line in resumed.metrics()]
    assert plain == [{k: v for k, v in line.items() if k != "seconds"} for line in whole.metrics()]
    assert resumed.heads() == whole.heads()


def test_a_run_that_is_written_every_second_epoch_is_the_same_run(whole: RunFolder, tmp_path: Path) -> None:
    """A run cut after 1 epoch has written nothing, after 2 epochs both; `checkpoint_every` may change on resuming."""
    folder = RunFolder(tmp_path / "rare")
    for epoch, written in ((1, []), (2, [1, 2])):
        with before_epoch(epoch), pytest.raises(CutError):
            fit(tiny(epochs=3, checkpoint_every=2), folder.path, resume=True, progress=False)
        assert [line["epoch"] for line in folder.metrics() if line["split"] == "train"] == written
        assert folder.last_weights.is_file() == folder.state_file.is_file() == bool(written)
    fit(tiny(epochs=3, checkpoint_every=1), folder.path, resume=True, progress=False)
    through = fit(tiny(epochs=3, checkpoint_every=5), tmp_path / "once", progress=False)
    for run in (folder, through):
        assert same_weights(whole, run)
        assert load_file(run.best_weights).keys() == load_file(whole.best_weights).keys()
        assert read_checkpoint(run.best_weights).extra == read_checkpoint(whole.best_weights).extra
        assert run.heads() == whole.heads()
        assert [line["loss"] for line in run.metrics()] == [line["loss"] for line in whole.metrics()]


def test_a_run_that_begins_with_given_weights_does_so_after_a_kill_as_well(whole: RunFolder, tmp_path: Path) -> None:
    source = tmp_path / "source.safetensors"
    shutil.copy(whole.last_weights, source)
    begun = fit(tiny(epochs=1), tmp_path / "begun", start_from=source, progress=False)
    assert begun.heads()[0]["layers"] == whole.heads()[-1]["layers"]
    result, before = begun.result(), whole.result()
    assert result is not None
    assert before is not None
    assert "start" not in before
    assert result["start"] == {**before["last"], "epoch": 0}
    assert not same_weights(begun, fit(tiny(epochs=1), tmp_path / "fresh", progress=False))
    with before_epoch(0), pytest.raises(CutError):
        fit(tiny(epochs=1), tmp_path / "cut", start_from=source, progress=False)
    source.unlink()
    assert same_weights(begun, fit(tiny(epochs=1), tmp_path / "cut", resume=True, progress=False))


def test_weights_to_begin_with_are_those_of_the_settings(whole: RunFolder, tmp_path: Path) -> None:
    wider = replace(tiny(), model=replace(MODEL, heads=4))
    with pytest.raises(ValueError, match=r"start_from: .*got .*size mismatch"):
        fit(wider, tmp_path / "run", start_from=whole.path, progress=False)
    with pytest.raises(ValueError, match=rf"start_from: must be omitted, .* got {whole.path}"):
        fit(tiny(epochs=3), whole.path, start_from=whole.path, resume=True, progress=False)
    assert not (tmp_path / "run").exists()


def test_accumulation_takes_the_same_steps(tmp_path: Path) -> None:
    settings = tiny(epochs=1, precision="64")
    settings = replace(settings, model=replace(MODEL, dropout=0.0))
    one = fit(settings, tmp_path / "one", progress=False)
    two = fit(replace(settings, train=replace(settings.train, accumulate=2)), tmp_path / "two", progress=False)
    first, second = load_file(one.last_weights), load_file(two.last_weights)
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("capability", "used"), [("AVX512", "bf16"), ("AVX2", "32"), ("DEFAULT", "32")])
def test_bf16_and_the_test_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: str, used: PrecisionName
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    run = fit(tiny(epochs=1, precision="bf16", test_curve=True), tmp_path / "run", progress=False)
    assert [line["split"] for line in run.metrics()] == ["train", "validation", "test"]
    assert run.record()["used_precision"] == used
    with autocast("bf16", torch.device("cpu")):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (torch.bfloat16 if used == "bf16" else torch.float32)


def test_wrong_settings_stop_before_any_work(tmp_path: Path) -> None:
    settings = tiny(epochs=0)
    settings = replace(settings, optim=replace(settings.optim, learning_rate=-1.0))
    with pytest.raises(SettingsError, match=r"(?s)optim\.learning_rate: .*train\.epochs: must be"):
        fit(settings, tmp_path / "run", progress=False)
    wrong = replace(tiny(), model=replace(tiny().model, classes=7, image_channels=3))
    with pytest.raises(
        SettingsError, match=r"(?s)model\.image_channels: must be 1 .* got 3.*model\.classes: must be 10 .* got 7"
    ):
        fit(wrong, tmp_path / "run", progress=False)
    mixed = replace(tiny(accumulate=20), augment=AugmentSettings(mixup=0.2))
    with pytest.raises(SettingsError, match=r"train\.batch_size: must be above 20 .* to mix images"):
        fit(mixed, tmp_path / "run", progress=False)
    with pytest.raises(SettingsError, match=r"train\.batch_size: .*15.*got 20"):
        fit(tiny(limit=15), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_folders_that_hold_something_are_not_overwritten(whole: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run_dir: .*got .*which contains a run"):
        fit(tiny(epochs=3), whole.path, progress=False)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"run_dir: .*got .*which contains other files"):
        fit(tiny(), tmp_path, progress=False)
    with pytest.raises(ValueError, match=r"run_dir: .*got the file"):
        fit(tiny(), tmp_path / "notes.txt", progress=False)


def test_a_run_is_resumed_with_its_own_settings_only(whole: RunFolder) -> None:
    with pytest.raises(SettingsError, match=r"train\.seed: .*42.*got 7"):
        fit(tiny(epochs=3, seed=7), whole.path, resume=True, progress=False)


def test_a_loss_that_diverges_stops_the_run_and_keeps_the_last_good_weights(tmp_path: Path) -> None:
    settings = tiny(epochs=3)
    wild = replace(settings, optim=replace(settings.optim, name="sgd", learning_rate=1e30, clip=None))
    with pytest.raises(DivergedError, match=r"loss: .*got (nan|inf) at step"):
        fit(wild, tmp_path / "run", progress=False)
    once = replace(wild, train=replace(wild.train, batch_size=120, log_every=50))  # one step per epoch
    with pytest.raises(DivergedError, match=r"loss: .*got (nan|inf) at step 1 "):
        fit(once, tmp_path / "once", progress=False)


def test_a_torn_state_is_named(whole: RunFolder, tmp_path: Path) -> None:
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(whole.path, copy.path)
    copy.state_file.write_bytes(copy.state_file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"state: .*checksum.*got .*state\.ckpt"):
        fit(tiny(epochs=3), copy.path, resume=True, progress=False)
