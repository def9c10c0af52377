"""Report of a run: `index.html`, and figures numbered as in the paper, such as `figures/figure-02-accuracy.png`."""

import shlex
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from attnconv._util.settings import plain
from attnconv.models.presets import PRESETS
from attnconv.models.settings import ResNetSettings
from attnconv.report.accuracy_curves import draw_accuracy
from attnconv.report.attention_maps import draw_query
from attnconv.report.figure_style import UNIFORM, nearly_uniform
from attnconv.report.head_centres import HeadGaussians, draw_centres, draw_centres_over_training
from attnconv.report.html_page import FigureFolder, Page, Section, render
from attnconv.report.run_data import PAPER_LAYER, ZOOM, History, RunData
from attnconv.training.run_folder import RunFolder, write_text
from attnconv.training.settings import RunSettings

_APART = ("format", "settings", "command", "versions")  # entries of `settings.json` not listed under Environment


def write_report(run_dir: str | Path, out_dir: str | Path | None = None, *, publication: bool = False) -> Path:
    """Write the report of a run that has completed at least one epoch.

    Heads are shown after the last complete epoch. Attention that depends on the image is averaged over the first 100
    test images, which are read from the run's data folder and never downloaded.

    Args:
        run_dir: The run folder.
        out_dir: Output folder; None for `report` in the run folder. An earlier report in it is replaced.
        publication: Also write the figures as PDF, omit their titles, and keep the text in SVG files editable.

    Returns:
        The path of the page, `index.html`.

    Raises:
        ValueError: If the folder contains no run, no epoch is complete, or a file is invalid.
        OSError: If the report cannot be written.
    """
    folder = RunFolder(Path(run_dir))
    run = RunData(folder.path.resolve().name, folder)  # resolved, so that the path `.` has a name
    record, groups, notes = folder.record(), plain(run.settings).items(), []
    versions = record.get("versions")
    origin = dict(versions) if isinstance(versions, Mapping) else {}
    origin |= {name: value for name, value in record.items() if name not in _APART}
    out = folder.report if out_dir is None else Path(out_dir)
    if not run.result:
        epoch = max((line["epoch"] for line in folder.metrics()), default=0)
        notes = [f"The run is not complete. The report shows it after epoch {epoch} of {run.settings.train.epochs}."]
    page = Page(
        title=run.name,
        lead=_lead(run.settings),
        facts=_facts(run),
        sections=_sections(run, FigureFolder(out / "figures", publication)),
        tables=[(group, _rows(values)) for group, values in groups if isinstance(values, Mapping)],
        origin=[*_rows(origin), ("figures", f"matplotlib {matplotlib.__version__}")],
        command=shlex.join(str(word) for word in record.get("command") or ()),
        notes=notes,
    )
    path = out / "index.html"
    write_text(path, render(page))
    return path


def _epochs(settings: RunSettings) -> str:
    return "1 epoch" if settings.train.epochs == 1 else f"{settings.train.epochs} epochs"


def _lead(settings: RunSettings) -> str:
    epochs = _epochs(settings)
    known, model = PRESETS.get(settings.preset), plain(settings.model)
    before = model if known is None else plain(known)
    changes = _rows({name: value for name, value in model.items() if before.get(name) != value})
    changed = f" with {', '.join(map(' '.join, changes))}" if changes else ""
    return f"Preset {settings.preset}{changed}, trained on {settings.data.name} for {epochs}."


def _facts(run: RunData) -> list[tuple[str, str, str]]:
    """Return the numbers at the top, for the epoch chosen on validation images or, without these, the last epoch."""
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
    time, epochs = str(timedelta(seconds=round(result["seconds"]))), _epochs(run.settings)
    return [*facts, ("Parameters", f"{result['parameters']:,}", ""), ("Training time (h:min:s)", time, epochs)]


def _rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(str(name).replace("_", " "), str(value)) for name, value in values.items()]


def _sections(run: RunData, figures: FigureFolder) -> list[Section]:
    """Return the sections that apply to the run's model, and write their figures."""
    preset = run.settings.preset
    label = run.name if preset in run.name else f"{run.name} ({preset})"
    curves = run.curves()
    words = "; ".join(f"{curve.split} {curve.last:.1%} after epoch {curve.epochs[-1]:.0f}" for curve in curves)
    picture = figures.add(
        draw_accuracy(curves, title=f"{label}: accuracy"),
        "figure-02-accuracy",
        alt=f"Accuracy. {words}.",
        caption="Share of images classified correctly after each epoch, as in Figure 2 of the paper. Training accuracy "
        "is measured during the epoch, while the weights change, on augmented images.",
    )
    sections = [Section("Accuracy", pictures=[picture])]
    if not isinstance(run.settings.model, ResNetSettings):
        if history := run.history():
            sections += _heads(run, history, label, figures)
        sections.append(_attention(run, label, figures))
    return sections


