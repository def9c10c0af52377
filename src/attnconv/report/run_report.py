"""The report of a run: `index.html` and its figures, numbered as in the paper (`figures/figure-02-accuracy.png`)."""

import shlex
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from attnconv._util.settings import plain
from attnconv.models.presets import PRESETS
from attnconv.models.settings import AttentionSettings
from attnconv.report.accuracy_curves import draw_accuracy
from attnconv.report.attention_maps import draw_query
from attnconv.report.head_centres import HeadGaussians, draw_centres, draw_centres_over_training
from attnconv.report.html_page import Page, Picture, Section, render
from attnconv.report.run_data import PAPER_LAYER, ZOOM, History, RunData
from attnconv.training.run_folder import RunFolder, write_text
from attnconv.training.settings import RunSettings

_APART = ("format", "settings", "command", "versions")  # entries of `settings.json` with a place of their own, or none


def write_report(run_dir: str | Path, out_dir: str | Path | None = None) -> Path:
    """Write the report of a run that has completed at least one epoch.

    The heads are shown as they were after the last complete epoch. Attention that depends on the images is averaged
    over the first 100 test images, read from where the run found them; nothing is downloaded.

    Args:
        run_dir: The run's folder.
        out_dir: Where to write; None means `report` in the run's folder. An older report is replaced.

    Returns:
        The page, `index.html`.

    Raises:
        ValueError: The folder holds no run, a run without a complete epoch, or invalid files.
        OSError: The report cannot be written.
    """
    folder = RunFolder(Path(run_dir))
    run = RunData(folder.path.resolve().name, folder)  # also the path `.` has a name
    record, groups, notes = folder.record(), plain(run.settings).items(), []
    versions = record.get("versions")
    origin = dict(versions) if isinstance(versions, Mapping) else {}
    origin |= {name: value for name, value in record.items() if name not in _APART}
    out = folder.report if out_dir is None else Path(out_dir)
    if not run.result:
        epoch = max((line["epoch"] for line in folder.metrics()), default=0)
        notes = [f"The run is not complete: this is what it was after epoch {epoch} of {run.settings.train.epochs}."]
    page = Page(
        title=run.name,
        lead=_lead(run.settings),
        facts=_facts(run),
        sections=_sections(run, out / "figures"),
        tables=[(group, _rows(values)) for group, values in groups if isinstance(values, Mapping)],
        origin=[*_rows(origin), ("drawn with", f"matplotlib {matplotlib.__version__}")],
        command=shlex.join(str(word) for word in record.get("command") or ()),
        notes=notes,
    )
    path = out / "index.html"
    write_text(path, render(page))
    return path


def _lead(settings: RunSettings) -> str:
    epochs = "1 epoch" if settings.train.epochs == 1 else f"{settings.train.epochs} epochs"
    known, model = PRESETS.get(settings.preset), plain(settings.model)
    before = model if known is None else plain(known)
    changes = _rows({name: value for name, value in model.items() if before.get(name) != value})
    changed = f" with {', '.join(map(' '.join, changes))}" if changes else ""
    return f"Preset {settings.preset}{changed}, trained on {settings.data.name} for {epochs}."


def _facts(run: RunData) -> list[tuple[str, str, str]]:
    """The numbers at the top: of the epoch chosen on validation images, else of the last."""
    result = run.result
    if not result:
        last = {line["split"]: line for line in run.folder.metrics()}
        return [
            (f"{split.capitalize()} accuracy", f"{line['accuracy']:.2%}", f"after epoch {line['epoch']}")
            for split, line in last.items()
        ]
    facts, final = [], result["last"]
    chosen = result.get("best") or final
    for split in ("test", "validation"):
        if split in chosen:
            aside = f"{chosen[split]['images']:,} images, epoch {chosen['epoch']}"
            if chosen["epoch"] != final["epoch"]:
                aside += f", chosen on validation images. Last epoch: {final[split]['accuracy']:.2%}"
            facts.append((f"{split.capitalize()} accuracy", f"{chosen[split]['accuracy']:.2%}", aside))
    time = str(timedelta(seconds=round(result["seconds"])))
    return [
        *facts,
        ("Parameters", f"{result['parameters']:,}", ""),
        ("Training time (h:min:s)", time, f"{run.settings.train.epochs} epochs"),
    ]


def _rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(str(name).replace("_", " "), str(value)) for name, value in values.items()]


def _sections(run: RunData, folder: Path) -> list[Section]:
    """The sections that apply to the run's model; their figures are written to a folder."""
    preset = run.settings.preset
    label = run.name if preset in run.name else f"{run.name} ({preset})"
    curves = run.curves()
    words = "; ".join(f"{curve.split} {curve.last:.1%} after epoch {curve.epochs[-1]:.0f}" for curve in curves)
    picture = Picture.saved(
        draw_accuracy(curves, title=f"{label}: accuracy"),
        folder / "figure-02-accuracy",
        alt=f"Accuracy. {words}.",
        caption="Part of the images classified correctly after each epoch, as in Figure 2 of the paper. Training "
        "accuracy is measured on augmented images while the weights still change.",
    )
    sections = [Section("Accuracy", pictures=[picture])]
    if isinstance(run.settings.model, AttentionSettings):
        if history := run.history():
            sections += _heads(history, run.positions, label, folder)
        sections.append(_attention(run, label, folder))
    return sections


