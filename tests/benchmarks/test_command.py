"""`attnconv bench` as a user meets it."""

import json
from pathlib import Path

import pytest
import torch

from attnconv.cli import main
from attnconv.operators.planner import machine_of
from benchmarks import megapixel
from benchmarks.measure import Memory
from benchmarks.settings import QUESTIONS


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Status, standard output and standard error."""
    with pytest.raises(SystemExit) as end:
        main(["bench", *words])
    printed = capsys.readouterr()
    return int(end.value.code or 0), printed.out, printed.err


def test_it_leaves_numbers_a_page_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("model-step", "hard-heads")
    status, out, _ = call(capsys, *names, "--quick", "--hard-heads.repeats", "2", "--out", str(tmp_path / "bench"))
    assert status == 0
    assert "model-step: What does attention add" in out
    assert f"Benchmarks: {tmp_path / 'bench' / 'README.md'}" in out
    figures = {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert {path.name for path in (tmp_path / "bench").iterdir()} == {"README.md", "results.json", *figures}
    record = json.loads((tmp_path / "bench" / "results.json").read_text())
    assert record["environment"]["command"][:3] == ["attnconv", "bench", "model-step"]
    assert record["environment"]["threads"] >= 1
    assert record["settings"]["hard-heads"] == {"batch": 2, "side": 32, "repeats": 2}
    assert {row["question"] for row in record["rows"]} == set(names)
    assert all(row["seconds"]["median"] > 0 for row in record["rows"])
    page = (tmp_path / "bench" / "README.md").read_text()
    assert page.count("| quadratic-digits, float32, batch 4 |") == 3
    assert "(hard-heads.svg)" in page


def test_growth_is_drawn_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Processes of their own take seconds; tests/benchmarks/test_measuring.py starts one.
    monkeypatch.setattr(megapixel, "memory_of", lambda name, case: Memory(2**20, 2**28, 2**19))
    words = ("--quick", "--megapixel.sides", "8", "16", "--megapixel.alphas", "0.5", "--out", str(tmp_path))
    assert call(capsys, "megapixel", *words)[0] == 0
    assert "power of, alpha 0.5" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "megapixel.svg").is_file()


def test_a_calibration_is_measured_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    status, out, _ = call(capsys, "--calibrate")
    kept = tmp_path / "attnconv" / "machine.json"
    assert (status, f"Kept for the planner: {kept}" in out) == (0, True)
    assert json.loads(kept.read_text())["cpu"]["product"] > 0
    monkeypatch.undo()
    machine_of.cache_clear()


def test_a_folder_that_cannot_be_written_is_named_before_the_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr("attnconv.cli.bench_command._measure", lambda *arguments: pytest.fail("it measured"))
    for out, why in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "bench", "Not a directory")):
        status, _, err = call(capsys, "planner", "--quick", "--out", str(out))
        assert status == 2
        assert f"--out: must be a folder that can be written, got {out}. The system says: {why}." in err


@pytest.mark.parametrize(("version", "why"), [(None, "is built without CUDA"), ("12.4", "finds no GPU")])
def test_a_device_that_is_not_here_is_a_sentence(
    version: str | None, why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", version)
    status, _, err = call(capsys, "planner", "--quick", "--device", "cuda", "--planner.repeats", "0")
    assert status == 2
    assert "--device: must be a device that torch can use here, got cuda" in err
    assert why in err
    assert "--planner.repeats: must be at least 1, got 0" in err


def test_all_that_is_wrong_is_said_together(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(capsys, "mega", "--quick", "--model-step.batch", "0")
    assert status == 2
    assert f"NAME: must be one of {', '.join(QUESTIONS)}, got 'mega'" in err
    assert "--model-step.batch: must be at least 1, got 0" in err
