"""`attnconv models`: the presets, with exact parameters and both counts of operations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from attnconv.cli.parsing import parse

if TYPE_CHECKING:
    from attnconv.models.preset_tables import Table

_EXAMPLES = """\
attnconv models
attnconv models --markdown
attnconv models --table 2
"""


@dataclass(frozen=True)
class Models:
    """Arguments of `attnconv models`."""

    table: Literal["presets", "2", "4"] = "presets"
    """The presets, or a table of the paper generated from them: 2 (hyper-parameters) or 4 (parameters and FLOPs)."""
    markdown: bool = False
    """Print the table as Markdown."""


def run(words: Sequence[str]) -> int:
    """Print the table."""
    about = "List the presets with their parameters and FLOPs for one image: counted as in the paper's tables (linear "
    about += "and convolution layers only), and with everything counted (attention written out densely)."
    arguments = parse(Models, "models", words, about=about, examples=_EXAMPLES)
    table = _table(arguments.table)
    if arguments.markdown:
        print(table.markdown())
        return 0
    from rich.console import Console
    from rich.table import Table as Grid

    console = Console()
    grid = Grid(title=table.title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    # The presets' last column is a sentence: below the table it needs no narrow cell.
    sentences = arguments.table == "presets"
    numbers = range(len(table.columns) - sentences)
    for index in numbers:
        grid.add_column(table.columns[index], justify="right" if index else "left", no_wrap=sentences)
    for row in table.rows:
        grid.add_row(*(row[index] for index in numbers))
    console.print(grid)
    for row in table.rows if sentences else ():
        console.print(f"[bold]{row[0]}[/bold]: {row[-1]}", highlight=False)
    return 0


def _table(name: str) -> "Table":
    from attnconv.models.preset_tables import table_2, table_4, table_of_presets
    from attnconv.training.recipes import recipe, table_rows

    if name == "2":
        return table_2(training=table_rows(recipe("quadratic")))
    return table_4() if name == "4" else table_of_presets()
