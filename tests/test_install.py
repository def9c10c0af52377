"""What works with only the required dependencies, and the errors that name a missing extra."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from attnconv._util.exports import EXTRA_OF, missing

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# Distributions whose name differs from the package, and packages that another distribution installs.
DISTRIBUTION = {
    "PIL": "pillow",
    "anyio": "starlette",
    "huggingface_hub": "huggingface-hub",
    "sklearn": "scikit-learn",
    "torchvision": "timm",
}
BLOCKED = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(EXTRA_OF)}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""
CORE = """
import torch
from torch import nn
import attnconv
from attnconv import SelfAttention2d, audit, can_express, from_conv, load, recast, restore, to_conv
from attnconv.surgery import prune_heads, replace_heads, initialize
from attnconv.theory import error_bound

torch.manual_seed(0)
x = torch.randn(2, 3, 16, 16)
for encoding in ("quadratic", "quadratic-generalized", "learned", "learned-content", "sinusoidal"):
    layer = SelfAttention2d(3, 12, 4, encoding=encoding)
    layer.operator(x).rows([0, 5])
    assert layer(x).shape == (2, 12, 16, 16)
conv = nn.Conv2d(3, 8, 3, padding=1)
assert torch.allclose(from_conv(conv)(x), conv(x), atol=1e-5)
assert torch.equal(to_conv(from_conv(conv)).weight, conv.weight)
network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2))
assert torch.allclose(restore(recast(network))(x), network(x), atol=1e-5)
can_express(from_conv(conv), 3, sizes=(16, 16))
error_bound(from_conv(conv, alpha=3.0), -1.0, 1.0)
model = load("quadratic-digits").model
prune_heads(model, {"blocks.0.attention": [0]})
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, batch_first=True), 2)
found = audit(nn.Sequential(nn.Conv2d(3, 16, 4, stride=4), nn.Flatten(2), Turned(), encoder), x, grid=(4, 4))
print([layer.name for layer in found.layers])
"""
TURNED = """
from torch import nn

class Turned(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)
"""


def without_extras(program: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", BLOCKED + program]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def imported() -> Iterator[tuple[Path, str]]:
    """Yield every package that the library imports, with the file."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name.partition(".")[0]) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield path, node.module.partition(".")[0]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[>=<!~ ;]", requirement)[0].lower() for requirement in requirements}


def test_the_core_needs_few_packages() -> None:
    assert names(PROJECT["dependencies"]) == {"torch", "msgspec", "jaxtyping", "lazy-loader", "safetensors", "scipy"}


def test_every_import_is_of_the_core_or_of_an_extra() -> None:
    core = {name.replace("-", "_") for name in names(PROJECT["dependencies"])}
    core.add("numpy")  # a dependency of scipy
    of_torch = {"triton", "typing_extensions"}
    known = {*core, *EXTRA_OF, *of_torch, *sys.stdlib_module_names, "attnconv", "IPython", "traitlets"}
    assert [(path.name, package) for path, package in imported() if package not in known] == []
    for package, extra in EXTRA_OF.items():
        brought = names([line for name in (extra, "train") for line in EXTRAS[name]])
        assert DISTRIBUTION.get(package, package) in brought, package


def test_the_core_works_without_extras() -> None:
    result = without_extras(TURNED + CORE)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "['3.layers.0.self_attn', '3.layers.1.self_attn']\n"


def test_snapshots_of_a_run_need_no_matplotlib() -> None:
    run = (
        "from attnconv.training.run_folder import RunFolder; from pathlib import Path; run = RunFolder(Path('absent'))"
    )
    result = without_extras(f"from attnconv.explorer import snapshots_of; {run}; print(snapshots_of(run))")
    assert (result.stdout, result.stderr) == ("()\n", "")


@pytest.mark.parametrize(
    ("statement", "package", "extra"),
    [
        ("attnconv.report.draw_centres", "matplotlib", "report"),
        ("attnconv.data.read_image", "PIL", "train"),
        ("attnconv.explorer.app", "anyio", "explore"),
        ("from attnconv.report import write_report", "matplotlib", "report"),
        ("attnconv.load('hub:owner/name')", "huggingface_hub", "hub"),
    ],
)
def test_a_missing_extra_is_named_in_python(statement: str, package: str, extra: str) -> None:
    result = without_extras(f"import attnconv.data, attnconv.explorer, attnconv.report\n{statement}")
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ModuleNotFoundError: {package}: must be installed")
    assert f"pip install 'attnconv[{extra}]'" in last


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("train quadratic-digits", "PIL"),
        ("models", "rich"),
        ("report runs/absent", "matplotlib"),
        ("predict digit.png", "PIL"),
    ],
)
def test_commands_ask_for_the_extra_that_all_of_them_need(command: str, package: str) -> None:
    result = without_extras(f"from attnconv.cli import main; main({command.split()!r})")
    assert result.returncode == 1
    assert result.stderr.startswith(f"attnconv {command.split()[0]}: {package}: must be installed")
    assert "pip install 'attnconv[app]'" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_other_missing_packages_stay_what_they_are() -> None:
    assert missing(ModuleNotFoundError("No module named 'mine'", name="mine")) is None


def test_commands_that_bring_timm_keep_the_installed_torch() -> None:
    """timm requires torchvision, for which pip would replace an installed torch of a different build."""
    assert "torchvision" not in names([line for lines in EXTRAS.values() for line in lines])
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    commands = [
        line
        for page in pages
        for line in page.read_text(encoding="utf-8").splitlines()
        if "pip install" in line and re.search(r"\bmodels\b.*\]", line)
    ]
    assert commands
    assert [line for line in commands if '"torch==$(' not in line] == []
    timm = missing(ModuleNotFoundError("No module named 'timm'", name="timm"))
    assert f"pip install 'attnconv[models]' torch=={version('torch')}" in str(timm)
