"""Table of presets for `attnconv models`; does not import torch."""

from collections.abc import Iterable
from dataclasses import dataclass

from attnconv.models.operation_counts import flops_all, flops_paper, parameters
from attnconv.models.presets import CATALOGUE


@dataclass(frozen=True)
class Table:
    """Table of strings."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Return the table in Markdown, with numeric columns aligned to the right."""
        marks = ["---:" if is_numeric else ":---" for is_numeric in self.numeric]
        return "\n".join([_line(self.columns), f"|{'|'.join(marks)}|", *map(_line, self.rows)])

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Whether each column is numeric; the columns of an empty table are not."""
        columns = list(zip(*self.rows, strict=True)) or [("",)] * len(self.columns)
        return tuple(all(cell.replace(",", "").replace(".", "").isdigit() for cell in column) for column in columns)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def table_of_presets() -> Table:
    """Return the table of presets with their exact numbers of parameters and FLOPs."""
    rows = [
        (name, f"{parameters(name):,}", f"{flops_paper(name):,}", f"{flops_all(name):,}", preset.description)
        for name, preset in CATALOGUE.items()
    ]
    columns = ("preset", "parameters", "FLOPs (as in the paper)", "FLOPs (total)", "description")
    return Table("Presets", columns, tuple(rows))
