"""The paper's accuracies and pruned model, and the table behind `attnconv models`; free of torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from attnconv.models.operation_counts import flops_all, flops_paper, parameters
from attnconv.models.presets import CATALOGUE
from attnconv.models.settings import AttentionSettings

# Section E of the paper: heads pruned from the generalised quadratic model, first to last layer.
PRUNED_HEADS = (2, 4, 1, 2, 6, 0)

# Tables 1 and 4 of the paper: model -> test accuracy on CIFAR-10.
PAPER_ACCURACY: Mapping[str, float] = {
    "ResNet18": 0.938,
    "SA quadratic emb.": 0.938,
    "SA quadratic emb. gen.": 0.934,
    "SA quadratic emb. gen. pruned": 0.934,
    "SA learned emb.": 0.918,
    "SA learned emb. + content": 0.871,
}


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """The table in Markdown; columns of numbers are aligned to the right."""
        marks = ["---:" if is_numeric else ":---" for is_numeric in self.numeric]
        return "\n".join([_line(self.columns), f"|{'|'.join(marks)}|", *map(_line, self.rows)])

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Whether each column holds only numbers; a column without rows does not."""
        columns = list(zip(*self.rows, strict=True)) or [("",)] * len(self.columns)
        return tuple(all(map(_is_number, column)) for column in columns)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").removesuffix(" M").removesuffix(" G").isdigit()


def pruned_settings() -> AttentionSettings:
    """The generalised quadratic model without the heads that the paper pruned."""
    full = AttentionSettings(encoding="quadratic-generalized")
    kept = (heads - pruned for heads, pruned in zip(full.heads_per_layer, PRUNED_HEADS, strict=True))
    return replace(full, heads=tuple(kept))


def table_of_presets() -> Table:
    """Every preset with its exact number of parameters and both counts of operations: what `attnconv models` prints."""
    rows = [
        (name, f"{parameters(name):,}", f"{flops_paper(name):,}", f"{flops_all(name):,}", preset.description)
        for name, preset in CATALOGUE.items()
    ]
    columns = ("preset", "parameters", "FLOPs, paper's way", "FLOPs, everything", "what it is")
    return Table("Presets", columns, tuple(rows))
