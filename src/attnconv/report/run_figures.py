"""All figures that apply to one run, drawn and saved: files, words for those who cannot see them, how to read them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from attnconv.data.augmentation import normalise
from attnconv.data.load_splits import load as load_data
from attnconv.inspect.capture_operators import content_layers
from attnconv.inspect.query_maps import QueryMaps, mean_query_maps
from attnconv.models.model_loader import LoadedModel, load as load_model
from attnconv.models.settings import AttentionSettings
from attnconv.report.accuracy_curves import draw_accuracy
from attnconv.report.attention_maps import LayerMaps, draw_attention_maps, reading_order
from attnconv.report.centres_over_training import draw_centres_over_training
from attnconv.report.figure_style import save
from attnconv.report.gaussian_contours import HeadGaussians
from attnconv.report.head_centres import draw_centres
from attnconv.report.html_page import Picture, Section
from attnconv.report.run_data import curves_of, heads_of, run_name
from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import RunSettings

IMAGES = 100  # test images over which content-based attention is averaged, as in the paper
PLACES = ((0.5, 0.5), (0.25, 0.75))  # the two queries of Figures 6 and 7, as parts of height and width
ZOOM = 7  # pixels, as in Figure 5
PAPER_LAYER = 4  # the layer of Figure 3


@dataclass(frozen=True)
class RunFigures:
    """Draws the figures of one run into one folder.

    Attributes:
        run: The run's folder.
        settings: Its settings.
        folder: Where the figures go.
    """

    run: RunFolder
    settings: RunSettings
    folder: Path

    @property
    def label(self) -> str:
        """The run in a title: its folder's name, and its preset where that says more."""
        name, preset = run_name(self.run), self.settings.preset
        return name if preset in name else f"{name} ({preset})"

    def sections(self) -> list[Section]:
        """The parts of the report that apply to the model."""
        sections = [self.accuracy()]
        if isinstance(self.settings.model, AttentionSettings):
            history = heads_of(self.run)
            if history:
                sections += [self.centres(history), self.movement(history)]
            sections.append(self.attention())
        return sections

    def accuracy(self) -> Section:
        """Figure 2."""
        curves = curves_of(self.run)
        words = "; ".join(
            f"{curve.split} {_percent(curve.last)} after epoch {curve.epochs[-1]:.0f}" for curve in curves
        )
        figure = draw_accuracy(curves, title=f"{self.label}: accuracy")
        caption = (
            "Part of the images classified correctly after each epoch, as in Figure 2 of the paper. Training accuracy "
            "is measured on randomly changed images while the weights still move."
        )
        return Section("Accuracy", pictures=[self._keep(figure, "figure-02-accuracy", f"Accuracy. {words}.", caption)])

    def centres(self, history: dict[str, list[tuple[int, HeadGaussians]]]) -> Section:
        """Figures 4, 12 and 14."""
        last = [epochs[-1] for epochs in history.values()]
        layers = [heads for _, heads in last]
        figure = draw_centres(layers, title=f"{self.label}: heads after epoch {last[0][0]}", sizes=self._positions())
        caption = (
            "Each colour and mark is one head of a layer: the centre of its attention as a shift from the query pixel "
            "(black square), with the contours that hold 50% and 90% of its mass. Heads that stand on single pixels "
            "around the query act as the positions of a convolution's kernel. As Figures 4, 12 and 14 of the paper."
        )
        alt = f"Head centres per layer. {_words_of(layers)}"
        return Section("Where the heads look", pictures=[self._keep(figure, "figure-04-centres", alt, caption)])

    def movement(self, history: dict[str, list[tuple[int, HeadGaussians]]]) -> Section:
        """Figure 3, for every layer; the paper's layer in front."""
        pictures = []
        for number, epochs in enumerate(history.values(), start=1):
            figure = draw_centres_over_training(
                epochs, title=f"{self.label}: heads of layer {number} during training", sizes=self._positions()
            )
            first, last = epochs[0], epochs[-1]
            alt = (
                f"Heads of layer {number} during training. After epoch {first[0]}: {_words(first[1])}. "
                f"After epoch {last[0]}: {_words(last[1])}."
            )
            caption = (
                f"The heads of layer {number} from their random start (epoch 0) to the end, all at one scale. As "
                "Figure 3 of the paper, where nine heads settle on a grid of pixels around the query."
            )
            stem = f"figure-03-centres-over-training-layer-{number}"
            pictures.append(self._keep(figure, stem, alt, caption))
        shown = min(PAPER_LAYER, len(pictures)) - 1
        others = pictures[:shown] + pictures[shown + 1 :]
        title = "How the heads moved"
        return Section(title, pictures=pictures[shown : shown + 1], folded=others, fold="The other layers")

    def attention(self) -> Section:
        """Figures 5, 6 and 7."""
        title = "Attention of every head"
        if not self.run.last_weights.is_file():
            return Section(title, notes=["The run has not written any weights yet, so there is nothing to show here."])
        loaded = load_model(self.run.last_weights)
        blank = self._blank(loaded.model)
        content = bool(content_layers(loaded.model, blank))
        images, average = blank[:1], ""
        if content:
            try:
                images = self._test_images(loaded, blank)
            except (OSError, ValueError) as error:
                note = "This model's attention depends on the images, and the test images could not be read: "
                return Section(title, notes=[f"{note}{error}"])
            average = f", mean of {len(images)} test images"
        layers = mean_query_maps(loaded.model, images, places=PLACES)
        orders = [reading_order(layer.maps[0].numpy()) for layer in layers]
        pictures = [self._maps(layers, index, average, orders) for index in range(len(PLACES))]
        if not content and max(max(layer.maps.shape[2:]) for layer in layers) > ZOOM:
            pictures.insert(0, self._zoomed(layers, orders))
        return Section(title, pictures=pictures)

    def _maps(self, layers: Sequence[QueryMaps], index: int, average: str, orders: Sequence[Sequence[int]]) -> Picture:
        rows = [
            LayerMaps(f"layer {number}", layer.maps[index].numpy(), layer.positions[index])
            for number, layer in enumerate(layers, start=1)
        ]
        where = f"query pixel in row {rows[0].query[0] + 1:.0f}, column {rows[0].query[1] + 1:.0f}"
        figure = draw_attention_maps(rows, title=f"{self.label}: attention of the {where}{average}", orders=orders)
        other = (
            "As Figure 6 of the paper."
            if index == 0
            else "As Figure 7, with every head in the same column as above: one that works like a convolution keeps "
            "its pattern and moves with the query."
        )
        caption = f"Attention probabilities of every head (columns) at every layer (rows){average}. {other}"
        alt = f"Attention maps of the {where}{average}. {_peaks(rows)}"
        return self._keep(figure, f"figure-{6 + index:02d}-attention", alt, caption)

    def _zoomed(self, layers: Sequence[QueryMaps], orders: Sequence[Sequence[int]]) -> Picture:
        rows = [
            LayerMaps(f"layer {number}", layer.maps[0].numpy(), layer.positions[0])
            for number, layer in enumerate(layers, start=1)
        ]
        title = f"{self.label}: attention within {ZOOM} x {ZOOM} pixels of the query"
        caption = (
            f"The {ZOOM} x {ZOOM} pixels around the query, as Figure 5 of the paper. A head on one pixel is one "
            "position of a convolution's kernel; a blank map belongs to a head that looks further away."
        )
        figure = draw_attention_maps(rows, title=title, zoom=ZOOM, orders=orders)
        alt = f"Attention maps near the query pixel. {_peaks(rows)}"
        return self._keep(figure, "figure-05-attention", alt, caption)

    def _keep(self, figure: Figure, stem: str, alt: str, caption: str) -> Picture:
        png, svg = save(figure, self.folder / stem)
        return Picture(png=png, svg=svg, width=float(figure.get_size_inches()[0]), alt=alt, caption=caption)

    def _positions(self) -> tuple[int, int]:
        model = self.settings.model
        assert isinstance(model, AttentionSettings)
        side = model.image_size // model.downsampling
        return side, side

    def _blank(self, model: nn.Module) -> Tensor:
        """Two empty images: enough for attention that only knows positions."""
        wanted = self.settings.model
        dtype = next(parameter.dtype for parameter in model.parameters())
        return torch.zeros(2, wanted.image_channels, wanted.image_size, wanted.image_size, dtype=dtype)

    def _test_images(self, loaded: LoadedModel, like: Tensor) -> Tensor:
        """The first test images, normalised as in training; nothing is downloaded for a report."""
        data = load_data(replace(self.settings.data, download=False))
        mean, std = loaded.mean or data.mean, loaded.std or data.std
        return normalise(data.test.images[:IMAGES], mean, std).to(like.dtype)


def _words_of(layers: Sequence[HeadGaussians]) -> str:
    return " ".join(f"Layer {number}: {_words(heads)}." for number, heads in enumerate(layers, start=1))


def _words(heads: HeadGaussians) -> str:
    distances = np.linalg.norm(heads.centres, axis=1)
    distances = distances[np.isfinite(distances)]
    count = f"{heads.count} {'head' if heads.count == 1 else 'heads'}"
    if not len(distances):
        return f"{count}, none with a finite centre"
    return f"{count}, centres {distances.min():.1f} to {distances.max():.1f} pixels from the query"


def _peaks(rows: Sequence[LayerMaps]) -> str:
    """Largest probabilities of each layer's heads, in words."""
    parts = []
    for row in rows:
        peaks = row.maps.max((1, 2))
        low, high = float(np.nanmin(peaks)), float(np.nanmax(peaks))
        parts.append(f"{row.title.capitalize()}: largest probabilities {_percent(low)} to {_percent(high)}.")
    return " ".join(parts)


def _percent(part: float) -> str:
    return f"{part:.1%}"
