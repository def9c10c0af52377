"""`benchmarks.paper_on_gpu` from beginning to end, with digits for an epoch: killed, resumed, exported."""

from pathlib import Path

from attnconv.models.load import load
from attnconv.training.run_folder import RunFolder
from benchmarks.paper_on_gpu import DONE, FAILED, MORE, main


def test_digits_for_an_epoch_killed_and_resumed(tmp_path: Path) -> None:
    words = ["--scale", "tiny", "--epochs", "1", "--seeds", "1", "--only", "resnet18", "--out", str(tmp_path / "out")]
    words += ["--export", str(tmp_path / "exported")]
    assert main([*words, "--minutes", "0.01"]) == MORE
    assert main([*words, "--minutes", "5"]) == DONE
    folder = RunFolder(tmp_path / "out" / "runs" / "resnet18-1-epochs")
    assert folder.settings().train.epochs == 1
    log = (tmp_path / "out" / "logs" / "resnet18-1-epochs.log").stat().st_size
    assert main([*words, "--minutes", "5"]) == DONE  # and nothing is trained
    assert (tmp_path / "out" / "logs" / "resnet18-1-epochs.log").stat().st_size == log
    assert main(["--join", str(tmp_path / "exported")]) == DONE
    assert load(tmp_path / "exported" / "resnet18-1-epochs.safetensors").settings == folder.settings().model


def test_a_job_that_cannot_run_is_said(tmp_path: Path) -> None:
    """The pruned model alone: the one it continues is not there."""
    words = ["--scale", "tiny", "--only", "quadratic-generalized-pruned", "--out", str(tmp_path)]
    assert main([*words, "--minutes", "5"]) == FAILED
    assert "must find quadratic-generalized finished" in (
        tmp_path / "logs" / "quadratic-generalized-pruned.log"
    ).read_text(encoding="utf-8")
