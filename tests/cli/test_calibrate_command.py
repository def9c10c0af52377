"""`attnconv calibrate`."""

import json
import re
from pathlib import Path

import pytest
import torch

from attnconv.cli import main
from attnconv.operators.planner import machine_of


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return the exit status, standard output and standard error of a command."""
    with pytest.raises(SystemExit) as end:
        main(["calibrate", *words])
    printed = capsys.readouterr()
    return int(end.value.code or 0), printed.out, printed.err


def test_a_calibration_is_measured_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    status, out, _ = call(capsys)
    kept = tmp_path / "attnconv" / "machine.json"
    assert (status, f"Calibration: {kept}" in out) == (0, True)
    assert json.loads(kept.read_text())["cpu"]["product"] > 0
    monkeypatch.undo()
    machine_of.cache_clear()


def test_a_missing_gpu_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, _, err = call(capsys, "--accelerator", "cuda")
    assert status == 2
    assert re.search("--accelerator: .*got 'cuda'", err)
