"""The whole project: exports, import time, import rules, and consistent documents."""

import importlib
import importlib.util
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import attnconv
from attnconv._util.errors import bad
from attnconv.cli import COMMANDS, main
from attnconv.cli.parsing import arguments_of, distinct
from tests.layering import LAYERS, RANKS, package_violations, violations

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "attnconv"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PUBLIC: list[str] = vars(attnconv)["__all__"]
LAZY_PACKAGES = sorted(
    ".".join(("attnconv", *path.parent.relative_to(PACKAGE).parts))
    for path in PACKAGE.rglob("__init__.py")
    if path.with_suffix(".pyi").exists()
)
USED = ("train", "report", "explore", "app", "hub")  # extras that are tested with their oldest versions
# Modules that `--help` or the settings import: none may import torch.
TORCH_FREE = [
    "attnconv",
    "attnconv.cli",
    "attnconv.data.settings",
    "attnconv.models.presets",
    "attnconv.models.settings",
    "attnconv.training.recipes",
    "attnconv.training.settings",
]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)


def cli_pages() -> Any:
    """Load the script docs/generate_cli.py as a module."""
    spec = importlib.util.spec_from_file_location("generate_cli", ROOT / "docs" / "generate_cli.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestSurface:
    @pytest.mark.parametrize("name", PUBLIC)
    def test_every_public_name_exists(self, name: str) -> None:
        assert getattr(attnconv, name) is not None

    @pytest.mark.parametrize("package", LAZY_PACKAGES)
    def test_every_lazy_name_exists_and_is_no_submodule(self, package: str) -> None:
        """Otherwise importing the submodule would replace the function of the same name."""
        module = importlib.import_module(package)
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
        both = [name for name in module.__all__ if is_submodule(package, name)]
        assert both == [name for name in both if isinstance(getattr(module, name), ModuleType)]

    def test_a_name_that_does_not_exist_is_an_attribute_error(self) -> None:
        with pytest.raises(AttributeError, match="Convolution"):
            getattr(attnconv, "Convolution")  # noqa: B009

    def test_dir_lists_the_public_names(self) -> None:
        assert set(PUBLIC) <= set(dir(attnconv))

    def test_the_surface_stays_small(self) -> None:
        names = [name for name in PUBLIC if not is_submodule("attnconv", name) and not name.startswith("__")]
        assert len(names) <= 25

    @pytest.mark.parametrize("name", PUBLIC)
    def test_every_public_name_has_an_entry_in_the_reference(self, name: str) -> None:
        reference = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
        assert re.search(rf"auto(class|function|module)::\s+attnconv\.{name}\s*$", reference, re.MULTILINE), (
            f"docs/api: give attnconv.{name} an autoclass, autofunction or automodule directive"
        )


class TestErrors:
    def test_the_parts_stand_in_order(self) -> None:
        message = bad("--lr", "must be positive", -0.1, "Pass --lr 0.1.", origin="from settings.json")
        assert message == "--lr: must be positive, got -0.1 (from settings.json). Pass --lr 0.1."

    def test_origin_and_fix_are_optional(self) -> None:
        assert bad("heads", "must be at least 1", 0) == "heads: must be at least 1, got 0."


class TestImports:
    def test_imports_run_downwards_only(self) -> None:
        assert violations(PACKAGE) == []

    def test_the_pictures_of_the_rooms_tell_the_truth(self) -> None:
        rooms = [layer for layer in LAYERS if layer != {"__main__"}]
        picture = re.search(
            r"```text\n(_util <.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL
        )
        assert picture is not None
        assert [frozenset(re.findall(r"\w+", group)) for group in picture[1].split("<")] == rooms
        table = (
            (ROOT / "docs" / "architecture.md")
            .read_text(encoding="utf-8")
            .partition("| package |")[2]
            .partition("\n\n")[0]
        )
        named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
        assert sorted(named) == sorted(room for layer in rooms for room in layer)
        ranks = [RANKS[room] for room in named]
        assert ranks == sorted(ranks)

    def test_an_upward_import_is_found(self, tmp_path: Path) -> None:
        package = tmp_path / "attnconv"
        (package / "operators").mkdir(parents=True)
        (package / "operators" / "dense.py").write_text("from attnconv.layers import SelfAttention2d\n")
        (package / "grid.py").write_text("def late():\n    from . import operators\n")
        (package / "attic.py").write_text("")
        assert violations(package) == [
            "attic.py: add the subpackage 'attic' to tests/layering.py",
            "grid.py:2: 'grid' may not import 'operators'",
            "operators/dense.py:1: 'operators' may not import 'layers'",
        ]

    def test_experiments_and_benchmarks_import_no_tests_and_the_library_imports_neither(self) -> None:
        assert package_violations(ROOT) == []

    def test_an_import_of_a_higher_package_is_found(self, tmp_path: Path) -> None:
        for folder in ("src/attnconv", "benchmarks", "experiments", "tests"):
            (tmp_path / folder).mkdir(parents=True)
        (tmp_path / "benchmarks" / "gated.py").write_text("import attnconv\nfrom experiments.common import kept\n")
        (tmp_path / "experiments" / "common.py").write_text("import benchmarks\nimport tests.small_vit\n")
        (tmp_path / "tests" / "small_vit.py").write_text("from experiments import common\n")
        assert package_violations(tmp_path) == [
            "benchmarks/gated.py:2: 'benchmarks' may not import 'experiments.common'",
            "experiments/common.py:2: 'experiments' may not import 'tests.small_vit'",
        ]

    def test_settings_presets_and_the_command_line_do_not_import_torch(self) -> None:
        imports = "".join(f"import {module}; " for module in TORCH_FREE)
        result = python("-c", f"{imports}import sys; print('torch' in sys.modules)")
        assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "False", "")


