"""Data of a run for figures and tables: curves, heads, accuracies, images, and the attention of its model."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv.data.augmentation import normalise
from attnconv.data.image_set import Splits
from attnconv.data.load_splits import load_data
from attnconv.inspect.capture import attention_operators, visit_attention
from attnconv.inspect.chosen_queries import QueryMaps, mean_query_maps
from attnconv.inspect.head_statistics import LayerStatistics, RunningStatistics
from attnconv.inspect.null_models import TurnedHeads, turned_heads
from attnconv.models.model_loader import LoadedModel, load as load_model
from attnconv.models.settings import AttentionSettings, ResNetSettings, StagedSettings
from attnconv.report.accuracy_curves import SPLITS, Curve
from attnconv.report.head_centres import HeadGaussians
from attnconv.training.fitting import starting_model
from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import RunSettings

IMAGES = 100  # number of test images over which content-based attention is averaged, as in the paper
PLACES = ((0.5, 0.5), (0.25, 0.75))  # the queries of Figures 6 and 7, as fractions of height and width
ZOOM = 7  # side of the window around the query in positions, as in Figure 5
PAPER_LAYER = 3  # index, from 0, of the layer in Figure 3
_BATCH = 10

History: TypeAlias = list[list[tuple[int, HeadGaussians]]]  # for each layer, pairs (number of completed epochs, heads)

_loaded = lru_cache(maxsize=1)(load_data)  # the runs of a reproduction share their images


@final
@dataclass(frozen=True)
class RunData:
    """Data of a run, computed on demand and cached; head statistics include all queries of its `images`.

    `name` is that of the run folder or, in a reproduction, of the model (from `ALL_RUNS`). Nothing is downloaded.
    `data_root` is the folder of the images; None for the folder in the run's settings.
    """

    name: str
    folder: RunFolder
    data_root: str | None = None

    @cached_property
    def settings(self) -> RunSettings:
        return self.folder.settings()

    @property
    def model(self) -> AttentionSettings | StagedSettings:
        assert not isinstance(self.settings.model, ResNetSettings)
        return self.settings.model

    @property
    def positions(self) -> tuple[int, int]:
        """Number of rows and columns of the (first) grid of positions."""
        side = self.model.image_size // self.model.downsampling
        return side, side

    @property
    def unit(self) -> str:
        """Sentence for captions that states the size of a position in pixels; empty if it is one pixel."""
        side, first = self.model.downsampling, isinstance(self.model, StagedSettings)
        where = "In the first stage, one position" if first else "One position"
        return f" {where} is {side} x {side} pixels." if side > 1 else ""

    @property
    def result(self) -> Mapping[str, Any]:
        """Content of `result.json`; empty until the run is complete."""
        return self.folder.result() or {}

    def score(self, state: str) -> float | None:
        """Return the test accuracy (0 to 1) of the weights `start`, `last`, `best` or `chosen`; None if not measured.

        `chosen` stands for `best` if the best epoch was selected on validation images, and for `last` otherwise.
        """
        if state == "chosen":
            return self.score("best" if self.result.get("best") else "last")
        test = (self.result.get(state) or {}).get("test")
        return None if test is None else float(test["accuracy"])

    def curves(self) -> list[Curve]:
        """Return the accuracy curve of each measured split; raise a `ValueError` if no epoch is complete."""
        lines = self.folder.metrics()
        if not lines:
            fix = "Wait until metrics.jsonl contains a line."
            raise ValueError(bad("run", "must have completed at least one epoch", str(self.folder.path), fix))
        curves = []
        for split in SPLITS:
            points = {line["epoch"]: line["accuracy"] for line in lines if line["split"] == split}
            if points:
                curves.append(Curve(self.name, split, list(points), list(points.values())))
        return curves

    def history(self) -> History:
        """Return the snapshots of each layer with Gaussian heads, starting with the initialisation (epoch 0)."""
        history: dict[str, list[tuple[int, HeadGaussians]]] = {}
        for line in self.folder.heads():
            for layer in line["layers"]:
                heads = HeadGaussians(layer["centres"], layer["covariance"])
                history.setdefault(layer["name"], []).append((line["epoch"], heads))
        return list(history.values())

    def trained(self) -> LoadedModel:
        """Load the model with its weights after the last complete epoch; not cached, to save memory."""
        return load_model(self.folder.last_weights)

    def data(self) -> Splits:
        data = self.settings.data
        data = replace(data, root=self.data_root or data.root, download=False)
        return _loaded(data, image_size=self.settings.model.image_size)

    def normalised(self, images: Tensor, loaded: LoadedModel) -> Tensor:
        """Normalise images of `data` as in training."""
        data, dtype = self.data(), next(loaded.model.parameters()).dtype
        return normalise(images, loaded.mean or data.mean, loaded.std or data.std).to(dtype)

    @cached_property
    def images(self) -> Tensor:
        """First test images if attention depends on the image, otherwise one blank image, (n, c, height, width)."""
        loaded, model = self.trained(), self.model
        shape = (2, model.image_channels, model.image_size, model.image_size)
        blank = torch.zeros(shape, dtype=next(loaded.model.parameters()).dtype)
        if all(operator.batch == 1 for operator in attention_operators(loaded.model, blank).values()):
            return blank[:1]
        return self.normalised(self.data().test.images[:IMAGES], loaded)

    @cached_property
    def end(self) -> list[LayerStatistics]:
        """Statistics of each layer after the last complete epoch."""
        return _layer_statistics(self.trained().model, self.images)

    @cached_property
    def start(self) -> list[LayerStatistics]:
        """Statistics of each layer at initialisation."""
        return _layer_statistics(starting_model(self.folder), self.images)

    @cached_property
    def turned(self) -> list[TurnedHeads]:
        return [turned_heads(layer.profile, seed=number) for number, layer in enumerate(self.end)]

    @cached_property
    def maps(self) -> list[QueryMaps]:
        """Attention maps of the queries at `PLACES`, averaged over images."""
        return mean_query_maps(self.trained().model, self.images, places=PLACES)


def _layer_statistics(model: nn.Module, images: Tensor) -> list[LayerStatistics]:
    running = defaultdict[str, RunningStatistics](RunningStatistics)
    for batch in images.split(_BATCH):
        visit_attention(model, batch, lambda name, operator: running[name].add(operator))
    return [statistics.result() for statistics in running.values()]
