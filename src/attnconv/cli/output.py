"""Print tables and text, and check the paths that commands write to.

An output folder must be new, empty or written by an earlier call, which marks it with the file `.attnconv`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from attnconv._util.errors import bad

if TYPE_CHECKING:
    from attnconv.convert import Comparison

_MARK = ".attnconv"


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> None:
    """Print a table without lines. The first `left` columns contain text, which is wrapped; the others, numbers."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for index, column in enumerate(columns):
        words = index < left
        table.add_column(column, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)


def print_text(text: str) -> None:
    """Print text, wrapped to the width of the terminal."""
    from rich.console import Console

    Console().print(text, highlight=False, markup=False)


def print_comparison(found: "Comparison", title: str) -> None:
    """Print the differences between two networks, layer by layer and for the final outputs."""
    columns = ("layer", "heads", "alpha", "output", "difference", "bound", "MFLOPs", "attention")
    rows = []
    for row in found.layers:
        alpha, bound = ("" if value is None else f"{value:.3g}" for value in (row.alpha, row.bound))
        flops = (f"{count / 1e6:.3g}" for count in (row.flops, row.attention_flops))
        name = row.name or "(the model)"
        rows.append((name, str(row.heads), alpha, f"{row.scale:.3g}", f"{row.error:.1e}", bound, *flops))
    print_table(title, columns, rows)
    print_text("output, difference: maximum absolute values. MFLOPs, attention: MFLOPs of convolution and attention.")
    relative = found.error / found.scale if found.scale else 0.0
    outputs = f"for outputs up to {found.scale:.3g} ({relative:.1e} relative)"
    print_text(f"Network: maximum difference {found.error:.1e} {outputs}.")


@contextmanager
def resumed_by(command: str) -> Iterator[None]:
    """Name the command that continues the training if it is interrupted."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise type(stop)(str(stop).replace("resume=True", command)) from None


def require_room(flag: str, folder: Path | None) -> None:
    """Raise `ValueError` if an output folder is a file, or contains files but not the mark of an earlier call."""
    if folder is None or not folder.exists() or (folder / _MARK).exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        requirement = "must be a folder that is new, empty or written by an earlier call"
        got = f"{folder}, which contains other files" if folder.is_dir() else f"the file {folder}"
        raise ValueError(bad(flag, requirement, got, "Pass a different folder."))


def mark(folder: Path) -> None:
    """Create and mark an output folder; to be called before the first file is written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).touch()
