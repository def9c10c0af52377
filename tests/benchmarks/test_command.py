"""The `python -m benchmarks` command, from its arguments to its files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command, compare
from benchmarks.__main__ import main, settings_of
from benchmarks.measure import Memory
from benchmarks.results import QUESTIONS

ROOT = Path(__file__).resolve().parents[2]


def test_it_leaves_numbers_a_page_and_no_figure_that_no_page_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("model-step", "hard-heads")
    main([*names, "--quick", "--out", str(tmp_path / "bench")])
    assert "What does attention add" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "bench").iterdir()} == {"README.md", "results.json"}
    record = json.loads((tmp_path / "bench" / "results.json").read_text())
    assert record["environment"]["command"][:4] == ["python", "-m", "benchmarks", "model-step"]
    assert record["environment"]["threads"] >= 1
    assert record["settings"]["hard-heads"] == {"batch": 2, "side": 32, "repeats": 2}
    assert {row["question"] for row in record["rows"]} == set(names)
    assert all(row["seconds"]["median"] > 0 for row in record["rows"])
    page = (tmp_path / "bench" / "README.md").read_text()
    assert page.count("| quadratic-digits, float32, batch 4 |") == 3


def test_the_figures_of_the_documentation_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A new process takes seconds; tests/benchmarks/test_measure.py starts one.
    monkeypatch.setattr(compare, "memory_of", lambda name, case: Memory(2**20, 2**28, 2**19))
    main(["megapixel", "position-only", "--quick", "--out", str(tmp_path)])
    page = (tmp_path / "README.md").read_text()
    assert "exponent of time over positions, alpha 0.5" in page
    for name in ("megapixel", "position-only"):
        assert f"({name}.svg)" in page
        assert (tmp_path / f"{name}.svg").is_file()
        assert (tmp_path / f"{name}.png").is_file()


@pytest.mark.parametrize(("cpu", "dtypes"), [("AVX2", ("float32",)), ("AVX512", ("float32", "bfloat16"))])
def test_bfloat16_is_measured_only_if_the_cpu_has_instructions_for_it(
    cpu: str, dtypes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: cpu)
    assert settings_of("planner", "cpu", quick=False)["dtypes"] == dtypes


def test_it_runs_from_a_checkout() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, "-m", "benchmarks", "planner", "--quick"]
    found = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert found.returncode == 0
    assert not any("attnconv" in line or "benchmarks" in line for line in found.stderr.splitlines())  # torch may warn
    assert "within 1.2 of the best" in found.stdout


def test_a_folder_that_cannot_be_written_fails_before_the_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(command, "ask", lambda *arguments: pytest.fail("a measurement started"))
    for out, error in ((tmp_path / "file", FileExistsError), (tmp_path / "file" / "bench", NotADirectoryError)):
        with pytest.raises(error, match="file"):
            main(["planner", "--quick", "--out", str(out)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mega", "--quick"], f"NAME: .*{', '.join(QUESTIONS)}, got 'mega'"),
        (["planner", "--quick", "--device", "cuda"], "--device: .*got cuda"),
    ],
)
def test_a_wrong_call_is_reported(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
