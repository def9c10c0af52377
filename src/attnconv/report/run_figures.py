"""All figures that apply to one run, drawn and saved, with their alternative texts and captions."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from attnconv.inspect.query_maps import mean_query_maps
from attnconv.models.model_loader import load as load_model
from attnconv.models.settings import AttentionSettings
from attnconv.report.accuracy_curves import draw_accuracy
from attnconv.report.attention_maps import LayerMaps, draw_attention_maps, maps_of_query, reading_order
from attnconv.report.centres_over_training import draw_centres_over_training
from attnconv.report.gaussian_contours import HeadGaussians
from attnconv.report.head_centres import draw_centres
from attnconv.report.html_page import Picture, Section
from attnconv.report.run_data import curves_of, heads_of, images_for, positions_of, run_name
from attnconv.training.run_folder import RunFolder

PLACES = ((0.5, 0.5), (0.25, 0.75))  # the two queries of Figures 6 and 7, as parts of height and width
ZOOM = 7  # pixels, as in Figure 5
PAPER_LAYER = 4  # the layer of Figure 3

History = dict[str, list[tuple[int, HeadGaussians]]]


@dataclass(frozen=True)
class RunFigures:
    """Draws the figures of one run into one folder.

    Attributes:
        run: The run's folder.
        label: The run's name in titles.
        folder: Where the figures go.
    """

    run: RunFolder
    label: str
    folder: Path

    def accuracy(self) -> Section:
        """Figure 2."""
        curves = curves_of(self.run)
        words = "; ".join(f"{curve.split} {curve.last:.1%} after epoch {curve.epochs[-1]:.0f}" for curve in curves)
        picture = self._save(
            draw_accuracy(curves, title=f"{self.label}: accuracy"),
            "figure-02-accuracy",
            alt=f"Accuracy. {words}.",
            caption="Part of the images classified correctly after each epoch, as in Figure 2 of the paper. Training "
            "accuracy is measured on augmented images while the weights still change.",
        )
        return Section("Accuracy", pictures=[picture])

    def centres(self, history: History) -> Section:
        """Figures 4, 12 and 14."""
        epoch = next(iter(history.values()))[-1][0]
        layers = [epochs[-1][1] for epochs in history.values()]
        words = " ".join(f"Layer {number}: {_words(heads)}." for number, heads in enumerate(layers, start=1))
        picture = self._save(
            draw_centres(layers, title=f"{self.label}: heads after epoch {epoch}", sizes=positions_of(self.run)),
            "figure-04-centres",
            alt=f"Head centres per layer. {words}",
            caption="Each colour and mark is one head of a layer: the centre of its attention as a shift from the "
            "query pixel (black square), with the contours that hold 50% and 90% of its mass. Heads on single pixels "
            "around the query act as the positions of a convolution's kernel. As Figures 4, 12 and 14 of the paper.",
        )
        return Section("Where the heads attend", pictures=[picture])

    def movement(self, history: History) -> Section:
        """Figure 3, for every layer; the paper's layer in front."""
        pictures = []
        for number, epochs in enumerate(history.values(), start=1):
            (first, start), (last, end) = epochs[0], epochs[-1]
            title = f"{self.label}: heads of layer {number} during training"
            picture = self._save(
                draw_centres_over_training(epochs, title=title, sizes=positions_of(self.run)),
                f"figure-03-centres-over-training-layer-{number}",
                alt=f"Heads of layer {number} during training. After epoch {first}: {_words(start)}. "
                f"After epoch {last}: {_words(end)}.",
                caption=f"The heads of layer {number} from their random start (epoch 0) to the end, all at one scale. "
                "As Figure 3 of the paper, where nine heads settle on a grid of pixels around the query.",
            )
            pictures.append(picture)
        shown = pictures.pop(min(PAPER_LAYER, len(pictures)) - 1)
        return Section("How the heads moved", pictures=[shown], folded=pictures, fold="The other layers")

    def attention(self) -> Section:
        """Figures 5, 6 and 7."""
        title = "Attention of every head"
        if not self.run.last_weights.is_file():
            return Section(title, notes=["The run has not written any weights yet, so there is nothing to show here."])
        loaded = load_model(self.run.last_weights)
        try:
            images, content = images_for(self.run, loaded)
        except (OSError, ValueError) as error:
            note = "This model's attention depends on the images, and the test images could not be read: "
            return Section(title, notes=[f"{note}{error}"])
        layers = mean_query_maps(loaded.model, images, places=PLACES)
        orders = [reading_order(layer.maps[0].numpy()) for layer in layers]
        average = f", mean of {len(images)} test images" if content else ""
        first, second = (maps_of_query(layers, index) for index in range(len(PLACES)))
        pictures = [
            self._maps(first, 6, average, orders, "As Figure 6 of the paper."),
            self._maps(
                second,
                7,
                average,
                orders,
                "As Figure 7, with every head in the same column as above: one that works like a convolution keeps its "
                "pattern and moves with the query.",
            ),
        ]
        if not content and max(max(layer.maps.shape[1:]) for layer in first) > ZOOM:
            pictures.insert(0, self._zoomed(first, orders))
        return Section(title, pictures=pictures)

    def _maps(
        self, layers: Sequence[LayerMaps], number: int, average: str, orders: Sequence[Sequence[int]], reading: str
    ) -> Picture:
        row, column = layers[0].query
        where = f"query pixel in row {row + 1:.0f}, column {column + 1:.0f}{average}"
        return self._save(
            draw_attention_maps(layers, title=f"{self.label}: attention of the {where}", orders=orders),
            f"figure-{number:02d}-attention",
            alt=f"Attention maps of the {where}. {_peaks(layers)}",
            caption=f"Attention probabilities of every head (columns) in every layer (rows){average}. {reading}",
        )

    def _zoomed(self, layers: Sequence[LayerMaps], orders: Sequence[Sequence[int]]) -> Picture:
        title = f"{self.label}: attention within {ZOOM} x {ZOOM} pixels of the query"
        return self._save(
            draw_attention_maps(layers, title=title, zoom=ZOOM, orders=orders),
            "figure-05-attention",
            alt=f"Attention maps near the query pixel. {_peaks(layers)}",
            caption=f"The {ZOOM} x {ZOOM} pixels around the query, as Figure 5 of the paper. A head on one pixel is "
            "one position of a convolution's kernel; a blank map belongs to a head that attends further away.",
        )

    def _save(self, figure: Figure, stem: str, *, alt: str, caption: str) -> Picture:
        return Picture.saved(figure, self.folder / stem, alt=alt, caption=caption)


