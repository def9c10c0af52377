"""Documented commands of benchmarks and experiments name existing scripts and flags, and pass all required flags."""

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import tyro

from benchmarks.__main__ import parse
from experiments import paper_on_gpu

ROOT = Path(__file__).resolve().parents[2]
COMMAND = re.compile(r"python -m (experiments\.[a-z]\w*|benchmarks(?![.\w]))((?:[^`\"\n#\\]|\\\n)*)(?![^\n]*\")")


def commands() -> Iterator[tuple[str, str]]:
    """Yield each documented command once, as (file, command)."""
    places = [
        ROOT / "README.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("results/**/README.md"),
        *ROOT.glob("experiments/*.py"),
        *ROOT.glob("benchmarks/*.py"),
    ]
    for place in sorted(places):
        # A command within a sentence may continue on the next line.
        text = re.sub(
            r"`[^`\n]+(\n[^`\n]+)?`", lambda code: code[0].replace("\n", " "), place.read_text(encoding="utf-8")
        )
        for script, flags in COMMAND.findall(text):
            yield f"{place.relative_to(ROOT)}: {script}", flags.replace("\\\n", " ").strip()


@pytest.mark.parametrize(("where", "flags"), sorted(set(commands())))
def test_a_documented_command_is_understood(where: str, flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = where.rpartition(": ")[2]
    words = shlex.split(flags)
    if name == "benchmarks":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        parse(words)
        return
    if name == "experiments.paper_on_gpu":
        paper_on_gpu.parse(words)
        return
    script = importlib.import_module(name)
    if not hasattr(script, "Settings"):  # uses `argparse` inside its `main`
        source = Path(str(script.__file__)).read_text(encoding="utf-8")
        assert all(f'add_argument("{word}"' in source for word in words if word.startswith("--"))
        return
    tyro.cli(script.Settings, args=words)
