"""`attnconv models`: the presets, with exact parameters and both counts of operations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from attnconv.cli.output import print_table, print_text
from attnconv.cli.parsing import parse


@dataclass(frozen=True)
class Models:
    """List the presets with their parameters and FLOPs for one image.

    FLOPs are counted as in the paper's tables (linear and convolution layers only), and with everything counted
    (attention written out densely).

    Examples:
        attnconv models
        attnconv models --markdown
        attnconv models --table 2

    Attributes:
        table: The presets, or a table of the paper generated from them: 2 (hyper-parameters) or 4 (parameters and
            FLOPs).
        markdown: Print the table as Markdown.
    """

    table: Literal["presets", "2", "4"] = "presets"
    markdown: bool = False


def run(words: Sequence[str]) -> int:
    """Print the table."""
    arguments = parse(Models, words)
    if arguments.table == "presets":
        from attnconv.models.preset_tables import table_of_presets

        table = table_of_presets()
    else:
        from attnconv.paper.tables import table_of_counts, table_of_hyper_parameters

        table = (table_of_hyper_parameters() if arguments.table == "2" else table_of_counts()).table
    if arguments.markdown:
        print(table.markdown())
        return 0
    # A terminal has no room for the last column: a preset's sentence, which follows, or all operations of Table 4.
    shown = len(table.columns) - (arguments.table != "2")
    print_table(table.title, table.columns[:shown], [row[:shown] for row in table.rows])
    for row in table.rows if arguments.table == "presets" else ():
        print_text(f"{row[0]}: {row[-1]}")
    return 0