def sections_of(run: RunFolder, folder: Path) -> list[Section]:
    """The parts of the report that apply to the run's model; their figures are written to a folder.

    Raises:
        ValueError: No epoch of the run is complete, or its files are not legal.
        OSError: A figure cannot be written.
    """
    settings, name = run.settings(), run_name(run)
    label = name if settings.preset in name else f"{name} ({settings.preset})"
    figures = RunFigures(run, label, folder)
    sections = [figures.accuracy()]
    if isinstance(settings.model, AttentionSettings):
        history = heads_of(run)
        if history:
            sections += [figures.centres(history), figures.movement(history)]
        sections.append(figures.attention())
    return sections


def _words(heads: HeadGaussians) -> str:
    distances = np.linalg.norm(heads.centres, axis=1)
    distances = distances[np.isfinite(distances)]
    count = f"{heads.count} {'head' if heads.count == 1 else 'heads'}"
    if not len(distances):
        return f"{count}, none with a finite centre"
    return f"{count}, centres {distances.min():.1f} to {distances.max():.1f} pixels from the query"


def _peaks(layers: Sequence[LayerMaps]) -> str:
    """Largest probabilities of each layer's heads."""
    parts = []
    for layer in layers:
        peaks = layer.maps.max((1, 2))
        least, most = float(np.nanmin(peaks)), float(np.nanmax(peaks))
        parts.append(f"{layer.title.capitalize()}: largest probabilities {least:.1%} to {most:.1%}.")
    return " ".join(parts)
