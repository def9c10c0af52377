"""Figures 1 to 14 of the paper, each under its own number, from the runs that there are.

    1   one query's output as a mixture of heads     (no run)     11  E_q = Phi A_q                     (no run)
    2   accuracy of the models of Table 1                         12  heads of the generalised model
    3   heads of layer 4 during training (quadratic)              13  accuracy of the models of Table 4
    4   heads of all layers (quadratic)                           14  heads of the model with 16 heads
    5   attention near the query (learned)
    6, 7   mean attention over 100 test images at two queries (learned + content)
    8-10   attention on single test images (learned + content)

`FIGURES` says which model each needs; `PaperFigures.draw` draws one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from matplotlib.figure import Figure
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.data.augmentation import normalise
from attnconv.data.image_set import Splits
from attnconv.data.load_splits import load as load_data
from attnconv.encodings.quadratic import Quadratic
from attnconv.grid import Grid
from attnconv.inspect.capture_operators import content_layers
from attnconv.inspect.query_maps import QueryMaps, mean_query_maps
from attnconv.models.model_loader import LoadedModel, load as load_model
from attnconv.models.settings import AttentionSettings
from attnconv.paper.models import PAPER_MODELS, PRUNED
from attnconv.report.accuracy_curves import SPLITS, Curve, draw_accuracy
from attnconv.report.attention_maps import LayerMaps, draw_attention_maps, reading_order
from attnconv.report.centres_over_training import draw_centres_over_training
from attnconv.report.gaussian_contours import FloatArray
from attnconv.report.head_centres import draw_centres
from attnconv.report.head_mixture import draw_mixture
from attnconv.report.kernel_factorisation import draw_factorisation
from attnconv.report.run_data import curves_of, heads_of
from attnconv.theory.expressibility import factorise
from attnconv.training.run_folder import RunFolder

IMAGES = 100  # test images that Figures 6 and 7 are means over
CENTRE, ASIDE = (0.5, 0.5), (0.25, 0.75)  # their two queries, as parts of height and width
# Figures 8 to 10: the first test image of a class, and a query on it. The paper does not say which images it shows.
SINGLE: Mapping[int, tuple[str, tuple[float, float]]] = {
    8: ("frog", (0.5, 0.5)),
    9: ("horse", (0.35, 0.5)),
    10: ("truck", (0.1, 0.9)),
}
_ZOOM, _LAYER = 7, 4

FIGURES: Mapping[int, tuple[str, ...]] = {
    1: (),
    2: tuple(name for name, model in PAPER_MODELS.items() if model.table_1),
    3: ("quadratic",),
    4: ("quadratic",),
    5: ("learned",),
    6: ("learned-content",),
    7: ("learned-content",),
    8: ("learned-content",),
    9: ("learned-content",),
    10: ("learned-content",),
    11: (),
    12: ("quadratic-generalized",),
    13: tuple(name for name, model in PAPER_MODELS.items() if model.accuracy is not None),
    14: ("quadratic-16-heads",),
}
"""Number of a figure -> the models whose runs it shows, as in `PAPER_MODELS`."""

CAPTIONS: Mapping[int, str] = {
    1: "One query's output as a sum over heads, each of which attends at its own shift and has its own matrix.",
    2: "Accuracy over the epochs.",
    3: "Heads of one layer during training: centres, with the contours that hold 50% and 90% of their attention.",
    4: "Heads of each layer of the quadratic model after training, with the contours of 50% and 90%.",
    5: f"Attention of the learned positional model near the query; at most {_ZOOM} x {_ZOOM} positions.",
    6: "Attention of the model with learned positions and content, a mean over test images.",
    7: "As Figure 6 for another query, with every head in the same column: a head like a convolution's moves along.",
    8: "Attention of the model with content on one test image.",
    9: "As Figure 8 on another image.",
    10: "As Figure 8 with a query on the background.",
    11: "A kernel position as a mixture of the heads' attention: five heads that make up a 2 x 2 kernel.",
    12: "Heads of each layer of the generalised model, whose Gaussians may be ellipses.",
    13: "Accuracy over the epochs; the pruned model continues the generalised one.",
    14: "Heads of each layer of the quadratic model with sixteen heads.",
}


@final
@dataclass(frozen=True)
class PaperFigures:
    """Draws the paper's figures from runs.

    Attributes:
        runs: Model, as in `PAPER_MODELS` -> its run.
    """

    runs: Mapping[str, RunFolder]

    def missing(self, number: int) -> tuple[str, ...]:
        """Models of a figure that have no run with a complete epoch."""
        return tuple(name for name in FIGURES[number] if name not in self.runs or not self.runs[name].metrics())

    def draw(self, number: int) -> Figure | None:
        """One figure of the paper; None where the runs it needs are not there.

        Figures 2 and 13 are drawn of the models that there are.

        Raises:
            OSError, ValueError: The run's files or its images cannot be read.
        """
        absent = self.missing(number)
        if absent and (number not in (2, 13) or len(absent) == len(FIGURES[number])):
            return None
        match number:
            case 1:
                return _mixture()
            case 2 | 13:
                return self._accuracy(number)
            case 3:
                return self._movement()
            case 4 | 12 | 14:
                return self._centres(number)
            case 5:
                return self._zoomed()
            case 6 | 7:
                return self._means(number)
            case 11:
                return _factorisation()
        return self._single(number)

    def _accuracy(self, number: int) -> Figure:
        names = [name for name in FIGURES[number] if name not in self.missing(number)]
        curves = {name: {curve.split: curve for curve in curves_of(self.runs[name])} for name in names}
        common = [split for split in SPLITS if all(split in found for found in curves.values())]
        if not common:
            raise ValueError(bad("runs", "must have curves of the same images", f"none that {', '.join(names)} share"))
        split = common[-1]
        shown = []
        for name in names:
            curve = curves[name][split]
            before = curves.get("quadratic-generalized", {}).get(split)
            later = float(before.epochs[-1]) if name == PRUNED and before is not None else 0.0
            shown.append(Curve(PAPER_MODELS[name].title, split, curve.epochs + later, curve.accuracy))
        data = ", ".join(dict.fromkeys(self.runs[name].settings().data.name for name in names))
        return draw_accuracy(shown, title=f"Figure {number}: {split} accuracy on {data}")

    def _movement(self) -> Figure:
        run = self.runs["quadratic"]
        history = list(heads_of(run).values())
        if not history:
            raise ValueError(bad("run", "must have recorded its heads", f"none in {run.path}"))
        layer = min(_LAYER, len(history))
        title = f"Figure 3: heads of layer {layer} during training"
        return draw_centres_over_training(history[layer - 1], title=title, sizes=_positions(run))

    def _centres(self, number: int) -> Figure:
        (name,) = FIGURES[number]
        run = self.runs[name]
        last = [epochs[-1] for epochs in heads_of(run).values()]
        if not last:
            raise ValueError(bad("run", "must have recorded its heads", f"none in {run.path}"))
        title = f"Figure {number}: heads after epoch {last[0][0]}, {PAPER_MODELS[name].title}"
        return draw_centres([heads for _, heads in last], title=title, sizes=_positions(run))

    def _zoomed(self) -> Figure:
        loaded = load_model(self.runs["learned"].last_weights)
        layers = mean_query_maps(loaded.model, blank(loaded)[:1], places=[CENTRE])
        side = min(min(layer.maps.shape[2:]) for layer in layers)
        zoom = min(_ZOOM, side if side % 2 else side - 1)
        title = f"Figure 5: attention within {zoom} x {zoom} pixels of the query, {PAPER_MODELS['learned'].title}"
        return draw_attention_maps(_rows(layers, 0), title=title, zoom=zoom)

    def _means(self, number: int) -> Figure:
        layers, images = self._mean_maps
        orders = [reading_order(layer.maps[0].numpy()) for layer in layers]
        title = f"Figure {number}: attention, mean of {images} test images, {PAPER_MODELS['learned-content'].title}"
        return draw_attention_maps(_rows(layers, number - 6), title=title, orders=orders)

    def _single(self, number: int) -> Figure:
        loaded, data = self._content
        label, place = SINGLE[number]
        chosen = data.classes.index(label) if label in data.classes else number - 8
        index = int((data.test.labels == chosen).nonzero()[0, 0])
        images = data.test.images[index : index + 1]
        layers = mean_query_maps(loaded.model, normalised(images, loaded, data), places=[place])
        title = f"Figure {number}: attention on one image ({data.classes[chosen]}, test image {index + 1})"
        return draw_attention_maps(_rows(layers, 0), title=title, picture=_colours(images[0]))

    @cached_property
    def _content(self) -> tuple[LoadedModel, Splits]:
        run = self.runs["learned-content"]
        return load_model(run.last_weights), test_data(run)

    @cached_property
    def _mean_maps(self) -> tuple[list[QueryMaps], int]:
        loaded, data = self._content
        images = normalised(data.test.images[:IMAGES], loaded, data)
        return mean_query_maps(loaded.model, images, places=[CENTRE, ASIDE]), len(images)


def test_data(run: RunFolder) -> Splits:
    """The images of a run, from where it found them; nothing is downloaded for a figure."""
    return load_data(replace(run.settings().data, download=False))


def blank(loaded: LoadedModel) -> Tensor:
    """Two empty images: enough for attention that only knows positions."""
    wanted = loaded.settings
    assert wanted is not None  # weights of a run say what they are of
    dtype = next(parameter.dtype for parameter in loaded.model.parameters())
    return torch.zeros(2, wanted.image_channels, wanted.image_size, wanted.image_size, dtype=dtype)


def normalised(images: Tensor, loaded: LoadedModel, data: Splits) -> Tensor:
    """Images as the model was trained on them."""
    dtype = next(parameter.dtype for parameter in loaded.model.parameters())
    return normalise(images, loaded.mean or data.mean, loaded.std or data.std).to(dtype)


def images_for(run: RunFolder, loaded: LoadedModel) -> Tensor:
    """What attention is averaged over: one blank image of positions alone, else the first test images."""
    empty = blank(loaded)
    if not content_layers(loaded.model, empty):
        return empty[:1]
    data = test_data(run)
    return normalised(data.test.images[:IMAGES], loaded, data)


def _rows(layers: Sequence[QueryMaps], index: int) -> list[LayerMaps]:
    return [
        LayerMaps(f"layer {number}", layer.maps[index].numpy(), layer.positions[index])
        for number, layer in enumerate(layers, start=1)
    ]


def _positions(run: RunFolder) -> tuple[int, int]:
    model = run.settings().model
    assert isinstance(model, AttentionSettings)
    side = model.image_size // model.downsampling
    return side, side


def _colours(image: Tensor) -> FloatArray:
    """(height, width, 3) in 0 .. 1; a grey image three times."""
    shown = image.permute(1, 2, 0).double() / 255
    colours: FloatArray = shown.expand(-1, -1, 3).numpy()
    return colours


def _attention(centres: Sequence[tuple[float, float]], alpha: float, grid: Grid) -> Tensor:
    """Rows of round heads, (heads, queries, keys)."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # a figure leaves the caller's random numbers alone
        encoding = Quadratic(len(centres), grid.dims).double()
        encoding.centres.copy_(torch.tensor(centres, dtype=torch.float64))
        encoding.spread.fill_((2 * alpha) ** 0.5)
        operator = encoding.operator(grid, torch.zeros(1, *grid.sizes, 1, dtype=torch.float64))
        return operator.rows(torch.arange(grid.query_count))[0]


def _mixture() -> Figure:
    centres, query, sizes = [(-1.0, -2.0), (-1.0, 1.0), (1.0, 0.0), (2.0, 2.0)], (3, 3), (7, 7)
    rows = _attention(centres, 2.0, Grid.make(sizes))
    maps = rows[:, query[0] * sizes[1] + query[1]].reshape(-1, *sizes).numpy()
    title = "Figure 1: multi-head self-attention at one query pixel q"
    return draw_mixture(maps, query, centres=centres, title=title)


def _factorisation() -> Figure:
    centres = [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (0.5, 0.5)]
    rows = _attention(centres, 23.0, Grid.make((4, 4)))
    title = "Figure 11: a 2 x 2 kernel from five heads at one query"
    return draw_factorisation(factorise(rows, 2, query=(1, 1), sizes=(4, 4)), title=title)
