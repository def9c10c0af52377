"""Commands do not overwrite files that they did not write."""

import re
from pathlib import Path

import pytest

from tests.cli.test_commands import call
from tests.report.making import make_run


def folder_words(name: str, out: Path, run: Path) -> tuple[str, ...]:
    return {
        "audit": ("audit", "quadratic-digits", "--out", str(out)),
        "explore": ("explore", str(run), "--export", str(out)),
        "report": ("report", str(run), "--out", str(out)),
    }[name]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("outputs") / "run").path


@pytest.fixture(autouse=True)
def page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the explorer's page, which may not be built."""
    for module in ("attnconv.explorer", "attnconv.explorer.html_page"):
        monkeypatch.setattr(f"{module}.find_page", lambda: "<head></head><body></body>", raising=False)


@pytest.mark.parametrize("name", ["audit", "explore", "report"])
def test_folders_of_others_are_refused_and_own_ones_replaced(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    mine = out / "index.html"
    mine.write_text("mine")
    words = folder_words(name, out, run)
    status, _, err = call(capsys, *words)
    assert status == 1
    assert re.search(rf"--(out|export): .*got {re.escape(str(out))}, which", err)
    assert [path.read_text() for path in out.iterdir()] == ["mine"]
    mine.unlink()
    assert call(capsys, *words)[0] == 0
    assert len(list(out.iterdir())) > 1
    assert call(capsys, *words)[0] == 0
    (tmp_path / "file").touch()
    status, _, err = call(capsys, *folder_words(name, tmp_path / "file", run))
    assert status == 1
    assert "file" in err


def test_a_wrong_call_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ("audit", "nosuch", "--out", str(tmp_path / "out")),
        ("explore", "nosuch", "--export", str(tmp_path / "out")),
        ("report", str(tmp_path / "nosuch"), "--out", str(tmp_path / "out")),
    ):
        assert call(capsys, *words)[0] == 1
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("flag", "name"), [("--out", "x.safetensors"), ("--export", "x.pt2"), ("--onnx", "x.onnx")])
def test_files_of_recast_are_new(flag: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    path.write_text("mine")
    status, _, err = call(capsys, "recast", "resnet-digits", flag, str(path))
    assert (status, f"{flag}: must be a new file, got {path}, which exists" in err) == (1, True)
    assert path.read_text() == "mine"
