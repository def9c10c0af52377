"""The report of a run: `index.html` and its figures, numbered as in the paper (`figures/figure-02-accuracy.png`)."""

import shlex
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import matplotlib

from attnconv._util.settings import plain
from attnconv.models.presets import PRESETS
from attnconv.report.html_page import Fact, Page, render
from attnconv.report.run_data import run_name
from attnconv.report.run_figures import sections_of
from attnconv.training.run_folder import RunFolder, write_text
from attnconv.training.settings import RunSettings


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
    run = RunFolder(Path(run_dir))
    settings, record = run.settings(), run.record()
    out = run.report if out_dir is None else Path(out_dir)
    groups = plain(settings).items()
    page = Page(
        title=run_name(run),
        lead=_lead(settings),
        facts=_facts(run, settings),
        sections=sections_of(run, out / "figures"),
        tables=[(group, _rows(values)) for group, values in groups if isinstance(values, Mapping)],
        origin=_origin(record),
        command=shlex.join(str(word) for word in record.get("command") or ()),
        notes=_progress(run, settings),
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


def _progress(run: RunFolder, settings: RunSettings) -> list[str]:
    if run.result() is not None:
        return []
    epoch = max(line["epoch"] for line in run.metrics())
    return [f"The run is not complete: this is what it was after epoch {epoch} of {settings.train.epochs}."]


def _facts(run: RunFolder, settings: RunSettings) -> list[Fact]:
    """The numbers at the top: of the epoch chosen on validation images, else of the last."""
    result = run.result()
    if result is None:
        last = {line["split"]: line for line in run.metrics()}
        return [
            Fact(f"{split.capitalize()} accuracy", f"{line['accuracy']:.2%}", f"after epoch {line['epoch']}")
            for split, line in last.items()
        ]
    facts, final = [], result["last"]
    chosen = result.get("best") or final
    for split in ("test", "validation"):
        if split in chosen:
            aside = f"{chosen[split]['images']:,} images, epoch {chosen['epoch']}"
            if chosen["epoch"] != final["epoch"]:
                aside += f", chosen on validation images. Last epoch: {final[split]['accuracy']:.2%}"
            facts.append(Fact(f"{split.capitalize()} accuracy", f"{chosen[split]['accuracy']:.2%}", aside))
    time = timedelta(seconds=round(result["seconds"]))
    return [
        *facts,
        Fact("Parameters", f"{result['parameters']:,}"),
        Fact("Training time (h:min:s)", str(time), f"{settings.train.epochs} epochs"),
    ]


def _origin(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Versions, commit, device and the other entries of `settings.json`."""
    apart = ("format", "settings", "command", "versions")
    versions = record.get("versions")
    rows = _rows(versions) if isinstance(versions, Mapping) else []
    rows += _rows({name: value for name, value in record.items() if name not in apart})
    return [*rows, ("drawn with", f"matplotlib {matplotlib.__version__}")]


def _rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(str(name).replace("_", " "), str(value)) for name, value in values.items()]
