"""A run of the study: its scores, its model before and after training, and the statistics of its heads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, final

from jaxtyping import Bool
from torch import Tensor, nn

from attnconv.inspect.capture import visit_attention
from attnconv.inspect.chosen_queries import QueryMaps, mean_query_maps
from attnconv.inspect.head_statistics import LayerStatistics, RunningStatistics
from attnconv.inspect.null_models import TurnedHeads, turned_heads
from attnconv.models.model_loader import LoadedModel, load as load_model
from attnconv.models.settings import AttentionSettings
from attnconv.operators.base import AttentionOperator
from attnconv.report.run_data import PLACES, images_for
from attnconv.training.fitting import starting_model
from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import RunSettings

_BATCH = 10
LEAST_MASS, LEAST_CONSTANCY = 0.5, 0.9  # of a head at a fixed shift


@final
@dataclass(frozen=True)
class StudyRun:
    """A run whose heads are measured once, over all queries of its `images`, when they are first asked for.

    `name` is one of `ALL_RUNS`. Nothing is downloaded.
    """

    name: str
    folder: RunFolder

    @cached_property
    def settings(self) -> RunSettings:
        return self.folder.settings()

    @property
    def heads(self) -> tuple[int, ...]:
        assert isinstance(self.settings.model, AttentionSettings)
        return self.settings.model.heads_per_layer

    @property
    def result(self) -> Mapping[str, Any]:
        """Contents of `result.json`; empty until the run is complete."""
        return self.folder.result() or {}

    def score(self, state: str) -> float | None:
        """Test accuracy of the weights `start`, `last` or `best`; None if it was not measured.

        `chosen` is `best` if images were held out to choose the epoch by, else `last`.
        """
        if state == "chosen":
            return self.score("best" if self.result.get("best") else "last")
        test = (self.result.get(state) or {}).get("test")
        return None if test is None else float(test["accuracy"])

    def trained(self) -> LoadedModel:
        """Load the model after the last complete epoch; not cached, since the models of all runs are large."""
        return load_model(self.folder.last_weights)

    def initial(self) -> nn.Module:
        return starting_model(self.folder)

    @cached_property
    def images(self) -> Tensor:
        return images_for(self.folder, self.trained())[0]

    @cached_property
    def end(self) -> list[LayerStatistics]:
        """Statistics of each layer after the last complete epoch."""
        return _layer_statistics(self.trained().model, self.images)

    @cached_property
    def start(self) -> list[LayerStatistics]:
        """Statistics of each layer before the first step."""
        return _layer_statistics(self.initial(), self.images)

    @cached_property
    def turned(self) -> list[TurnedHeads]:
        return [turned_heads(layer.profile, seed=number) for number, layer in enumerate(self.end)]

    @cached_property
    def maps(self) -> list[QueryMaps]:
        return mean_query_maps(self.trained().model, self.images, places=PLACES)


Runs: TypeAlias = Mapping[str, Sequence[StudyRun]]  # by their names, one for each seed


def _layer_statistics(model: nn.Module, images: Tensor) -> list[LayerStatistics]:
    running: dict[str, RunningStatistics] = {}

    def add(name: str, operator: AttentionOperator) -> None:
        running.setdefault(name, RunningStatistics()).add(operator)

    for batch in images.split(_BATCH):
        visit_attention(model, batch, add)
    return [statistics.result() for statistics in running.values()]


def at_fixed_shift(layer: LayerStatistics) -> Bool[Tensor, "h"]:
    """Whether each head has most of its mass on one shift, and a pattern that hardly changes with the query."""
    return (layer.shift_mass >= LEAST_MASS) & (layer.constancy >= LEAST_CONSTANCY)
