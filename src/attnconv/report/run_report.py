"""The report of a run: its figures as PNG and SVG, and one HTML page that holds everything.

    RUN/report/index.html
    RUN/report/figures/figure-02-accuracy.png, .svg
                       figure-03-centres-over-training-layer-1.png, ...
                       figure-04-centres.png, figure-05-attention.png, ...

The numbers are those of the paper's figures. A model without attention has only the first.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

from attnconv.models.presets import PRESETS
from attnconv.models.settings import to_dict
from attnconv.report.html_page import Fact, Page, render
from attnconv.report.run_data import run_name
from attnconv.report.run_figures import sections_of
from attnconv.training.run_folder import RunFolder, write_text
from attnconv.training.settings import RunSettings
from attnconv.training.settings_json import to_plain


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
    groups = to_plain(settings).items()
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
    known = PRESETS.get(settings.preset)
    before = {} if known is None else to_dict(known)
    changes = [f"{name} {value}" for name, value in _rows(to_dict(settings.model), unlike=before)] if before else []
    changed = f" with {', '.join(changes)}" if changes else ""
    return f"Preset {settings.preset}{changed}, trained on {settings.data.name} for {epochs}."


def _progress(run: RunFolder, settings: RunSettings) -> list[str]:
    if run.result() is not None:
        return []
    epoch = max(line["epoch"] for line in run.metrics())
    return [f"The run is not complete: this is what it was after epoch {epoch} of {settings.train.epochs}."]


def _facts(run: RunFolder, settings: RunSettings) -> list[Fact]:
    """The numbers at the top: of the epoch that was chosen on validation images, else of the last."""
    result = run.result()
    if result is None:
        last = {line["split"]: line for line in run.metrics()}
        return [
            Fact(f"{split.capitalize()} accuracy", f"{line['accuracy']:.2%}", f"after epoch {line['epoch']}")
            for split, line in last.items()
        ]
    facts = []
    chosen, final = result.get("best"), result["last"]
    shown = final if chosen is None else chosen
    for split, label in (("test", "Test accuracy"), ("validation", "Validation accuracy")):
        if split not in shown:
            continue
        images = f"{shown[split]['images']:,} images"
        aside = f"{images}, epoch {shown['epoch']}"
        if chosen is not None and chosen["epoch"] != final["epoch"]:
            aside += f", chosen on held-out images. Last epoch: {final[split]['accuracy']:.2%}"
        facts.append(Fact(label, f"{shown[split]['accuracy']:.2%}", aside))
    facts.append(Fact("Parameters", f"{result['parameters']:,}"))
    facts.append(Fact("Training time", _duration(float(result["seconds"])), f"{settings.train.epochs} epochs"))
    return facts


def _duration(seconds: float) -> str:
    """A time in its two largest units: `2 h 5 min`, `3 min 20 s`, `8.2 s`.

    Example:
        >>> _duration(7500), _duration(199.6), _duration(8.24)
        ('2 h 5 min', '3 min 20 s', '8.2 s')
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def _origin(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Versions, commit, device and whatever else `settings.json` records."""
    apart = ("format", "settings", "command", "versions")
    versions = record.get("versions")
    rows = _rows(versions) if isinstance(versions, Mapping) else []
    rows += _rows({name: value for name, value in record.items() if name not in apart})
    return [*rows, ("drawn with", f"matplotlib {matplotlib.__version__}")]


def _rows(values: Mapping[str, Any], *, unlike: Mapping[str, Any] | None = None) -> list[tuple[str, str]]:
    """Names and values as text; with `unlike`, only values that differ from the ones there."""
    return [
        (str(name).replace("_", " "), _plain(value))
        for name, value in values.items()
        if unlike is None or unlike.get(name) != value
    ]


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value) or "none"
    return str(value)
