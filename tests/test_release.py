"""What a release needs: deprecations that end, a site of several versions, and workflows that call existing targets."""

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnconv

ROOT = Path(__file__).resolve().parent.parent
MESSAGE = re.compile(
    r"attnconv\.[\w.]+(?: \(argument `\w+`\))? is deprecated since (\d+)\.(\d+) "
    r"and will be removed in (\d+)\.(\d+)\. Use .+\."
)


def deprecations(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the message of each `@deprecated(...)` and each `warnings.warn(..., FutureWarning)`."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        future = "FutureWarning" in [
            ast.unparse(word) for word in (*node.args, *(each.value for each in node.keywords))
        ]
        if name == "deprecated" or (name == "warn" and future):
            assert future, f"line {node.lineno}: pass category=FutureWarning, which is shown by default"
            message = node.args[0]
            yield node.lineno, str(message.value) if isinstance(message, ast.Constant) else "not a literal string"


def problems(source: str, version: str) -> list[str]:
    """Return what is wrong with the deprecations of a file in a version."""
    now, found = tuple(map(int, version.split(".")[:2])), []
    for line, message in deprecations(source):
        match = MESSAGE.fullmatch(message)
        if match is None:
            found.append(f"line {line}: must match {MESSAGE.pattern}, got {message}")
            continue
        since, until = (tuple(map(int, match.groups()[start : start + 2])) for start in (0, 2))
        if until <= now:
            found.append(f"line {line}: had to be removed in {until[0]}.{until[1]}")
        elif until < (since[0], since[1] + 2):
            found.append(f"line {line}: must stay for two minor versions")
    return found


def test_deprecated_names_have_a_replacement_and_are_removed_in_time() -> None:
    files = (ROOT / "src").rglob("*.py")
    found = {str(path): problems(path.read_text(encoding="utf-8"), attnconv.__version__) for path in files}
    assert {path: each for path, each in found.items() if each} == {}


DECORATED = """
@deprecated(
    "attnconv.old is deprecated since 0.3 and will be removed in 0.{}. Use attnconv.new.", category=FutureWarning
)
def old(): ...
"""


@pytest.mark.parametrize(
    ("source", "version", "found"),
    [
        (DECORATED.format(5), "0.4.2", []),
        (DECORATED.format(5), "0.5.0", ["had to be removed in 0.5"]),
        (DECORATED.format(4), "0.3.0", ["must stay for two minor versions"]),
        ("warnings.warn('do not use this', FutureWarning)", "0.3.0", ["must match"]),
        ("warnings.warn('something else', UserWarning)", "0.3.0", []),
    ],
)
def test_wrong_deprecations_are_found(source: str, version: str, found: list[str]) -> None:
    actual = problems(source, version)
    assert len(actual) == len(found)
    assert all(part in whole for part, whole in zip(found, actual, strict=True))


def test_the_site_opens_the_newest_release(tmp_path: Path) -> None:
    publish = runpy.run_path(str(ROOT / "docs" / "publish_site.py"))["publish"]
    built, site = tmp_path / "built", tmp_path / "site"
    (built / ".doctrees").mkdir(parents=True)
    (built / "index.html").write_text("one")
    site.mkdir()
    for version in ("main", "v0.9.0", "v0.10.0rc1"):
        publish(built, site, version)
    assert "url=v0.9.0/index.html" in (site / "index.html").read_text()  # not a pre-release
    publish(built, site, "v0.10.0")
    (built / "index.html").write_text("two")
    publish(built, site, "main")
    assert (site / "main" / "index.html").read_text() == "two"
    assert (site / "v0.9.0" / "index.html").read_text() == "one"
    links = re.findall(r'href="(.*?)/index.html"', (site / "index.html").read_text())
    assert not (site / "main" / ".doctrees").exists()
    assert links == ["v0.10.0", "v0.10.0rc1", "v0.9.0", "main"]
    assert "url=v0.10.0/index.html" in (site / "index.html").read_text()


def test_workflows_call_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    called = set[str]()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text(encoding="utf-8")
        called |= set(re.findall(r"make ([a-z-]+)", text))
        for listed in re.findall(r"target: \[(.*)\]", text):
            called |= set(listed.split(", "))
    assert {"unit", "dist-test", "try-archives", "publish-site", "newest"} <= called
    assert called - targets == set()