def _heads(run: RunData, history: History, label: str, figures: FigureFolder) -> list[Section]:
    """Draw Figures 4, 12 and 14, and Figure 3 for every layer, the paper's layer first."""
    epoch, layers = history[0][-1][0], [epochs[-1][1] for epochs in history]
    words = " ".join(f"Layer {number}: {_words(heads)}." for number, heads in enumerate(layers))
    centres = figures.add(
        draw_centres(layers, title=f"{label}: heads after epoch {epoch}", sizes=run.positions),
        "figure-04-centres",
        alt=f"Head centres by layer. {words}",
        caption="Each mark is the centre of one head's attention, as a shift from the query. Contours enclose 50 % and "
        "90 % of its attention. Heads that attend to single positions around the query act like the taps of a "
        f"convolution kernel. See Figures 4, 12 and 14 of the paper. Layers and heads are numbered from 0.{run.unit}",
    )
    pictures = []
    for number, epochs in enumerate(history):
        (first, start), (last, end) = epochs[0], epochs[-1]
        title = f"heads of layer {number} during training"
        picture = figures.add(
            draw_centres_over_training(epochs, title=f"{label}: {title}", sizes=run.positions),
            f"figure-03-centres-over-training-layer-{number}",
            alt=f"{title.capitalize()}. After epoch {first}: {_words(start)}. After epoch {last}: {_words(end)}.",
            caption=f"The heads of layer {number} from the initial weights (epoch 0) to the last epoch, at the same "
            f"scale. In Figure 3 of the paper, nine heads settle on a grid of positions around the query.{run.unit}",
        )
        pictures.append(picture)
    shown = pictures.pop(min(PAPER_LAYER, len(pictures) - 1))
    moved = Section("How the heads moved", pictures=[shown], folded=pictures, fold="The other layers")
    return [Section("Where the heads attend", pictures=[centres]), moved]


def _words(heads: HeadGaussians) -> str:
    """Describe a layer's heads, for example `9 heads, centres 0.1 to 3.2 positions from the query`."""
    distances = np.linalg.norm(heads.centres[np.isfinite(heads.centres).all(1)], axis=1)
    count = "1 head" if len(heads.centres) == 1 else f"{len(heads.centres)} heads"
    if not len(distances):
        return f"{count}, none with a finite centre"
    return f"{count}, centres {distances.min():.1f} to {distances.max():.1f} positions from the query"


def _attention(run: RunData, label: str, figures: FigureFolder) -> Section:
    """Draw Figures 6 and 7 and, for attention that depends only on positions, Figure 5."""
    heading = "Attention of every head"
    if not run.folder.last_weights.is_file():
        return Section(heading, notes=["The run has not written any weights yet."])
    try:
        count = len(run.images)
    except (OSError, ValueError) as error:
        note = "The attention of this model depends on the image, but the test images could not be read: "
        return Section(heading, notes=[f"{note}{error}"])
    average = f", mean of {count} test images" if count > 1 else ""
    every = f"Attention probabilities of every head (columns) in every layer (rows){average}. All indices are from 0."
    moves = "the pattern of a head that acts like a convolution moves with the query."
    shown: list[tuple[int, int | None, str]] = [  # query, zoom, caption
        (0, None, f"{every} See Figure 6 of the paper."),
        (1, None, f"{every} See Figure 7 of the paper. Each head is in the same column as above: {moves}"),
    ]
    if not average and max(max(layer.maps.shape[2:]) for layer in run.maps) > ZOOM:
        caption = (
            f"The {ZOOM} x {ZOOM} positions around the query; see Figure 5 of the paper. A head that attends to one "
            "position acts like one tap of a convolution kernel. A blank map means that the head attends elsewhere."
        )
        shown.insert(0, (0, ZOOM, caption))
    pictures = []
    for index, zoom, caption in shown:
        row, column = run.maps[0].positions[index]
        what = f"attention of the query in row {row:.0f}, column {column:.0f}{average}"
        if zoom:
            what = f"attention within {zoom} x {zoom} positions around the query"
        peaks = [layer.maps[index].amax((1, 2)).tolist() for layer in run.maps]
        words = " ".join(
            f"Layer {number}: largest probabilities {np.nanmin(peak):.1%} to {np.nanmax(peak):.1%}."
            for number, peak in enumerate(peaks)
        )
        uniform = [
            f"layer {number}, head {head}"
            for number, (layer, row) in enumerate(zip(run.maps, peaks, strict=True))
            for head, largest in enumerate(row)
            if nearly_uniform(largest, layer.maps[index, head].numel())
        ]
        if uniform:
            requirement = f"all probabilities below {UNIFORM} / number of positions"
            caption += f" Nearly uniform heads ({requirement}): {'; '.join(uniform)}."
        figure = draw_query(run.maps, index, title=f"{label}: {what}", zoom=zoom)
        name = f"figure-{5 if zoom else 6 + index:02d}-attention"
        pictures.append(figures.add(figure, name, alt=f"{what.capitalize()}. {words}", caption=f"{caption}{run.unit}"))
    return Section(heading, pictures=pictures)
