"""`attnconv models`: the presets, with exact parameters and both counts of operations."""

from collections.abc import Sequence
from dataclasses import dataclass

from attnconv.cli.parsing import parse


@dataclass(frozen=True)
class Models:
    """Arguments of `attnconv models`."""

    markdown: bool = False
    """Print the table as Markdown."""


def run(words: Sequence[str]) -> int:
    """Print the table."""
    about = "List the presets with their parameters and FLOPs for one image: counted as in the paper's tables (linear "
    about += "and convolution layers only), and with everything counted (attention written out densely)."
    arguments = parse(Models, "models", words, about=about, examples="attnconv models\nattnconv models --markdown")
    from attnconv.models.tables import table_of_presets

    table = table_of_presets()
    if arguments.markdown:
        print(table.markdown())
        return 0
    from rich.console import Console
    from rich.table import Table

    console = Console()
    grid = Table(title=table.title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    *numbers, about_column = range(len(table.columns))  # the last column is a sentence: below, it needs no narrow cell
    for index in numbers:
        grid.add_column(table.columns[index], justify="right" if index else "left", no_wrap=True)
    for row in table.rows:
        grid.add_row(*(row[index] for index in numbers))
    console.print(grid)
    for row in table.rows:
        console.print(f"[bold]{row[0]}[/bold]: {row[about_column]}", highlight=False)
    return 0
