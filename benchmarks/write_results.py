"""What benchmarks found, as a table on the screen, a page, a file of numbers and a figure per question."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from attnconv.report.figure_style import save
from attnconv.training.run_folder import write_json, write_text
from benchmarks.figures import draw
from benchmarks.results import Answer, Row
from benchmarks.settings import QUESTIONS

WORDS = ("case", "contender")  # columns
_ON_PAGES = ("least", "most", "process", "tensors", "dense matrix")  # columns that only pages have, beside ratios
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def table(answer: Answer) -> Table:
    """For the screen: without what the ratio says already, and each case named once."""
    title = f"\n{answer.name}: {QUESTIONS[answer.name]}"
    made = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    columns = [column for column in _columns(answer) if not (answer.ratio_name and column in _ON_PAGES)]
    for column in columns:
        made.add_column(column, justify="left" if column in WORDS else "right", overflow="fold")
    case = ""
    for row in answer.rows:
        cells = _cells(row)
        if row.case == case:
            cells["case"] = ""
        case = row.case
        made.add_row(*(cells[column] for column in columns))
    return made


def facts(answer: Answer) -> list[str]:
    """What stands below the table, one sentence each."""
    lines = [f"{name}: {value:.3g}." for name, value in answer.facts.items()]
    if answer.ratio_name:
        lines.insert(0, f"ratio: {answer.ratio_name}, of medians; in brackets the least and the most of one round.")
    return lines


def write(
    folder: Path, answers: Sequence[Answer], *, settings: Mapping[str, Any], environment: Mapping[str, Any]
) -> list[Path]:
    """Write results.json, README.md, and a PNG and an SVG of every question.

    Args:
        folder: Made where it is missing; older files of these names are replaced.
        answers: At least one.
        settings: Of each question, by its name.
        environment: What was measured on; see `attnconv.training.environment`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = [file for answer in answers for file in save(draw(answer), folder / answer.name)]
    results, page = folder / "results.json", folder / "README.md"
    rows = [{"question": answer.name, **_plain(row)} for answer in answers for row in answer.rows]
    found = {answer.name: dict(answer.facts) for answer in answers}
    write_json(results, {"settings": settings, "environment": environment, "rows": rows, "facts": found})
    write_text(page, _page(answers, settings, environment))
    return [results, page, *figures]


def markdown(answer: Answer) -> str:
    """The table as Markdown."""
    columns = _columns(answer)
    lines = [f"| {' | '.join(columns)} |", "|" + "".join("---|" if c in WORDS else "---:|" for c in columns)]
    for row in answer.rows:
        cells = _cells(row)
        lines.append(f"| {' | '.join(cells[column] for column in columns)} |")
    return "\n".join(lines)


def _page(answers: Sequence[Answer], settings: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    command = " ".join(environment["command"])
    parts = [
        "# Benchmarks",
        f"Measured by `{command}` on {environment['device']}, {environment['threads']} threads, "
        f"{environment['platform']}; {versions}; started {environment['started']}. Contenders take turns, denormals "
        "are flushed for all, and times are medians. Memory is the peak of one step in a process of its own, without "
        "its inputs: resident, with freed blocks of 1 MiB and more given back, and as far as tensors hold it; on a "
        "GPU, what torch allocates there. All rounds stand in `results.json`.",
    ]
    for answer in answers:
        chosen = ", ".join(f"{name} {value}" for name, value in settings[answer.name].items())
        parts += [f"## {answer.name}", QUESTIONS[answer.name], f"Settings: {chosen}.", markdown(answer)]
        parts += [*facts(answer), f"![{QUESTIONS[answer.name]}]({answer.name}.svg)"]
    return "\n\n".join(parts) + "\n"


def _plain(row: Row) -> dict[str, Any]:
    times = {"median": row.seconds.median, "least": row.seconds.least, "most": row.seconds.most}
    return {**asdict(row), "seconds": {**times, "rounds": list(row.seconds.seconds)}}


def _columns(answer: Answer) -> list[str]:
    """Those in which some row has something to say."""
    rows = [_cells(row) for row in answer.rows]
    return [column for column in rows[0] if any(row[column] for row in rows)]


def _cells(row: Row) -> dict[str, str]:
    ratio, memory = row.ratio, row.memory
    return {
        "case": row.case,
        "contender": row.contender,
        "median": duration(row.seconds.median),
        "least": duration(row.seconds.least),
        "most": duration(row.seconds.most),
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
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} B"
