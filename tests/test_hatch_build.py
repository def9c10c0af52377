"""The build hook: where the page is placed, with and without npm."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NPM = """#!{python}
import pathlib, sys
pathlib.Path("calls").open("a").write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1] == "run":
    pathlib.Path("dist").mkdir(exist_ok=True)
    pathlib.Path("dist/index.html").write_text("built")
sys.exit({status})
"""


class Application:
    """Replacement for the object through which hatchling shows messages."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, words: str) -> None:
        self.warnings.append(words)

    def display_info(self, words: str) -> None:
        pass


def load() -> Any:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hook(root: Path, target: str = "wheel") -> tuple[Any, Application]:
    application = Application()
    return load().PageHook(str(root), {}, None, None, str(root), target, application), application


@pytest.fixture
def no_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a PATH that contains only the folder `tools`, without npm."""
    (tmp_path / "tools").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))
    return tmp_path


def with_npm(root: Path, status: int = 0) -> None:
    (root / "web").mkdir()
    (root / "web" / "package.json").write_text("{}")
    npm = root / "tools" / "npm"
    npm.write_text(NPM.format(python=sys.executable, status=status))
    npm.chmod(0o755)


def included(root: Path, target: str = "wheel", version: str = "standard") -> tuple[dict[str, str], list[str]]:
    """Return the files added to the archive, and the warnings."""
    data: dict[str, Any] = {"force_include": {}}
    made, application = hook(root, target)
    made.initialize(version, data)
    return data["force_include"], application.warnings


@pytest.mark.skipif(os.name != "posix", reason="the fake npm is a POSIX script")
def test_npm_builds_the_page(no_npm: Path) -> None:
    with_npm(no_npm)
    page = str(no_npm / "web" / "dist" / "index.html")
    assert included(no_npm) == ({page: "attnconv/explorer/page.html"}, [])
    assert (no_npm / "web" / "calls").read_text().splitlines() == ["ci --no-audit --no-fund", "run build"]
    assert included(no_npm, "sdist") == ({page: "web/dist/index.html"}, [])


@pytest.mark.skipif(os.name != "posix", reason="the fake npm is a POSIX script")
def test_an_npm_that_fails_stops_the_build(no_npm: Path) -> None:
    with_npm(no_npm, status=3)
    with pytest.raises(RuntimeError, match=r"web: .*got status 3"):
        included(no_npm)


def test_without_npm_a_page_that_is_there_is_taken(no_npm: Path) -> None:
    (no_npm / "web" / "dist").mkdir(parents=True)
    page = no_npm / "web" / "dist" / "index.html"
    page.write_text("built before")
    assert included(no_npm) == ({str(page): "attnconv/explorer/page.html"}, [])


def test_without_npm_and_page_a_warning(no_npm: Path) -> None:
    found, warnings = included(no_npm)
    assert found == {}
    assert len(warnings) == 1
    assert "without the explorer's page: npm is not installed" in warnings[0]


def test_editable_installs_build_nothing(no_npm: Path) -> None:
    assert included(no_npm, version="editable") == ({}, [])


class TestReadme:
    README = "[a](docs/a.md#b) ![c](docs/c.png) [d](https://d.org) [e](#f)\n"

    def metadata(self, root: Path) -> dict[str, Any]:
        (root / "README.md").write_text(self.README)
        found: dict[str, Any] = {}
        load().ReadmeHook(str(root), {}).update(found)
        return found

    def test_links_are_relative_without_a_repository(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
        assert self.metadata(tmp_path)["readme"] == {"content-type": "text/markdown", "text": self.README}

    def test_links_are_absolute_with_a_repository(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (("SERVER_URL", "https://host"), ("REPOSITORY", "owner/name"), ("REF_NAME", "v1")):
            monkeypatch.setenv(f"GITHUB_{name}", value)
        found = self.metadata(tmp_path)
        text = found["readme"]["text"]
        assert "[a](https://host/owner/name/blob/v1/docs/a.md#b)" in text
        assert "![c](https://host/owner/name/raw/v1/docs/c.png)" in text
        assert "[d](https://d.org) [e](#f)" in text
        assert found["urls"]["Source"] == "https://host/owner/name"
