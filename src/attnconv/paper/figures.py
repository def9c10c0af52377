"""Figures 1 to 14 of the paper: for each, the models that it shows, its caption, and the function that draws it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from matplotlib.figure import Figure
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.encodings.quadratic import Quadratic
from attnconv.grid import Grid
from attnconv.inspect.chosen_queries import mean_query_maps
from attnconv.paper.training_plan import CONTENT, PAPER_MODELS, PRUNED, SOURCE
from attnconv.report.accuracy_curves import SPLITS, Curve, draw_accuracy
from attnconv.report.attention_maps import draw_query
from attnconv.report.head_centres import draw_centres, draw_centres_over_training
from attnconv.report.run_data import PAPER_LAYER, ZOOM, History, RunData
from attnconv.report.theory_figures import draw_factorisation, draw_mixture
from attnconv.theory.expressibility import factorise


@final
@dataclass(frozen=True)
class PaperFigure:
    """One figure of the paper, with the function that draws it."""

    draw: Callable[..., Figure]  # called with the title, and with one run of each model that has runs
    models: tuple[str, ...] = ()  # the models whose runs it shows


def _accuracy(title: str, *runs: RunData) -> Figure:
    """Draw Figures 2 and 13; the pruned model continues the generalised one."""
    curves = {run.name: {curve.split: curve for curve in run.curves()} for run in runs}
    common = [split for split in SPLITS if all(split in found for found in curves.values())]
    if not common:
        raise ValueError(bad("runs", "must have accuracies of a common split", f"none common to {', '.join(curves)}"))
    split = common[-1]
    shown = []
    for name, found in curves.items():
        continues = name == PRUNED and SOURCE in curves
        epochs = found[split].epochs + (curves[SOURCE][split].epochs[-1] if continues else 0)
        shown.append(Curve(PAPER_MODELS[name].title, split, epochs, found[split].accuracy))
    data = ", ".join(dict.fromkeys(run.settings.data.name for run in runs))
    return draw_accuracy(shown, title=f"{title}: {split} accuracy on {data}")


def _movement(title: str, run: RunData) -> Figure:
    """Draw Figure 3: the heads of one layer during training."""
    history = _heads(run)
    layer = min(PAPER_LAYER, len(history) - 1)
    title = f"{title}: heads of layer {layer} during training"
    return draw_centres_over_training(history[layer], title=title, sizes=run.positions)


def _centres(title: str, run: RunData) -> Figure:
    """Draw Figures 4, 12 and 14: the heads of each layer after training."""
    last = [epochs[-1] for epochs in _heads(run)]
    title = f"{title}: heads after epoch {last[0][0]}, {PAPER_MODELS[run.name].title}"
    return draw_centres([heads for _, heads in last], title=title, sizes=run.positions)


def _heads(run: RunData) -> History:
    if history := run.history():
        return history
    raise ValueError(bad("run", "must contain recorded heads", f"none in {run.folder.path}"))


def _zoomed(title: str, run: RunData) -> Figure:
    """Draw Figure 5: attention near the query."""
    side = min(run.positions)
    zoom = min(ZOOM, side if side % 2 else side - 1)
    title = f"{title}: attention within {zoom} x {zoom} positions around the query, {PAPER_MODELS[run.name].title}"
    return draw_query(run.maps, 0, title=title, zoom=zoom)


def _means(title: str, run: RunData, *, query: int) -> Figure:
    """Draw Figures 6 and 7: mean attention of a query, with the heads in the same order in both figures."""
    title = f"{title}: attention, mean of {len(run.images)} test images, {PAPER_MODELS[run.name].title}"
    return draw_query(run.maps, query, title=title)


def _single(title: str, run: RunData, *, label: int, place: tuple[float, float]) -> Figure:
    """Draw Figures 8 to 10: attention in the first test image of a class; the paper does not name its images."""
    loaded, data = run.trained(), run.data()
    index = int((data.test.labels == label).nonzero()[0, 0])
    image = data.test.images[index : index + 1]
    layers = mean_query_maps(loaded.model, run.normalised(image, loaded), places=[place])
    title = f"{title}: attention in one image ({data.classes[label]}, test image {index}, counted from 0)"
    colours = (image[0].permute(1, 2, 0).double() / 255).expand(-1, -1, 3).numpy()
    return draw_query(layers, 0, title=title, picture=colours)


def _mixture(title: str) -> Figure:
    centres, query, sizes = [(-1.0, -2.0), (-1.0, 1.0), (1.0, 0.0), (2.0, 2.0)], (3, 3), (7, 7)
    maps = _attention(centres, 2.0, sizes)[:, query[0] * sizes[1] + query[1]].reshape(-1, *sizes).numpy()
    return draw_mixture(maps, query, centres=centres, title=f"{title}: multi-head self-attention at one query q")


def _factorisation(title: str) -> Figure:
    rows = _attention([(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (0.5, 0.5)], 23.0, (4, 4))
    found = factorise(rows, 2, query=(1, 1), sizes=(4, 4))
    return draw_factorisation(found, title=f"{title}: a 2 x 2 kernel from five heads at one query")


def _attention(centres: Sequence[tuple[float, float]], alpha: float, sizes: tuple[int, int]) -> Tensor:
    """Return the attention of isotropic heads with sharpness alpha in 1 / position^2, (heads, queries, keys)."""
    grid = Grid.make(sizes)
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # keep the caller's random state
        encoding = Quadratic(len(centres), grid.dims).double()
        encoding.centres.copy_(torch.tensor(centres, dtype=torch.float64))
        encoding.spread.fill_((2 * alpha) ** 0.5)
        operator = encoding.operator(grid, torch.zeros(1, *sizes, 1, dtype=torch.float64))
        return operator.rows(torch.arange(grid.query_count))[0]


CAPTIONS: Mapping[int, str] = {
    1: "The output at one query as a sum over heads. Each head attends to a different shift and has its own matrix.",
    2: "Accuracy over epochs.",
    3: "Heads of one layer (numbered from 0) during training: centres, with 50 % and 90 % contours of their attention.",
    4: "Heads of each layer (numbered from 0) of the quadratic model after training, with 50 % and 90 % contours.",
    5: f"Attention near the query in the model with learned positions, on at most {ZOOM} x {ZOOM} positions.",
    6: "Attention of the model with learned positions and content, averaged over test images. Indices are from 0.",
    7: "Like Figure 6, for a different query. Heads are in the same columns. The pattern of a head that acts like a "
    "convolution moves with the query.",
    8: "Attention of the model with learned positions and content in one test image.",
    9: "Like Figure 8, in a different image.",
    10: "Like Figure 8, with a query in the background of a different image.",
    11: "Kernel taps as linear combinations of the heads' attention: five heads form a 2 x 2 kernel.",
    12: "Heads of each layer (numbered from 0) of the generalised model, whose contours may be ellipses.",
    13: "Accuracy over epochs; the pruned model continues the training of the generalised model.",
    14: "Heads of each layer (numbered from 0) of the quadratic model with sixteen heads.",
}
FIGURES: Mapping[int, PaperFigure] = {
    1: PaperFigure(_mixture),
    2: PaperFigure(_accuracy, tuple(name for name, model in PAPER_MODELS.items() if model.table_1)),
    3: PaperFigure(_movement, ("quadratic",)),
    4: PaperFigure(_centres, ("quadratic",)),
    5: PaperFigure(_zoomed, ("learned",)),
    6: PaperFigure(partial(_means, query=0), (CONTENT,)),
    7: PaperFigure(partial(_means, query=1), (CONTENT,)),
    8: PaperFigure(partial(_single, label=6, place=(0.5, 0.5)), (CONTENT,)),
    9: PaperFigure(partial(_single, label=7, place=(0.35, 0.5)), (CONTENT,)),
    10: PaperFigure(partial(_single, label=9, place=(0.1, 0.9)), (CONTENT,)),
    11: PaperFigure(_factorisation),
    12: PaperFigure(_centres, (SOURCE,)),
    13: PaperFigure(_accuracy, tuple(name for name, model in PAPER_MODELS.items() if model.accuracy is not None)),
    14: PaperFigure(_centres, ("quadratic-16-heads",)),
}
