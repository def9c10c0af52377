"""Results as a table on the screen, and as a folder with results.json, a page of tables and figures."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from attnconv.report.figure_style import save
from attnconv.training.run_folder import write_json, write_text
from benchmarks.figures import FIGURES
from benchmarks.results import QUESTIONS, Results, Row

_TEXT = ("case", "contender")  # columns that are aligned left
_SCREEN = (*_TEXT, "median", "ratio", "memory", "of the base", "difference")
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def table(results: Results) -> Table:
    """The table for the screen; each case is named once."""
    found = Table(title=f"\n{results.name}: {QUESTIONS[results.name]}", title_justify="left", box=None, pad_edge=False)
    columns = [column for column in _columns(results) if column in _SCREEN]
    for column in columns:
        found.add_column(column, justify="left" if column in _TEXT else "right", overflow="fold")
    case = ""
    for row in results.rows:
        cells = _cells(row)
        if row.case == case:
            cells["case"] = ""
        case = row.case
        found.add_row(*(cells[column] for column in columns))
    return found


def facts(results: Results) -> list[str]:
    """Sentences below the table."""
    lines = [f"{name}: {value:.3g}." for name, value in results.facts.items()]
    if results.ratio_name:
        lines.insert(0, f"ratio: {results.ratio_name}, of medians; in brackets the smallest and largest of one round.")
    return lines


def write(
    folder: Path, all_results: Sequence[Results], *, settings: Mapping[str, Any], environment: Mapping[str, Any]
) -> None:
    """Write results.json, README.md and the figures.

    Args:
        folder: Created where it is missing; older files of these names are replaced.
        all_results: At least one.
        settings: Of each question, by its name.
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
        f"Measured by `{' '.join(environment['command'])}` on {environment['device']}, {environment['threads']} "
        f"threads, {environment['platform']}; {versions}; started {environment['started']}. Contenders take turns, "
        "denormals are flushed, and times are medians. Memory is the peak of one step in a process of its own, "
        "without its inputs: resident, with freed blocks of 1 MiB and more returned to the system, and of tensors "
        "only; on a GPU, what torch allocates there. `results.json` has all rounds.",
    ]
    for results in all_results:
        name, question = results.name, QUESTIONS[results.name]
        chosen = ", ".join(f"{key} {value}" for key, value in settings[name].items())
        parts += [f"## {name}", question, f"Settings: {chosen}.", markdown(results), *facts(results)]
        parts += [f"![{question}]({name}.svg)"] if name in FIGURES else []
    return "\n\n".join(parts) + "\n"


def markdown(results: Results) -> str:
    """The table as Markdown."""
    columns = _columns(results)
    lines = [f"| {' | '.join(columns)} |", "|" + "".join("---|" if c in _TEXT else "---:|" for c in columns)]
    cells = [_cells(row) for row in results.rows]
    return "\n".join([*lines, *(f"| {' | '.join(row[column] for column in columns)} |" for row in cells)])


def _columns(results: Results) -> list[str]:
    """Columns with a value in some row."""
    rows = [_cells(row) for row in results.rows]
    return [column for column in rows[0] if any(row[column] for row in rows)]


def _plain(row: Row) -> dict[str, Any]:
    times = {"median": row.median, "least": min(row.seconds), "most": max(row.seconds)}
    return {**asdict(row), "seconds": {**times, "rounds": list(row.seconds)}}


def _cells(row: Row) -> dict[str, str]:
    ratio, memory = row.ratio, row.memory
    return {
        "case": row.case,
        "contender": row.contender,
        "median": duration(row.median),
        "least": duration(min(row.seconds)),
        "most": duration(max(row.seconds)),
        "ratio": "" if ratio is None else f"{ratio.value:.2f} ({ratio.least:.2f} to {ratio.most:.2f})",
        "memory": "" if memory is None else size(memory.step),
        "tensors": "" if memory is None else size(memory.tensors),
        "of the base": "" if row.memory_ratio is None else f"{row.memory_ratio:.2f}",
        "process": "" if memory is None else size(memory.process),
        "dense matrix": "" if row.dense_bytes is None else size(row.dense_bytes),
        "difference": "" if row.difference is None else "0" if row.difference == 0 else f"{row.difference:.0e}",
    }


def duration(seconds: float) -> str:
    """Seconds or milliseconds, to three digits.

    Example:
        >>> duration(12.34), duration(0.5), duration(0.00123)
        ('12.3 s', '500 ms', '1.23 ms')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def size(count: int) -> str:
    """Bytes, to three digits, in powers of 1,024.

    Example:
        >>> size(1000), size(3 * 2**20), size(9 * 1024**4 * 4)
        ('1000 B', '3 MiB', '36 TiB')
    """
    return next((f"{count / unit:.3g} {name}" for unit, name in _UNITS if count >= unit), f"{count} B")
