"""The models of the paper, with what its Tables 1 and 4 print about each, and the names that runs of them go by."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from attnconv._util.errors import bad
from attnconv.models.preset_tables import PAPER_ACCURACY
from attnconv.paper.training_plan import EXTRA_RUNS


@final
@dataclass(frozen=True)
class PaperModel:
    """One model of the paper.

    Attributes:
        name: What this library calls it: the preset of the paper's size, or that and `-pruned`.
        title: Its row in the paper's Tables 1 and 4; of a model without a row, its heading here.
        accuracy: Test accuracy on CIFAR-10 as printed, in 0 .. 1; None where the paper gives none.
        parameters: As printed; a dash where the paper gives none.
        flops: As printed; a dash likewise.
        table_1: Whether Table 1 has it.
    """

    name: str
    title: str
    accuracy: float | None
    parameters: str
    flops: str
    table_1: bool = False


def _row(name: str, title: str, parameters: str, flops: str, *, table_1: bool = True) -> PaperModel:
    return PaperModel(name, title, PAPER_ACCURACY[title], parameters, flops, table_1)


PRUNED = "quadratic-generalized-pruned"
_MODELS = (
    _row("resnet18", "ResNet18", "11.2M", "1.1B"),
    _row("quadratic", "SA quadratic emb.", "12.1M", "6.2B"),
    _row("quadratic-generalized", "SA quadratic emb. gen.", "12.1M", "6.2B", table_1=False),
    _row(PRUNED, "SA quadratic emb. gen. pruned", "9.7M", "4.9B", table_1=False),
    _row("learned", "SA learned emb.", "12.3M", "6.2B"),
    _row("learned-content", "SA learned emb. + content", "29.5M", "15B"),
    PaperModel("quadratic-16-heads", "SA quadratic emb., 16 heads", None, "-", "-"),
)
PAPER_MODELS: Mapping[str, PaperModel] = {model.name: model for model in _MODELS}
"""Name -> model, in the order of Table 4."""

_SIZES = ("-small", "-digits", "-mini", "-tiny")


def paper_model(name: str) -> PaperModel:
    """The model of the paper that a preset is, in whatever size.

    Args:
        name: A name in `PAPER_MODELS`, or one with the ending `-small`, `-digits`, `-mini` or `-tiny`.

    Raises:
        ValueError: The paper has no such model.

    Example:
        >>> paper_model("learned-content-small").title, paper_model("resnet-digits").title
        ('SA learned emb. + content', 'ResNet18')
    """
    plain = _plain(name)
    plain = "resnet18" if plain == "resnet" else plain
    if plain not in PAPER_MODELS:
        fix = f"The paper's models are {', '.join(PAPER_MODELS)}; add -small or -digits for other sizes."
        raise ValueError(bad("model", "must be one of the paper's", repr(name), fix))
    return PAPER_MODELS[plain]


def run_model(name: str) -> str:
    """What a run of a reproduction is of, in whatever size: a name in `PAPER_MODELS` or `EXTRA_RUNS`.

    Raises:
        ValueError: A reproduction has no such run.

    Example:
        >>> run_model("quadratic-mini"), run_model("quadratic-attention-dropout-mini")
        ('quadratic', 'quadratic-attention-dropout')
    """
    plain = _plain(name)
    return plain if plain in EXTRA_RUNS else paper_model(name).name


def _plain(name: str) -> str:
    """The name without the word for its size."""
    return next((name.removesuffix(ending) for ending in _SIZES if name.endswith(ending)), name)
