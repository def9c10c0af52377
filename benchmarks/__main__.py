"""Measure time and memory on this machine, comparing each implementation with alternatives.

    python -m benchmarks --quick
    python -m benchmarks position-only hard-heads --out bench
    python -m benchmarks relative-bias --device cuda

Without --quick this takes about 40 minutes and several gigabytes of memory. Sizes are arguments of each module's `run`.
On a device without instructions for bfloat16, only float32 is measured.
"""

import argparse
import importlib
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown

from attnconv._util.glibc_malloc import keep_freed_memory
from attnconv.training.environment import environment
from attnconv.training.evaluation import on_device
from benchmarks.measure import measuring_on
from benchmarks.results import QUESTIONS, Results
from benchmarks.write_results import section, write


def main(words: Sequence[str]) -> None:
    """Run the benchmarks, print their results and optionally save them."""
    arguments = parse(words)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)  # fail before measuring
    if arguments.keep_memory:
        keep_freed_memory()
    torch.set_flush_denormal(True)  # before any operation: worker threads inherit it
    record = environment(["python", "-m", "benchmarks", *words], torch.device(arguments.device))
    console, measured, settings = Console(), [], {}
    for name in dict.fromkeys(arguments.names or QUESTIONS):
        settings[name] = settings_of(name, arguments.device, quick=arguments.quick)
        with console.status(f"{name} ..."), measuring_on(arguments.device):
            measured.append(ask(name, settings[name]))
        console.print(Markdown(section(measured[-1], settings[name], screen=True)))
        if arguments.out is not None:  # save after every benchmark, in case of interruption
            write(arguments.out, measured, settings=settings, environment=record)


def settings_of(name: str, device: str, *, quick: bool) -> dict[str, Any]:
    """Return the arguments of a benchmark's `run`, without bfloat16 on a device that would emulate it."""
    module = _module(name)
    settings = {name: found.default for name, found in inspect.signature(module.run).parameters.items()}
    settings |= module.QUICK if quick else {}
    if "dtypes" in settings and on_device("bf16", torch.device(device)) != "bf16":
        settings["dtypes"] = tuple(dtype for dtype in settings["dtypes"] if dtype != "bfloat16")
    return settings


def ask(name: str, settings: dict[str, Any]) -> Results:
    """Run a benchmark and return its results."""
    results: Results = _module(name).run(**settings)
    return results


def _module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name.replace('-', '_')}")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; exit with a message if it is invalid."""
    about = f"{__doc__}\nbenchmarks:\n" + "".join(f"  {name:16} {text}\n" for name, text in QUESTIONS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="use small sizes, to check in about ten seconds that everything runs"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device to measure (default: cpu)")
    parser.add_argument(
        "--keep-memory",
        action="store_true",
        help="make the C library keep freed memory (Linux with glibc), so that no step spends time on page faults; "
        "times vary less, and implementations that avoid large tensors gain less",
    )
    parser.add_argument("--out", type=Path, help="folder for results.json, a README.md with tables, and figures")
    arguments = parser.parse_args(words)
    if unknown := [name for name in arguments.names if name not in QUESTIONS]:
        parser.error(f"NAME: must be one of {', '.join(QUESTIONS)}, got {unknown[0]!r}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: must be available to torch, got cuda. Use --device cpu.")
    return arguments


if __name__ == "__main__":
    main(sys.argv[1:])
