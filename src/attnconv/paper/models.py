"""The models of the study, with what the paper's Tables 1 and 4 print about each; free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from attnconv.models.preset_tables import PAPER_ACCURACY

SOURCE, PRUNED = "quadratic-generalized", "quadratic-generalized-pruned"  # the second continues the first
CONTENT = "learned-content"
DROPPED = "quadratic-attention-dropout"  # drops attention probabilities as the paper's code does; in no table or figure


@final
@dataclass(frozen=True)
class PaperModel:
    """One model of the paper, with its numbers as printed; a dash where the paper gives none."""

    title: str  # of its row in Tables 1 and 4
    parameters: str = "-"
    flops: str = "-"
    table_1: bool = False  # whether Table 1 has it

    @property
    def accuracy(self) -> float | None:
        """Printed test accuracy on CIFAR-10, 0 to 1; None if the paper gives none."""
        return PAPER_ACCURACY.get(self.title)


PAPER_MODELS: Mapping[str, PaperModel] = {
    "resnet18": PaperModel("ResNet18", "11.2M", "1.1B", table_1=True),
    "quadratic": PaperModel("SA quadratic emb.", "12.1M", "6.2B", table_1=True),
    SOURCE: PaperModel("SA quadratic emb. gen.", "12.1M", "6.2B"),
    PRUNED: PaperModel("SA quadratic emb. gen. pruned", "9.7M", "4.9B"),
    "learned": PaperModel("SA learned emb.", "12.3M", "6.2B", table_1=True),
    CONTENT: PaperModel("SA learned emb. + content", "29.5M", "15B", table_1=True),
    "quadratic-16-heads": PaperModel("SA quadratic emb., 16 heads"),
}
"""Name -> model, in the order of Table 4, which is also the order of training."""
