"""`attnconv bench`: the library's claims about time and memory, measured on the user's own machine."""

import importlib
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from attnconv._util.errors import bad
from attnconv.cli.parsing import parse
from benchmarks.settings import (
    QUESTIONS,
    QUICK,
    BenchSettings,
    problems,
)

if TYPE_CHECKING:
    from benchmarks.results import Answer

_EXAMPLES = """\
attnconv bench --quick
attnconv bench --calibrate
attnconv bench --out bench
attnconv bench position-only hard-heads --out bench
attnconv bench model-step --model-step.batch 100
attnconv bench megapixel --megapixel.sides 64 128 256
attnconv bench relative-bias --device cuda --relative-bias.dtypes float32 bfloat16
"""


@dataclass(frozen=True)
class Bench:
    """Arguments of `attnconv bench`.

    Attributes:
        names: Which questions to measure. None measures all.
        calibrate: First measure what the planner needs to know of this machine, and keep it in the user's cache folder;
            without names, only that.
        quick: Small sizes, some ten seconds in all: shows that every question runs here, and what it prints and writes.
            Its numbers say nothing about the claims.
        device: Where to measure. On cuda, times include all work of the GPU, and memory is what torch allocates there.
        keep_memory: Have the C library keep freed memory (Linux, glibc), so that no step pays for pages. Equal work
            then takes equal time, where by chance it may else differ twofold; what avoids large tensors gains less.
            Takes gigabytes more.
        out: Folder for results.json, a page README.md with the tables, and a figure per question; None prints only.
    """

    names: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME ...]")]] = ()
    calibrate: bool = False
    quick: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    keep_memory: bool = False
    out: Path | None = None
    settings: Annotated[BenchSettings, tyro.conf.arg(name="")] = field(default_factory=BenchSettings)


def run(words: Sequence[str]) -> int:
    """Measure, print, write."""
    about = (
        "Measure what the library claims of time and memory, on this machine's CPU or GPU, each contender beside its "
        "peers in the same run. Without --quick this takes minutes and gigabytes."
    )
    for name, question in QUESTIONS.items():
        about += f"\n{name}: {question}"
    default = Bench(quick=True, settings=QUICK) if "--quick" in words else None
    arguments = parse(Bench, "bench", words, about=about, examples=_EXAMPLES, default=default)
    wrong = [
        bad("NAME", f"must be one of {', '.join(QUESTIONS)}", repr(n)) for n in arguments.names if n not in QUESTIONS
    ]
    wrong += [*problems(arguments.settings), *_missing(arguments.device), *_not_writable(arguments.out)]
    if wrong:
        from attnconv.training.settings import SettingsError

        raise SettingsError(wrong)
    if arguments.calibrate:
        _calibrate(arguments.device)
        if not arguments.names:
            return 0
    return _measure(arguments, ["attnconv", "bench", *words])


def _missing(device: str) -> list[str]:
    import torch

    if device == "cpu" or torch.cuda.is_available():
        return []
    why = "This torch is built without CUDA" if torch.version.cuda is None else "It finds no GPU"
    return [bad("--device", "must be a device that torch can use here", device, f"{why}; pass --device cpu.")]


def _not_writable(out: Path | None) -> list[str]:
    """Said before the measurements, which take minutes. The folder is made if it is missing."""
    if out is None:
        return []
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        return [bad("--out", "must be a folder that can be written", str(out), f"The system says: {error.strerror}.")]
    return []


def _calibrate(device: str) -> None:
    from attnconv.operators.planner import calibrate, keep
    from benchmarks.measure import settle

    settle()
    found = calibrate(device)
    path = keep(found, device)
    for name, value in asdict(found).items():
        print(f"{name:12} {value:.3g}")
    print(f"Kept for the planner: {path}")


def _measure(arguments: Bench, command: Sequence[str]) -> int:
    import torch
    from rich.console import Console

    from attnconv._util.allocator import keep_freed_memory
    from attnconv.training.environment import environment
    from benchmarks.measure import measuring_on, settle
    from benchmarks.write_results import facts, table, write

    if arguments.keep_memory:
        keep_freed_memory()
    settle()
    names = list(dict.fromkeys(arguments.names)) or list(QUESTIONS)
    record = environment(command, torch.device(arguments.device))
    console = Console()
    answers: list[Answer] = []
    for name in names:
        module = name.replace("-", "_")
        with console.status(f"{name} ..."), measuring_on(arguments.device):
            found: Answer = importlib.import_module(f"benchmarks.{module}").answer(getattr(arguments.settings, module))
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
