"""`experiments.paper_on_gpu` from end to end, on digits for one epoch: killed, resumed, exported."""

import json
import re
from pathlib import Path

import pytest

from attnconv.cli.reproduce_command import Arguments, run as reproduce
from attnconv.models.model_loader import load
from attnconv.surgery import head_pruning
from attnconv.training.run_folder import RunFolder
from experiments.keep_reproduction import Settings as KeepSettings, main as keep
from experiments.paper_on_gpu import DONE, FAILED, MORE, main


def test_digits_for_an_epoch_killed_and_resumed(tmp_path: Path) -> None:
    words = ["--scale", "tiny", "--epochs", "1", "--seeds", "1", "--only", "resnet18", "--out", str(tmp_path / "out")]
    words += ["--export", str(tmp_path / "exported")]
    assert main([*words, "--minutes", "0.01"]) == MORE
    assert main([*words, "--minutes", "5"]) == DONE
    folder = RunFolder(tmp_path / "out" / "runs" / "resnet18-1-epochs")
    assert folder.settings().train.epochs == 1
    log = (tmp_path / "out" / "logs" / "resnet18-1-epochs.log").stat().st_size
    assert main([*words, "--minutes", "5"]) == DONE  # nothing is trained
    assert (tmp_path / "out" / "logs" / "resnet18-1-epochs.log").stat().st_size == log
    assert not list((tmp_path / "exported").glob("*.part-*"))  # weights were not requested


def test_recipes_and_the_recast_follow_the_training_through_kills(tmp_path: Path) -> None:
    out, exported = tmp_path / "out", tmp_path / "exported"
    words = ["--scale", "tiny", "--epochs", "1", "--seeds", "1", "--out", str(out), "--export", str(exported)]
    words += ["--only", "resnet18", "recipes", "recast-resnet"]
    assert main([*words, "--minutes", "0.3"]) == MORE  # stops during the recipes
    kept = {file: file.stat().st_mtime_ns for file in out.glob("recipes-kept/*/*/*/result.json")}
    assert main([*words, "--minutes", "9"]) == DONE
    recipes = json.loads((out / "recipes" / "results.json").read_text(encoding="utf-8"))
    assert recipes["search_epochs"] == 1
    folders = {path.name for path in out.glob("recipes-kept/*/*/*")}
    assert folders >= {f"{t['network']}-{t['candidate']}-seed-41" for t in recipes["trials"]}
    assert {file: file.stat().st_mtime_ns for file in kept} == kept  # finished runs are not trained again
    chosen = {final["candidate"] for final in recipes["finals"] if final["network"] == "resnet18"}
    best = max((t for t in recipes["trials"] if t["network"] == "resnet18"), key=lambda t: float(t["held_out"]))
    assert chosen == {"paper", best["candidate"]}
    recast = json.loads((out / "recast-resnet" / "results.json").read_text(encoding="utf-8"))
    assert recast["equality"]["cnn"] == recast["equality"]["attention"]
    name = f"resnet18-{best['candidate']}-seed-42"
    assert main([*words, "--weights", name]) == DONE
    assert main(["--join", str(exported), "--out", str(tmp_path / "joined")]) == DONE
    (run,) = (tmp_path / "joined").glob(f"recipes-kept/*/1-epochs/{name}")
    assert load(run).settings == RunFolder(out / "runs" / "resnet18-1-epochs").settings().model


def test_attention_is_trained_pruned_fetched_drawn_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings differ from the plan: another precision, fewer epochs."""
    monkeypatch.setenv("ATTNCONV_COMMIT", "abc")
    out, exported, joined, kept = (tmp_path / name for name in ("out", "exported", "joined", "kept"))
    names = ["quadratic-1-epochs", "quadratic-generalized-1-epochs", "quadratic-generalized-pruned"]
    words = ["--scale", "tiny", "--epochs", "1", "--precision", "bf16", "--seeds", "2", "--out", str(out)]
    assert main([*words, "--only", *names[:2], "--minutes", "9"]) == DONE
    monkeypatch.setattr(head_pruning, "degenerate_heads", lambda *_: (0,))
    assert main([*words, "--job", names[2]]) == DONE
    words += ["--only", "quadratic-seed", "--export", str(exported), "--minutes", "9", "--weights", *names]
    assert main(words) == DONE
    assert main(["--join", str(exported), "--out", str(joined)]) == DONE
    assert reproduce(Arguments(draw=True, scale="tiny", out=joined)) == 0
    observations = json.loads((joined / "tables" / "observations.json").read_text(encoding="utf-8"))
    rows = {row["observation"]: row for row in observations["rows"]}
    assert list(rows["dip after pruning"]["seeds"]) == ["42"]
    text = (joined / "README.md").read_text(encoding="utf-8")
    assert "quadratic-generalized-1-epochs: --epochs 1 instead of 5, --precision bf16 instead of 32." in text
    keep(KeepSettings(joined, kept))
    assert (kept / "runs" / names[0] / "weights.safetensors").is_file()
    assert not (kept / "runs" / "quadratic-seed-43-1-epochs" / "weights.safetensors").exists()
    assert RunFolder(kept / "runs" / "quadratic-seed-43-1-epochs").result() is not None


def test_a_job_that_cannot_run_is_said(tmp_path: Path) -> None:
    """Only the pruned model is selected, and the run that it continues does not exist."""
    words = ["--scale", "tiny", "--only", "quadratic-generalized-pruned", "--out", str(tmp_path)]
    assert main([*words, "--minutes", "5"]) == FAILED
    log = (tmp_path / "logs" / "quadratic-generalized-pruned.log").read_text(encoding="utf-8")
    assert re.search(r"--job: .* quadratic-generalized\b", log)
