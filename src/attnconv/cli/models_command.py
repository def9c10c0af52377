"""`attnconv models`: list the presets with their parameter and FLOP counts."""

from dataclasses import dataclass

from attnconv.cli.output import print_table, print_text


@dataclass(frozen=True)
class Arguments:
    """List the presets with their parameter counts and their FLOPs for one image.

    The first FLOP count covers only linear and convolution layers, as in the paper. The total also includes the matrix
    products of dense attention. A multiply-add counts as two FLOPs.

    Examples:
        attnconv models
    """


def run(_: Arguments) -> None:
    """Print the table."""
    from attnconv.models.preset_tables import table_of_presets

    table = table_of_presets()
    # The last column contains sentences, which are too wide for a table.
    print_table(table.title, table.columns[:-1], [row[:-1] for row in table.rows])
    for row in table.rows:
        print_text(f"{row[0]}: {row[-1]}")
