"""All figures that apply to one run, drawn and saved, with their alternative texts and captions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from attnconv.inspect.query_maps import QueryMaps, mean_query_maps
from attnconv.models.model_loader import load as load_model
from attnconv.models.settings import AttentionSettings
from attnconv.report.accuracy_curves import draw_accuracy
from attnconv.report.attention_maps import draw_attention_maps, maps_of_query, reading_order
from attnconv.report.head_centres import HeadGaussians, draw_centres, draw_centres_over_training
from attnconv.report.html_page import Picture, Section
from attnconv.report.run_data import curves_of, heads_of, images_for, positions_of, run_name
from attnconv.training.run_folder import RunFolder

PLACES = ((0.5, 0.5), (0.25, 0.75))  # the two queries of Figures 6 and 7, as parts of height and width
ZOOM = 7  # pixels, as in Figure 5
PAPER_LAYER = 4  # the layer of Figure 3

History = dict[str, list[tuple[int, HeadGaussians]]]


@dataclass(frozen=True)
class RunFigures:
    """Draws the figures of one run into one folder; `label` is the run's name in titles."""

    run: RunFolder
    label: str
    folder: Path

    def accuracy(self) -> Section:
        """Figure 2."""
        curves = curves_of(self.run)
        words = "; ".join(f"{curve.split} {curve.last:.1%} after epoch {curve.epochs[-1]:.0f}" for curve in curves)
        picture = Picture.saved(
            draw_accuracy(curves, title=f"{self.label}: accuracy"),
            self.folder / "figure-02-accuracy",
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
        picture = Picture.saved(
            draw_centres(layers, title=f"{self.label}: heads after epoch {epoch}", sizes=positions_of(self.run)),
            self.folder / "figure-04-centres",
            alt=f"Head centres per layer. {words}",
            caption="Each colour and mark is one head of a layer: the centre of its attention as a shift from the "
            "query pixel, with the contours that hold 50% and 90% of its mass. Heads on single pixels around the query "
            "act as the positions of a convolution's kernel. As Figures 4, 12 and 14 of the paper.",
        )
        return Section("Where the heads attend", pictures=[picture])

    def movement(self, history: History) -> Section:
        """Figure 3, for every layer; the paper's layer first."""
        pictures, sizes = [], positions_of(self.run)
        for number, epochs in enumerate(history.values(), start=1):
            (first, start), (last, end) = epochs[0], epochs[-1]
            title = f"heads of layer {number} during training"
            picture = Picture.saved(
                draw_centres_over_training(epochs, title=f"{self.label}: {title}", sizes=sizes),
                self.folder / f"figure-03-centres-over-training-layer-{number}",
                alt=f"{title.capitalize()}. After epoch {first}: {_words(start)}. After epoch {last}: {_words(end)}.",
                caption=f"The heads of layer {number} from their random start (epoch 0) to the end, all at one scale. "
                "As Figure 3 of the paper, where nine heads settle on a grid of pixels around the query.",
            )
            pictures.append(picture)
        shown = pictures.pop(min(PAPER_LAYER, len(pictures)) - 1)
        return Section("How the heads moved", pictures=[shown], folded=pictures, fold="The other layers")

    def attention(self) -> Section:
        """Figures 5, 6 and 7."""
        section = Section("Attention of every head")
        if not self.run.last_weights.is_file():
            return replace(
                section, notes=["The run has not written any weights yet, so there is nothing to show here."]
            )
        loaded = load_model(self.run.last_weights)
        try:
            images, content = images_for(self.run, loaded)
        except (OSError, ValueError) as error:
            note = "This model's attention depends on the images, and the test images could not be read: "
            return replace(section, notes=[f"{note}{error}"])
        layers = mean_query_maps(loaded.model, images, places=PLACES)
        average = f", mean of {len(images)} test images" if content else ""
        every = f"Attention probabilities of every head (columns) in every layer (rows){average}."
        captions = (
            f"{every} As Figure 6 of the paper.",
            f"{every} As Figure 7, with every head in the same column as above: one that works like a convolution "
            "keeps its pattern and moves with the query.",
        )
        pictures = []
        for index, caption in enumerate(captions):
            row, column = layers[0].positions[index]
            what = f"attention of the query pixel in row {row + 1:.0f}, column {column + 1:.0f}{average}"
            pictures.append(self._maps(layers, index, 6 + index, what, caption))
        if not content and max(max(layer.maps.shape[2:]) for layer in layers) > ZOOM:
            what = f"attention within {ZOOM} x {ZOOM} pixels of the query"
            caption = (
                f"The {ZOOM} x {ZOOM} pixels around the query, as Figure 5 of the paper. A head on one pixel is one "
                "position of a convolution's kernel; a blank map belongs to a head that attends further away."
            )
            pictures.insert(0, self._maps(layers, 0, 5, what, caption, zoom=ZOOM))
        return replace(section, pictures=pictures)

    def _maps(
        self, layers: Sequence[QueryMaps], index: int, number: int, what: str, caption: str, *, zoom: int | None = None
    ) -> Picture:
        """Figure `number`, of the query with an index; heads have the order of the first query."""
        maps = maps_of_query(layers, index)
        orders = [reading_order(layer.maps[0].numpy()) for layer in layers]
        peaks = " ".join(
            f"{layer.title.capitalize()}: largest probabilities {np.nanmin(peak):.1%} to {np.nanmax(peak):.1%}."
            for layer, peak in zip(maps, (layer.maps.max((1, 2)) for layer in maps), strict=True)
        )
        return Picture.saved(
            draw_attention_maps(maps, title=f"{self.label}: {what}", zoom=zoom, orders=orders),
            self.folder / f"figure-{number:02d}-attention",
            alt=f"{what.capitalize()}. {peaks}",
            caption=caption,
        )


def sections_of(run: RunFolder, folder: Path) -> list[Section]:
    """The sections of the report that apply to the run's model; their figures are written to a folder."""
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
    """Description of a layer's heads: `9 heads, centres 0.1 to 3.2 pixels from the query`."""
    distances = np.linalg.norm(heads.centres[np.isfinite(heads.centres).all(1)], axis=1)
    count = "1 head" if len(heads.centres) == 1 else f"{len(heads.centres)} heads"
    if not len(distances):
        return f"{count}, none with a finite centre"
    return f"{count}, centres {distances.min():.1f} to {distances.max():.1f} pixels from the query"
