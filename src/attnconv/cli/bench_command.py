"""`attnconv bench`: the library's claims about time and memory, measured on the user's own machine."""

import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from attnconv._errors import bad
from attnconv.bench.settings import (
    QUESTIONS,
    QUICK,
    BenchSettings,
    problems,
)
from attnconv.cli.parsing import parse

if TYPE_CHECKING:
    from attnconv.bench.answer import Answer

_EXAMPLES = """\
attnconv bench --quick
attnconv bench --calibrate
attnconv bench --out bench
attnconv bench position-only hard-heads --out bench
attnconv bench model-step --model-step.batch 100
attnconv bench megapixel --megapixel.sides 64 128 256
"""


@dataclass(frozen=True)
class Bench:
    """Arguments of `attnconv bench`."""

    names: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME ...]")]] = ()
    """Which questions to measure. None measures all."""
    calibrate: bool = False
    """First measure what the planner needs to know of this machine, and keep it in the user's cache folder; without
    names, only that."""
    quick: bool = False
    """Small sizes, within seconds: shows that everything runs. Its numbers say nothing about the claims."""
    out: Path | None = None
    """Folder for results.json, a page README.md with the tables, and a figure per question; None prints only."""
    settings: Annotated[BenchSettings, tyro.conf.arg(name="")] = field(default_factory=BenchSettings)


def run(words: Sequence[str]) -> int:
    """Measure, print, write."""
    about = (
        "Measure what the library claims of time and memory, on this machine's CPU, each contender beside its peers "
        "in the same run. Without --quick this takes minutes and gigabytes."
    )
    for name, question in QUESTIONS.items():
        about += f" {name}: {question}"
    default = Bench(quick=True, settings=QUICK) if "--quick" in words else None
    arguments = parse(Bench, "bench", words, about=about, examples=_EXAMPLES, default=default)
    wrong = [
        bad("NAME", f"must be one of {', '.join(QUESTIONS)}", repr(n)) for n in arguments.names if n not in QUESTIONS
    ]
    if wrong := [*wrong, *problems(arguments.settings)]:
        from attnconv.training.settings import SettingsError

        raise SettingsError(wrong)
    if arguments.calibrate:
        _calibrate()
        if not arguments.names:
            return 0
    return _measure(arguments, ["attnconv", "bench", *words])


def _calibrate() -> None:
    from attnconv.bench.measuring import settle
    from attnconv.operators.planner import calibrate, keep

    settle()
    found = calibrate()
    path = keep(found)
    for name, value in asdict(found).items():
        print(f"{name:12} {value:.3g}")
    print(f"Kept for the planner: {path}")


def _measure(arguments: Bench, command: Sequence[str]) -> int:
    import torch
    from rich.console import Console

    from attnconv.bench.measuring import settle
    from attnconv.bench.writing import facts, table, write
    from attnconv.training.environment import environment

    settle()
    names = list(dict.fromkeys(arguments.names)) or list(QUESTIONS)
    record = environment(command, torch.device("cpu"))
    console = Console()
    answers: list[Answer] = []
    for name in names:
        module = name.replace("-", "_")
        with console.status(f"{name} ..."):
            found: Answer = importlib.import_module(f"attnconv.bench.{module}").answer(
                getattr(arguments.settings, module)
            )
        console.print(table(found))
        for line in facts(found):
            console.print(line, highlight=False)
        answers.append(found)
        if arguments.out is not None:  # after every question: a long run that is stopped leaves what it has
            chosen = {
                answer.name: asdict(getattr(arguments.settings, answer.name.replace("-", "_"))) for answer in answers
            }
            write(arguments.out, answers, settings=chosen, environment=record)
    if arguments.out is not None:
        print(f"Benchmarks: {arguments.out / 'README.md'}")
    return 0
