"""`experiments.upload_results`: the repositories and the files that it would upload."""

from pathlib import Path
from typing import Any

import pytest

from experiments import upload_results
from experiments.upload_results import RESULTS, Settings, main, repositories


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    for place in ("small/quadratic", "paper/runs/learned-seed-43"):
        (folder / place).mkdir(parents=True)
        (folder / place / "weights.safetensors").write_bytes(bytes(200_000))
    (folder / "speed").mkdir()
    return folder


def test_a_dry_run_prints_folders_and_repositories(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(Settings("me", results=results))
    assert capsys.readouterr().out.splitlines() == [
        "paper/runs/learned-seed-43 (0.2 MB): hub:me/attnconv-paper-learned-seed-43",
        "small/quadratic (0.2 MB): hub:me/attnconv-small-quadratic",
    ]


def test_every_folder_is_uploaded_to_its_repository(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(path: Path, repo: str, **options: Any) -> str:
        assert options == {"private": True}
        return f"hub:{repo}@{path.name}"

    monkeypatch.setattr(upload_results, "save_to_hub", save)
    main(Settings("me", upload=True, private=True, results=results))
    assert capsys.readouterr().out.splitlines()[1].endswith(": hub:me/attnconv-small-quadratic@quadratic")


def test_repositories_of_the_published_results_differ_and_have_valid_names() -> None:
    names = list(repositories("me", RESULTS).values())
    assert len(set(names)) == len(names)
    assert all(len(name.partition("/")[2]) <= 96 for name in names)
