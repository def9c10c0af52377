"""A run as figures and tables see it: its curves, heads and scores, its images, and the attention of its model."""

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
from attnconv.models.settings import AttentionSettings
from attnconv.report.accuracy_curves import SPLITS, Curve
from attnconv.report.head_centres import HeadGaussians
from attnconv.training.fitting import starting_model
from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import RunSettings

IMAGES = 100  # test images over which attention that depends on images is averaged, as in the paper
PLACES = ((0.5, 0.5), (0.25, 0.75))  # the two queries of Figures 6 and 7, as parts of height and width
ZOOM = 7  # pixels, as in Figure 5
PAPER_LAYER = 4  # the layer of Figure 3
_BATCH = 10

History: TypeAlias = list[list[tuple[int, HeadGaussians]]]  # layer by layer: epochs and the heads at their ends

_loaded = lru_cache(maxsize=1)(load_data)  # the runs of one study share their images


@final
@dataclass(frozen=True)
class RunData:
    """A run whose heads are measured once, over all queries of its `images`, when they are first asked for.

    `name` is the folder's, or in a study the model's, one of `ALL_RUNS`. Nothing is downloaded.
    """

    name: str
    folder: RunFolder

    @cached_property
    def settings(self) -> RunSettings:
        return self.folder.settings()

    @property
    def model(self) -> AttentionSettings:
        """Settings of a model that has attention."""
        assert isinstance(self.settings.model, AttentionSettings)
        return self.settings.model

    @property
    def positions(self) -> tuple[int, int]:
        """Rows and columns of positions that the attention sees."""
        side = self.model.image_size // self.model.downsampling
        return side, side

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

    def curves(self) -> list[Curve]:
        """The accuracy on each measured split; raises a ValueError if no epoch is complete."""
        lines = self.folder.metrics()
        if not lines:
            fix = "Wait for the first line of metrics.jsonl."
            raise ValueError(bad("run", "must have completed an epoch", str(self.folder.path), fix))
        curves = []
        for split in SPLITS:
            points = {line["epoch"]: line["accuracy"] for line in lines if line["split"] == split}
            if points:
                curves.append(Curve(self.name, split, list(points), list(points.values())))
        return curves

    def history(self) -> History:
        """The layers whose heads have centres, from the initialisation (epoch 0) on."""
        history: dict[str, list[tuple[int, HeadGaussians]]] = {}
        for line in self.folder.heads():
            for layer in line["layers"]:
                heads = HeadGaussians(layer["centres"], layer["covariance"])
                history.setdefault(layer["name"], []).append((line["epoch"], heads))
        return list(history.values())

    def trained(self) -> LoadedModel:
        """Load the model after the last complete epoch; not cached, since the models of all runs are large."""
        return load_model(self.folder.last_weights)

    def initial(self) -> nn.Module:
        return starting_model(self.folder)

    def data(self) -> Splits:
        return _loaded(replace(self.settings.data, download=False))

    def normalised(self, images: Tensor, loaded: LoadedModel) -> Tensor:
        """Images of `data` as the model was trained on them."""
        data, dtype = self.data(), next(loaded.model.parameters()).dtype
        return normalise(images, loaded.mean or data.mean, loaded.std or data.std).to(dtype)

    @cached_property
    def images(self) -> Tensor:
        """The first test images if attention depends on them, else one blank image: (n, c, height, width)."""
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
        """Statistics of each layer before the first step."""
        return _layer_statistics(self.initial(), self.images)

    @cached_property
    def turned(self) -> list[TurnedHeads]:
        return [turned_heads(layer.profile, seed=number) for number, layer in enumerate(self.end)]

    @cached_property
    def maps(self) -> list[QueryMaps]:
        """Mean attention of the queries at `PLACES`."""
        return mean_query_maps(self.trained().model, self.images, places=PLACES)


def _layer_statistics(model: nn.Module, images: Tensor) -> list[LayerStatistics]:
    running = defaultdict[str, RunningStatistics](RunningStatistics)
    for batch in images.split(_BATCH):
        visit_attention(model, batch, lambda name, operator: running[name].add(operator))
    return [statistics.result() for statistics in running.values()]
