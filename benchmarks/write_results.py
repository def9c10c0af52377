"""Output of results: Markdown for the screen, or a folder with results.json, tables and figures."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attnconv.report.figure_style import save
from attnconv.training.run_folder import write_json, write_text
from benchmarks.figures import FIGURES
from benchmarks.measure import Ratio
from benchmarks.results import QUESTIONS, Results, Row

_TEXT = ("case", "contender")  # left-aligned columns
_PAGE_ONLY = ("min", "max", "process", "tensors", "dense matrix")  # columns hidden on the screen if there are ratios
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def section(results: Results, settings: Mapping[str, Any], *, screen: bool = False) -> str:
    """Format a benchmark as Markdown: its settings, table and statistics; fewer columns for the screen."""
    cells = [_cells(row) for row in results.rows]
    hidden = _PAGE_ONLY if screen and results.ratio_name else ()
    shown = [name for name in cells[0] if any(row[name] for row in cells) and name not in hidden]
    lines = [shown, ["---" if name in _TEXT else "---:" for name in shown]]
    lines += [[row[name] for name in shown] for row in cells]
    parts = [
        f"## {results.name}",
        QUESTIONS[results.name],
        f"Settings: {', '.join(f'{key} {value}' for key, value in settings.items())}.",
        "\n".join(f"| {' | '.join(line)} |" for line in lines),
    ]
    if results.ratio_name:
        parts.append(f"Ratio: {results.ratio_name}, from medians, with its range over undisturbed rounds in brackets.")
    parts += [f"{name}: {value:.3g}." for name, value in results.facts.items()]
    return "\n\n".join(parts)


def write(
    folder: Path, all_results: Sequence[Results], *, settings: Mapping[str, Any], environment: Mapping[str, Any]
) -> None:
    """Write results.json, README.md and the figures.

    Args:
        folder: Output folder, created if missing; existing files are replaced.
        all_results: Results of at least one benchmark.
        settings: Settings of each benchmark, by name.
        environment: Versions and hardware; see `attnconv.training.environment`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"question": results.name, **_plain(row)} for results in all_results for row in results.rows]
    statistics = {results.name: dict(results.facts) for results in all_results}
    record = {"settings": settings, "environment": environment, "rows": rows, "facts": statistics}
    write_json(folder / "results.json", record)
    write_text(folder / "README.md", _page(all_results, settings, environment))
    for results in all_results:
        if results.name in FIGURES:
            save(FIGURES[results.name](results), folder / results.name)


def _page(all_results: Sequence[Results], settings: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    parts = [
        "# Benchmarks",
        f"Measured with `{' '.join(environment['command'])}` on {environment['device'].replace('cpu:', 'a CPU:')}, "
        f"{environment['threads']} threads, {environment['platform']}; {versions}; started {environment['started']}. "
        "Contenders take turns, denormals are flushed to zero, and times are medians. Sizes in the column `case` are "
        "in the order batch, channels or heads, height, width. Memory is the peak of one step in a separate process, "
        "excluding inputs: resident memory, with freed blocks of 1 MiB or more returned to the system (`memory`), and "
        "only the memory of tensors (`tensors`). On a GPU, both are the memory allocated by torch. `results.json` "
        "contains all rounds.",
    ]
    for results in all_results:
        parts.append(section(results, settings[results.name]))
        if results.name in FIGURES:
            parts.append(f"![{QUESTIONS[results.name]}]({results.name}.svg)")
    return "\n\n".join(parts) + "\n"


def _plain(row: Row) -> dict[str, Any]:
    times = {"median": row.median, "least": min(row.seconds), "most": max(row.seconds)}
    return {**asdict(row), "seconds": {**times, "rounds": list(row.seconds)}}


def _ratio(ratio: Ratio) -> str:
    disturbed = f"; disturbed rounds: {ratio.disturbed}" if ratio.disturbed else ""
    return f"{ratio.value:.2f} ({ratio.least:.2f} to {ratio.most:.2f}{disturbed})"


def _cells(row: Row) -> dict[str, str]:
    ratio, memory = row.ratio, row.memory
    return {
        "case": row.case,
        "contender": row.contender,
        "median": duration(row.median),
        "min": duration(min(row.seconds)),
        "max": duration(max(row.seconds)),
        "ratio": "" if ratio is None else _ratio(ratio),
        "memory": "" if memory is None else size(memory.step),
        "tensors": "" if memory is None else size(memory.tensors),
        "memory ratio": "" if row.memory_ratio is None else f"{row.memory_ratio:.2f}",
        "process": "" if memory is None else size(memory.process),
        "dense matrix": "" if row.dense_bytes is None else size(row.dense_bytes),
        "difference": "" if row.difference is None else "0" if row.difference == 0 else f"{row.difference:.0e}",
    }


def duration(seconds: float) -> str:
    """Format a duration in seconds or milliseconds, to three digits.

    Example:
        >>> duration(12.34), duration(0.5), duration(0.00123)
        ('12.3 s', '500 ms', '1.23 ms')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def size(count: int) -> str:
    """Format a number of bytes in powers of 1,024, to three digits.

    Example:
        >>> size(900), size(1013 * 2**20), size(9 * 1024**4 * 4)
        ('900 B', '0.989 GiB', '36 TiB')
    """
    return next((f"{count / unit:.3g} {name}" for unit, name in _UNITS if 1024 * count >= 999.5 * unit), f"{count} B")
