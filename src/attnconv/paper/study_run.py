"""A run of the study: its scores, its model before and after training, and the statistics of its heads."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, final

import torch
from torch import Tensor, nn

from attnconv.data.augmentation import normalise
from attnconv.data.image_set import Splits
from attnconv.data.load_splits import load as load_data
from attnconv.data.settings import DataSettings
from attnconv.inspect.capture_operators import content_layers, visit_operators
from attnconv.inspect.head_arrangement import TurnedHeads, turned_heads
from attnconv.inspect.head_statistics import LayerStatistics, RunningStatistics
from attnconv.inspect.query_maps import QueryMaps, mean_query_maps
from attnconv.models.model_loader import LoadedModel, load as load_model
from attnconv.models.settings import AttentionSettings
from attnconv.operators.base import AttentionOperator
from attnconv.training.initial_model import starting_model
from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import RunSettings

IMAGES = 100  # test images that attention is averaged over, as in the paper
BATCH = 10
PLACES = ((0.5, 0.5), (0.25, 0.75))  # the queries of Figures 6 and 7, as fractions of height and width


@final
@dataclass(frozen=True)
class StudyRun:
    """A run whose heads are measured once, when they are first asked for.

    Statistics are over all queries: of a blank image where attention depends on positions only, else over the first
    100 test images. Nothing is downloaded.

    Attributes:
        name: One of `ALL_RUNS`.
        folder: Run folder.
    """

    name: str
    folder: RunFolder

    @cached_property
    def settings(self) -> RunSettings:
        """Settings of the run."""
        return self.folder.settings()

    @property
    def attention(self) -> AttentionSettings:
        """Settings of the model, which is an attention model."""
        assert isinstance(self.settings.model, AttentionSettings)
        return self.settings.model

    @property
    def positions(self) -> tuple[int, int]:
        """Rows and columns of the positions that attention sees."""
        side = self.attention.image_size // self.attention.downsampling
        return side, side

    @property
    def result(self) -> Mapping[str, Any]:
        """Contents of `result.json`; empty until the run is complete."""
        return self.folder.result() or {}

    def score(self, state: str) -> float | None:
        """Test accuracy of the weights `start`, `last` or `best`; None where it was not measured.

        `chosen` is `best` where images were held out to choose the epoch by, else `last`.
        """
        if state == "chosen":
            return self.score("best" if self.result.get("best") else "last")
        test = (self.result.get(state) or {}).get("test")
        return None if test is None else float(test["accuracy"])

    def trained(self) -> LoadedModel:
        """Load the model after the last complete epoch. It is not cached: the models of all runs are large."""
        return load_model(self.folder.last_weights)

    def initial(self) -> nn.Module:
        """Return the model before the first step."""
        return starting_model(self.folder)

    def test_data(self) -> Splits:
        """Load the images of the run from where it found them."""
        return _load_data(replace(self.settings.data, download=False))

    def normalised(self, images: Tensor) -> Tensor:
        """Normalise images as in training."""
        loaded = self.trained()
        return normalise(images, loaded.mean, loaded.std).to(_dtype(loaded.model))

    @cached_property
    def images(self) -> Tensor:
        """The images that attention is averaged over."""
        model, settings = self.trained().model, self.attention
        side = settings.image_size
        blank = torch.zeros(2, settings.image_channels, side, side, dtype=_dtype(model))
        return self.normalised(self.test_data().test.images[:IMAGES]) if content_layers(model, blank) else blank[:1]

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
        """Each layer's heads turned at random."""
        return [turned_heads(layer.profile, seed=number) for number, layer in enumerate(self.end)]

    @cached_property
    def maps(self) -> list[QueryMaps]:
        """Mean attention of the queries at `PLACES`, layer by layer."""
        return mean_query_maps(self.trained().model, self.images, places=PLACES, batch_size=BATCH)


@lru_cache(maxsize=1)  # runs of one reproduction share their images
def _load_data(settings: DataSettings) -> Splits:
    return load_data(settings)


def _dtype(model: nn.Module) -> torch.dtype:
    return next(parameter.dtype for parameter in model.parameters())


def _layer_statistics(model: nn.Module, images: Tensor) -> list[LayerStatistics]:
    running: dict[str, RunningStatistics] = {}

    def add(name: str, operator: AttentionOperator) -> None:
        running.setdefault(name, RunningStatistics()).add(operator)

    for batch in images.split(BATCH):
        visit_operators(model, batch, add)
    return [statistics.result() for statistics in running.values()]
