"""Figure 6's claim in numbers: which heads hold a fixed shift as the query moves.

The paper reads from its maps that heads of layers 2 and 3 are localised and stand at a constant shift from the query. A
head counts here when its profile over shifts puts at least half of its mass on one shift, and when at least nine tenths
of the squared probabilities are explained by that profile alone, whatever the query (`analysis.layer_statistics`:
`shift_mass` and `constancy`). Both limits are stated with the result. The profile is a mean over queries and images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from attnconv.inspect.capture import visit_attention
from attnconv.inspect.head_statistics import LayerStatistics, RunningStatistics
from attnconv.models.preset_tables import Table
from attnconv.operators.base import AttentionOperator

LEAST_MASS, LEAST_CONSTANCY = 0.5, 0.9


@final
@dataclass(frozen=True)
class FixedHead:
    """A head in numbers.

    Attributes:
        layer: Its layer, counted from 1.
        head: Its number, counted from 0 as in an audit.
        shift: The shift with the most mass, row and column in positions.
        mass: Part of its attention there, 0 to 1.
        constancy: How far its pattern stays the same as the query moves, 0 to 1.
    """

    layer: int
    head: int
    shift: tuple[int, ...]
    mass: float
    constancy: float

    @property
    def fixed(self) -> bool:
        """Whether it holds a fixed shift, by the module's limits; a broken number does not."""
        return self.mass >= LEAST_MASS and self.constancy >= LEAST_CONSTANCY


def heads_over_shifts(model: nn.Module, images: Tensor, *, batch_size: int = 10) -> list[FixedHead]:
    """Every head of a model, layer by layer, over all query pixels.

    Args:
        model: Any module whose attention `visit_attention` reads; a layer that runs several times counts each time.
        images: (n, c, height, width), n at least 1; of positions alone one blank image is enough.
        batch_size: Images at once, at least 1.

    Example:
        >>> import torch
        >>> from attnconv import SelfAttention2d, from_conv
        >>> layer = from_conv(torch.nn.Conv2d(1, 1, 3, padding=1))
        >>> [head.shift for head in heads_over_shifts(layer, torch.zeros(1, 1, 8, 8)) if head.fixed][:2]
        [(-1, -1), (-1, 0)]
    """
    return fixed_heads(layers_over_shifts(model, images, batch_size=batch_size))


def layers_over_shifts(model: nn.Module, images: Tensor, *, batch_size: int = 10) -> list[LayerStatistics]:
    """The statistics of every layer of a model, first to last, over all query pixels; the arguments are the same."""
    running: dict[str, RunningStatistics] = {}

    def take(name: str, operator: AttentionOperator) -> None:
        running.setdefault(name, RunningStatistics()).add(operator)

    for batch in images.split(batch_size):
        visit_attention(model, batch, take)
    return [statistics.result() for statistics in running.values()]


def fixed_heads(layers: Sequence[LayerStatistics]) -> list[FixedHead]:
    """The heads of these layers, which are counted from 1."""
    return [head for number, layer in enumerate(layers, start=1) for head in _heads(number, layer)]


def _heads(layer: int, found: LayerStatistics) -> list[FixedHead]:
    columns = (found.best_shift.tolist(), found.shift_mass.tolist(), found.constancy.tolist())
    return [
        FixedHead(layer, head, tuple(shift), mass, constancy)
        for head, (shift, mass, constancy) in enumerate(zip(*columns, strict=True))
    ]


def table_of_fixed_shifts(heads: Mapping[str, list[FixedHead]]) -> Table:
    """How many heads of each layer hold a fixed shift, and which: one row per model and layer.

    Args:
        heads: Title of the model -> its heads.

    Example:
        >>> print(table_of_fixed_shifts({"one": [FixedHead(1, 0, (0, -1), 0.8, 0.99)]}).rows)
        (('one', '1', '1 of 1', 'head 0 at (0, -1): 80%'),)
    """
    rows = []
    for title, all_heads in heads.items():
        for layer in dict.fromkeys(head.layer for head in all_heads):
            here = [head for head in all_heads if head.layer == layer]
            fixed = [head for head in here if head.fixed]
            words = "; ".join(f"head {head.head} at {head.shift}: {head.mass:.0%}" for head in fixed)
            rows.append((title, str(layer), f"{len(fixed)} of {len(here)}", words or "none"))
    heading = (
        f"Heads that hold a fixed shift: at least {LEAST_MASS:.0%} of the attention on one shift, constancy at least "
        f"{LEAST_CONSTANCY:g}"
    )
    columns = ("model", "layer", "heads at a fixed shift", "which, at which (row, column) shift, with how much of it")
    return Table(heading, columns, tuple(rows))


def values_of(heads: Mapping[str, list[FixedHead]]) -> dict[str, Any]:
    """The same as plain values for JSON; a number that is not finite becomes None."""
    models = {
        title: [
            {
                "layer": head.layer,
                "head": head.head,
                "best_shift": list(head.shift),
                "mass": _finite(head.mass),
                "constancy": _finite(head.constancy),
                "fixed": head.fixed,
            }
            for head in all_heads
        ]
        for title, all_heads in heads.items()
    }
    return {"least_mass": LEAST_MASS, "least_constancy": LEAST_CONSTANCY, "models": models}


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
