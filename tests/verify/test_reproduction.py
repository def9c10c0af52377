"""`attnconv reproduce` trains every model of the paper once, on a few digits, and writes all figures and tables."""

from pathlib import Path

import pytest

from attnconv.paper import training_plan
from attnconv.surgery import head_pruning
from tests.cli.test_commands import call
from tests.cli.test_reproduce_command import miniature, tables


def test_everything_is_trained_once_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_head(attention: object, criterion: str = "paper") -> tuple[int, ...]:
        return (0,) if criterion == "code" else ()

    monkeypatch.setattr(training_plan, "settings_at", miniature)
    monkeypatch.setattr(head_pruning, "degenerate_heads", first_head)
    status, out, _ = call(capsys, "reproduce", "--scale", "tiny", "--out", str(tmp_path))
    assert status == 0
    assert "7 of 7 runs to train, on digits." in out
    assert "pruned per layer [1, 1], by the threshold of the code" in out
    assert len(list((tmp_path / "figures").glob("figure-*.png"))) == 14
    rows = tables(tmp_path)
    assert all(row["here"]["accuracy"] is not None for row in rows)
    by_name = {row["name"]: row["here"]["parameters"] for row in rows}
    assert by_name["quadratic-generalized-pruned"] < by_name["quadratic-generalized"]
    results = {path: path.read_bytes() for path in (tmp_path / "runs").glob("*/result.json")}
    status, out, _ = call(capsys, "reproduce", "--scale", "tiny", "--out", str(tmp_path))
    assert status == 0
    assert "0 of 7 runs to train" in out
    assert out.count("already complete") == 7
    assert {path: path.read_bytes() for path in results} == results
