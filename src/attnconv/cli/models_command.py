"""`attnconv models`: the presets, with exact parameters and both counts of operations."""

from dataclasses import dataclass

from attnconv.cli.output import print_table, print_text


@dataclass(frozen=True)
class Arguments:
    """List the presets with their parameters and FLOPs for one image.

    FLOPs are counted as in the paper's tables (linear and convolution layers only), and with everything counted
    (attention written out densely).

    Examples:
        attnconv models
    """


def run(_: Arguments) -> None:
    """Print the table."""
    from attnconv.models.preset_tables import table_of_presets

    table = table_of_presets()
    # The last column is a sentence: below the table it needs no narrow cell.
    print_table(table.title, table.columns[:-1], [row[:-1] for row in table.rows])
    for row in table.rows:
        print_text(f"{row[0]}: {row[-1]}")
