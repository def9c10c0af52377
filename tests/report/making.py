"""Run folders as training writes them, without training, and the texts of a figure."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from attnconv.models.checkpoint import save_weights
from attnconv.models.classifiers import build
from attnconv.models.settings import AttentionSettings, ModelSettings, ResNetSettings
from attnconv.training.recipes import recipe
from attnconv.training.run_folder import RunFolder, append_line, write_json
from attnconv.training.run_recorder import head_record
from attnconv.training.settings import RunSettings

SMALL = AttentionSettings(
    layers=2, heads=4, width=8, mlp_width=8, downsampling=1, max_shift=7, image_size=8, image_channels=1, norm="pre"
)
SMALL_RESNET = ResNetSettings(widths=(4,), blocks=(1,), image_size=8, image_channels=1)


def settings_of(model: ModelSettings, *, epochs: int = 3, seed: int = 42) -> RunSettings:
    settings = recipe("quadratic-digits")
    return replace(settings, model=model, train=replace(settings.train, epochs=epochs, seed=seed))


def make_run(
    path: Path, model: ModelSettings = SMALL, *, epochs: int = 3, complete: bool = True, seed: int = 42, **record: Any
) -> RunFolder:
    """Write a run of `epochs` epochs whose heads move by a step each; `record` is written to settings.json."""
    run, settings = RunFolder(path), settings_of(model, seed=seed)
    environment = {"versions": {"attnconv": "0.1.0", "torch": "2"}, "commit": None, "device": "cpu: a processor"}
    run.begin(settings, {**environment, "command": ["attnconv", "train", "quadratic-digits"], **record})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.train.seed)  # as at the start of training
        network = build(model)
    append_line(run.heads_file, head_record(network, 0))
    for epoch in range(1, epochs + 1):
        for split, accuracy in (("train", 0.2 * epoch), ("validation", 0.25 * epoch)):
            line = {"step": 10 * epoch, "epoch": epoch, "split": split, "loss": 1.0, "accuracy": accuracy}
            append_line(run.metrics_file, {**line, "lr": 0.1, "seconds": 2.0 * epoch})
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if name.endswith("centres"):
                    parameter.mul_(0.8)
        append_line(run.heads_file, head_record(network, epoch))
    save_weights(
        run.last_weights, network, model, mean=(0.5,) * model.image_channels, std=(0.25,) * model.image_channels
    )
    if complete:
        score = {"loss": 0.5, "accuracy": 0.8125, "images": 360}
        final = {"epoch": epochs, "validation": {**score, "images": 200}, "test": score}
        chosen = {**final, "epoch": epochs - 1, "test": {**score, "accuracy": 0.875}}
        write_json(run.result_file, {"seconds": 7385.0, "parameters": 4321, "last": final, "best": chosen})
    return run


@lru_cache(maxsize=1)  # laying out a figure is slow, and two functions need it
def text_boxes(figure: Figure) -> list[tuple[str, Bbox]]:
    """Return every visible text of a finished figure and its bounding box in pixels."""
    canvas = FigureCanvasAgg(figure)
    figure.draw_without_rendering()  # computes the layout
    texts: list[Any] = figure.findobj(Text)
    off = {label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for label in _beyond(axis)}
    shown = [text for text in texts if text.get_visible() and text.get_text().strip() and text not in off]
    return [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in shown]  # type: ignore[no-untyped-call]


def _beyond(axis: Axis) -> list[Text]:
    """Return tick labels outside the limits of an axis: they exist, but are not drawn."""
    low, high = sorted(axis.get_view_interval())
    return [tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high]


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Return pairs of texts that overlap by more than a tenth of their size."""
    texts = [text for text, _ in text_boxes(figure)]
    corners = np.array([box.shrunk(0.9, 0.9).get_points() for _, box in text_boxes(figure)]).reshape(-1, 2, 2)
    low, high = corners[:, 0], corners[:, 1]
    meet = ((low[:, None] <= high) & (low <= high[:, None])).all(-1)  # along both axes
    return [(texts[one], texts[other]) for one, other in np.argwhere(np.triu(meet, 1))]


def outside(figure: Figure) -> list[str]:
    """Return texts that are cut off at the edge of the figure."""
    page = figure.bbox.padded(1.0)
    return [text for text, box in text_boxes(figure) if not (page.contains(*box.min) and page.contains(*box.max))]