def _heads(history: History, sizes: tuple[int, int], label: str, folder: Path) -> list[Section]:
    """Figures 4, 12 and 14, and Figure 3 for every layer, the paper's layer first."""
    epoch, layers = history[0][-1][0], [epochs[-1][1] for epochs in history]
    words = " ".join(f"Layer {number}: {_words(heads)}." for number, heads in enumerate(layers, start=1))
    picture = Picture.saved(
        draw_centres(layers, title=f"{label}: heads after epoch {epoch}", sizes=sizes),
        folder / "figure-04-centres",
        alt=f"Head centres per layer. {words}",
        caption="Each colour and mark is one head of a layer: the centre of its attention as a shift from the query "
        "pixel, with the contours that hold 50% and 90% of its mass. Heads on single pixels around the query act as "
        "the positions of a convolution's kernel. As Figures 4, 12 and 14 of the paper.",
    )
    sections = [Section("Where the heads attend", pictures=[picture])]
    pictures = []
    for number, epochs in enumerate(history, start=1):
        (first, start), (last, end) = epochs[0], epochs[-1]
        title = f"heads of layer {number} during training"
        picture = Picture.saved(
            draw_centres_over_training(epochs, title=f"{label}: {title}", sizes=sizes),
            folder / f"figure-03-centres-over-training-layer-{number}",
            alt=f"{title.capitalize()}. After epoch {first}: {_words(start)}. After epoch {last}: {_words(end)}.",
            caption=f"The heads of layer {number} from their random start (epoch 0) to the end, all at one scale. "
            "As Figure 3 of the paper, where nine heads settle on a grid of pixels around the query.",
        )
        pictures.append(picture)
    shown = pictures.pop(min(PAPER_LAYER, len(pictures)) - 1)
    return [*sections, Section("How the heads moved", pictures=[shown], folded=pictures, fold="The other layers")]


def _words(heads: HeadGaussians) -> str:
    """Description of a layer's heads: `9 heads, centres 0.1 to 3.2 pixels from the query`."""
    distances = np.linalg.norm(heads.centres[np.isfinite(heads.centres).all(1)], axis=1)
    count = "1 head" if len(heads.centres) == 1 else f"{len(heads.centres)} heads"
    if not len(distances):
        return f"{count}, none with a finite centre"
    return f"{count}, centres {distances.min():.1f} to {distances.max():.1f} pixels from the query"


def _attention(run: RunData, label: str, folder: Path) -> Section:
    """Figures 5, 6 and 7: both queries, and the pixels around the first where nothing is averaged over images."""
    heading = "Attention of every head"
    if not run.folder.last_weights.is_file():
        return Section(heading, notes=["The run has not written any weights yet, so there is nothing to show here."])
    try:
        count = len(run.images)
    except (OSError, ValueError) as error:
        note = "This model's attention depends on the images, and the test images could not be read: "
        return Section(heading, notes=[f"{note}{error}"])
    average = f", mean of {count} test images" if count > 1 else ""
    every = f"Attention probabilities of every head (columns) in every layer (rows){average}."
    shown: list[tuple[int, int | None, str]] = [  # query, zoom, caption
        (0, None, f"{every} As Figure 6 of the paper."),
        (
            1,
            None,
            f"{every} As Figure 7, with every head in the same column as above: one that works like a convolution "
            "keeps its pattern and moves with the query.",
        ),
    ]
    if not average and max(max(layer.maps.shape[2:]) for layer in run.maps) > ZOOM:
        caption = (
            f"The {ZOOM} x {ZOOM} pixels around the query, as Figure 5 of the paper. A head on one pixel is one "
            "position of a convolution's kernel; a blank map belongs to a head that attends further away."
        )
        shown.insert(0, (0, ZOOM, caption))
    pictures = []
    for index, zoom, caption in shown:
        row, column = run.maps[0].positions[index]
        what = f"attention of the query pixel in row {row + 1:.0f}, column {column + 1:.0f}{average}"
        if zoom:
            what = f"attention within {zoom} x {zoom} pixels of the query"
        peaks = " ".join(
            f"Layer {number}: largest probabilities {np.nanmin(peak):.1%} to {np.nanmax(peak):.1%}."
            for number, peak in enumerate((layer.maps[index].amax((1, 2)).numpy() for layer in run.maps), start=1)
        )
        figure = draw_query(run.maps, index, title=f"{label}: {what}", zoom=zoom)
        stem = folder / f"figure-{5 if zoom else 6 + index:02d}-attention"
        pictures.append(Picture.saved(figure, stem, alt=f"{what.capitalize()}. {peaks}", caption=caption))
    return Section(heading, pictures=pictures)