class TestHelp:
    def test_help_answers_without_torch(self) -> None:
        """One process runs all commands; the first output line with True shows which of them imports torch."""
        program = (
            "import contextlib, io, sys\nfrom attnconv.cli import main\n"
            "for words in ([], *([name] for name in sys.argv[1:])):\n"
            "    printed = io.StringIO()\n"
            "    with contextlib.redirect_stdout(printed):\n"
            "        try:\n            main([*words, '--help'])\n"
            "        except SystemExit as end:\n            status = end.code\n"
            "    print(*words, status, 'usage' in printed.getvalue().lower(), 'torch' in sys.modules)\n"
        )
        result = python("-c", program, *COMMANDS)
        assert result.stderr == ""
        assert result.stdout.splitlines() == ["0 True False", *(f"{name} 0 True False" for name in COMMANDS)]

    def test_help_answers_in_well_under_half_a_second(self) -> None:
        seconds = min(processor_seconds("-c", "from attnconv.cli import main; main()", "--help") for _ in range(3))
        assert seconds < 0.5

    @pytest.mark.parametrize("name", COMMANDS)
    def test_what_a_command_does_is_wrapped_at_the_terminals_width(
        self, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "60")
        with pytest.raises(SystemExit):
            main([name, "--help"])
        about, _, _ = capsys.readouterr().out.partition("examples:")
        lines = about.splitlines()[2:]  # without the usage
        assert lines[0].strip()
        assert all(len(line) <= 60 for line in lines)

    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_argument_is_explained(self, name: str) -> None:
        command = importlib.import_module(f"attnconv.cli.{name}_command").Arguments
        assert [each.name for each in distinct(arguments_of(command)) if not each.explanation] == []

    def test_the_reference_of_the_command_line_is_not_stale(self) -> None:
        script = cli_pages()
        page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
        assert page == script.render(), "docs/cli.md is stale: run `make cli-reference`"


class TestPapers:
    def test_the_version_is_the_same_everywhere(self) -> None:
        version = attnconv.__version__
        assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")

    def test_every_requirement_is_pinned_and_every_lower_bound_is_tested(self) -> None:
        pinned, oldest = pins("constraints.txt"), pins("constraints-oldest.txt")
        extras = [line for lines in PYPROJECT["optional-dependencies"].values() for line in lines]
        bounds = dict(lower_bound(line) for line in [*PYPROJECT["dependencies"], *extras])
        bounds.pop("attnconv")
        assert sorted(bounds.keys() - pinned.keys()) == []
        of_users = [
            *PYPROJECT["dependencies"],
            *(line for name in USED for line in PYPROJECT["optional-dependencies"][name]),
        ]
        runtime = dict(lower_bound(line) for line in of_users)
        runtime.pop("attnconv")
        assert {name: oldest.get(name) for name in runtime} == runtime

    def test_torch_has_no_upper_bound_and_is_no_build_requirement(self) -> None:
        build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
        assert [line for line in build if "torch" in line] == []
        assert [line for line in PYPROJECT["dependencies"] if line.startswith("torch")] == ["torch>=2.6"]

    def test_the_package_is_typed(self) -> None:
        assert (PACKAGE / "py.typed").is_file()

    @pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
    def test_links_to_files_lead_somewhere(self, page: str) -> None:
        text = (ROOT / page).read_text(encoding="utf-8")
        targets = [target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
        assert [target for target in targets if not (ROOT / target).exists()] == []

    @pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", ".ci/run"])
    def test_make_targets_that_are_mentioned_exist(self, page: str) -> None:
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
        mentioned = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE))
        assert mentioned
        assert mentioned - targets == set()


def is_submodule(package: str, name: str) -> bool:
    return importlib.util.find_spec(f"{package}.{name}") is not None


def processor_seconds(*arguments: str) -> float:
    """Return user and system time of a child process, which depends less on other processes than wall time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert python(*arguments).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return {normalised(line.split("==")[0]): line.split("==")[1] for line in lines if "==" in line}


def lower_bound(requirement: str) -> tuple[str, str]:
    name, _, version = requirement.partition(">=")
    return normalised(name.partition("[")[0]), version


def normalised(name: str) -> str:
    """Normalise a distribution's name as the package index does: lower case, hyphens."""
    return re.sub(r"[-_.]+", "-", name).lower()
