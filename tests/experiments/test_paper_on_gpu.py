"""`experiments.paper_on_gpu`: the order of its jobs, time limits, and exports; tests/verify runs it from end to end."""

import importlib
import json
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import tyro
from safetensors.torch import load_file

import experiments.recast_resnet
import experiments.recipes
from attnconv.models.checkpoint import save_weights
from attnconv.models.classifiers import build
from attnconv.models.model_loader import load
from attnconv.models.settings import AttentionSettings
from attnconv.training.recipes import recipe
from attnconv.training.run_folder import RunFolder
from experiments.paper_export import export, join
from experiments.paper_on_gpu import MORE, Job, main, parse, plan, shortened, state, stops, trainings, work

ROOT = Path(__file__).resolve().parents[2]


def names(*words: str) -> list[str]:
    return [job.name for job in plan(parse(words))]


class TestPlan:
    def test_the_most_wanted_come_first(self) -> None:
        assert names() == [
            *("quadratic", "resnet18", "quadratic-seed-43", "resnet18-seed-43", "quadratic-seed-44"),
            *("resnet18-seed-44", "quadratic-generalized", "quadratic-generalized-pruned", "learned"),
            *("quadratic-16-heads", "learned-content-100-epochs", "quadratic-attention-dropout-100-epochs"),
            *("fast-recast-94", "fast-recast-96", "sequence", "starts", "attention-only", "recipes"),
            *("recast-resnet", "gated-recast"),
        ]

    def test_without_tyro_the_other_scripts_are_left_out_in_words(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert names()[-1] == "quadratic-attention-dropout-100-epochs"
        assert "tyro: not installed" in capsys.readouterr().err

    def test_recipes_and_recast_take_up_what_was_trained(self, tmp_path: Path) -> None:
        words = ["--out", str(tmp_path), "--epochs", "20", "--seeds", "2", "--precision", "32"]
        recipes, recast = plan(parse([*words, "--only", "recipes", "recast-resnet"]))
        script = recipes.words[recipes.words.index("--script") + 1 :]
        assert script[0] == "recipes"
        found = tyro.cli(experiments.recipes.Settings, args=script[1:])
        assert (found.scale, found.epochs, found.seeds, found.precision) == ("paper", 20, 2, "32")
        assert (found.paper_runs, found.kept) == (tmp_path / "runs", tmp_path / "recipes-kept")
        script = recast.words[recast.words.index("--script") + 1 :]
        other = tyro.cli(experiments.recast_resnet.Settings, args=script[1:])
        assert (other.run, other.seeds) == (tmp_path / "runs" / "resnet18-20-epochs", 2)
        assert not recast.done()

    @pytest.mark.parametrize(
        ("name", "seeds"),
        [
            *(("fast-recast-94", 2), ("fast-recast-96", 2), ("sequence", 3)),
            *(("starts", (0, 1)), ("attention-only", (0, 1)), ("gated-recast", (0, 1))),
        ],
    )
    def test_flags_of_scripts(self, name: str, seeds: object, tmp_path: Path) -> None:
        (job,) = plan(parse(["--out", str(tmp_path), "--seeds", "2", "--only", name]))
        script, *flags = job.words[job.words.index("--script") + 1 :]
        settings = tyro.cli(importlib.import_module(f"experiments.{script}").Settings, args=flags)
        assert (settings.seeds, settings.out) == (seeds, tmp_path / name)

    def test_only_takes_names_by_their_beginning(self) -> None:
        assert names("--only", "resnet", "learned", "--seeds", "1") == [
            *("resnet18", "learned", "learned-content-100-epochs"),
        ]

    def test_the_paper_s_own_schedule_is_kept_where_nothing_else_is_said(self) -> None:
        runs = {run.folder.path.name: run.settings for run in trainings(parse(["--scale", "paper"]))}
        assert runs["quadratic"].train.epochs == 300
        assert runs["quadratic"].train.precision == "bf16"
        content = runs["learned-content-100-epochs"]
        assert (content.preset, content.train.epochs) == ("learned-content-100-epochs", 100)
        dropout = runs["quadratic-attention-dropout-100-epochs"].model
        assert isinstance(dropout, AttentionSettings)
        assert dropout.attention_dropout == 0.1

    def test_milestones_move_with_the_epochs(self) -> None:
        run = next(run for run in trainings(parse([])) if run.name == "resnet18")
        assert shortened(run, 30).settings.schedule.milestones == (8, 15, 25)
        assert shortened(run, 2).settings.schedule.milestones == (1,)  # no milestone before the first epoch
        assert shortened(run, 300) is run

    def test_a_shorter_schedule_is_named_once_and_a_pruned_model_goes_on_for_a_third(self) -> None:
        runs = {run.folder.path.name: run.settings.train.epochs for run in trainings(parse(["--epochs", "20"]))}
        assert runs["quadratic-seed-43-20-epochs"] == runs["learned-content-20-epochs"] == 20
        assert runs["quadratic-attention-dropout-20-epochs"] == 20
        assert runs["quadratic-generalized-pruned-6-epochs"] == 6

    def test_a_chunk_of_no_time_trains_nothing(self, tmp_path: Path) -> None:
        assert main(["--scale", "tiny", "--minutes", "0", "--out", str(tmp_path)]) == MORE
        assert not (tmp_path / "runs").exists()


class TestChunks:
    def jobs(self, out: Path) -> list[Job]:
        """Return a job that fails, one that does not end, and one that creates a file."""
        made = out / "made"
        write = f"import pathlib; pathlib.Path({str(made)!r}).touch()"
        return [
            Job("wrong", ("-c", "raise SystemExit(7)"), lambda: False),
            Job("endless", ("-c", "import time; time.sleep(60)"), (out / "never").is_file),
            Job("quick", ("-c", write), made.is_file),
        ]

    def test_a_failure_does_not_hold_up_the_others_and_the_end_of_the_time_does(self, tmp_path: Path) -> None:
        jobs = self.jobs(tmp_path)
        work(jobs, tmp_path, seconds=1.0, again=False)
        assert [state(job, tmp_path) for job in jobs] == ["failed", "to do", "to do"]
        assert json.loads((tmp_path / "logs" / "wrong.failed.json").read_text()) == {"code": 7}
        (tmp_path / "never").touch()
        work(jobs, tmp_path, seconds=60.0, again=False)
        assert [state(job, tmp_path) for job in jobs] == ["failed", "done", "done"]

    def test_a_script_that_does_not_end_lets_the_others_go_first(self, tmp_path: Path) -> None:
        endless, quick = (replace(job, waits=job.name == "endless") for job in self.jobs(tmp_path)[1:])
        for times in range(1, 4):
            work([endless, quick], tmp_path, seconds=0.3, again=False)
            assert (stops(endless, tmp_path), state(quick, tmp_path)) == (times, "to do")
        work([endless, quick], tmp_path, seconds=10.0, again=False)
        assert (stops(endless, tmp_path), state(quick, tmp_path)) == (4, "done")

    def test_failures_are_tried_again_when_asked(self, tmp_path: Path) -> None:
        job = Job("job", ("-c", ""), (tmp_path / "mended").is_file)
        work([job], tmp_path, seconds=60.0, again=False)
        assert state(job, tmp_path) == "failed"  # exit status 0, but the result is missing
        (tmp_path / "mended").touch()
        work([job], tmp_path, seconds=60.0, again=True)
        assert state(job, tmp_path) == "done"


def test_a_job_ends_with_the_process_that_started_it() -> None:
    """The pipe inherited by the child closes, so no process has it open any longer."""
    child = (
        "import sys, time\nfrom experiments.paper_on_gpu import end_with\nend_with(int(sys.argv[1]))\ntime.sleep(100)"
    )
    parent = f"import os, subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}, str(os.getpid())])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, cwd=ROOT)
    time.sleep(1)  # the child is running or starting; in both cases it finds that its parent has changed
    process.kill()
    assert process.communicate(timeout=60)[0] == b""


class TestExport:
    @pytest.fixture
    def out(self, tmp_path: Path) -> Path:
        settings = recipe("quadratic-digits")
        torch.manual_seed(0)
        folder = RunFolder(tmp_path / "runs" / "one")
        folder.begin(settings, {})
        save_weights(
            folder.last_weights, build(settings.model), settings.model, classes=("a",) * 10, extra={"epoch": 2}
        )
        (tmp_path / "runs" / "begun" / "checkpoints").mkdir(parents=True)
        return tmp_path

    def test_parts_come_together_to_the_weights_in_half_precision(self, out: Path, tmp_path: Path) -> None:
        target = tmp_path / "exported"
        export(out, target, weights_of=["runs/one", "runs/begun"], part_bytes=50_000)
        sizes = [path.stat().st_size for path in sorted(target.glob("one.*"))]
        assert len(sizes) > 1
        assert set(sizes[:-1]) == {50_000}
        again = tmp_path / "again"
        assert join(target, again) == [again / "runs" / "one" / "checkpoints" / "last.safetensors"]
        wanted, found = (load_file(RunFolder(folder / "runs" / "one").last_weights) for folder in (out, again))
        assert wanted.keys() == found.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor.half().to(tensor.dtype), rtol=0, atol=0)
        assert load(again / "runs" / "one").classes == ("a",) * 10

    def test_records_travel_and_checkpoints_do_not(self, out: Path, tmp_path: Path) -> None:
        export(out, tmp_path / "exported", weights_of=[])
        with tarfile.open(tmp_path / "exported" / "records.tar.gz") as tar:
            assert tar.getnames() == ["runs/one/settings.json"]

    def test_a_run_of_a_recipe_travels_by_its_epochs_and_name(self, out: Path, tmp_path: Path) -> None:
        kept = tmp_path / "recipes-kept" / "paper-32" / "9-epochs"
        kept.mkdir(parents=True)
        (tmp_path / "runs" / "one").rename(kept / "two")
        export(out, tmp_path / "exported", weights_of=["recipes-kept/paper-32/9-epochs/two"])
        assert (tmp_path / "exported" / "9-epochs-two.safetensors.part-00").is_file()
        (whole,) = join(tmp_path / "exported", tmp_path / "again")
        assert whole == RunFolder(tmp_path / "again" / "recipes-kept/paper-32/9-epochs/two").last_weights
        with tarfile.open(tmp_path / "exported" / "records.tar.gz") as tar:
            assert tar.getnames() == ["recipes-kept/paper-32/9-epochs/two/settings.json"]

    def test_what_an_earlier_export_left_is_gone(self, out: Path, tmp_path: Path) -> None:
        export(out, tmp_path / "exported", weights_of=["runs/one"], part_bytes=10_000)
        many = len(list((tmp_path / "exported").glob("*.part-*")))
        export(out, tmp_path / "exported", weights_of=["runs/one"])
        assert len(list((tmp_path / "exported").glob("*.part-*"))) == 1 < many

    def test_parts_that_are_missing_or_damaged_are_refused(self, out: Path, tmp_path: Path) -> None:
        target = tmp_path / "exported"
        export(out, target, weights_of=["runs/one"], part_bytes=50_000)
        part = target / "one.safetensors.part-01"
        content = part.read_bytes()
        part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(ValueError, match=r"one\.safetensors .*got other bytes"):
            join(target, tmp_path / "again")
        part.unlink()
        with pytest.raises(FileNotFoundError, match=r"one\.safetensors\.part-01"):
            join(target, tmp_path / "again")
        assert not (tmp_path / "again").exists()
