"""Tables and lines on the terminal, by rich."""

from collections.abc import Iterable, Sequence


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> None:
    """Print a table without lines; its first `left` columns hold words, which are wrapped, the others numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for index, column in enumerate(columns):
        words = index < left
        table.add_column(column, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def print_text(text: str) -> None:
    """Print text, wrapped at the terminal's width."""
    from rich.console import Console

    Console().print(text, highlight=False, markup=False)
