"""Report of the reproduction: the paper's Figures 1 to 14 and Tables 1 to 4, with its numbers and those of the runs.

    OUT/index.html, README.md         all figures and tables on one page, as HTML and as Markdown
    OUT/figures/figure-01.png, .svg   ... figure-14
    OUT/tables/table-1.md, .json      ... table-4; trainings (last and chosen epoch, time, device); counts (exact model
                                      sizes); fixed-shifts (claim of Figure 6); observations and observations-by-layer
                                      (the paper's claims and verdicts)

Both pages list the missing results and the commands that produce them.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from attnconv._util.errors import bad
from attnconv.inspect.auditing import json_values
from attnconv.models.settings import AttentionSettings
from attnconv.paper import tables
from attnconv.paper.figures import CAPTIONS, FIGURES
from attnconv.paper.observations import observe, table_of_layers, table_of_observations
from attnconv.paper.tables import PaperTable, Runs
from attnconv.paper.training_plan import ALL_RUNS, PAPER_MODELS
from attnconv.report.html_page import FigureFolder, Page, Section, render
from attnconv.report.run_data import RunData
from attnconv.training.run_folder import RunFolder, write_json, write_text

_TITLE = "On the relationship between self-attention and convolutional layers: figures and tables"
_SEEN = (
    "The paper's observations, measured in each run and compared with fixed thresholds. Chance levels are for randomly "
    "changed heads; the start is before training. Points are percentage points."
)
_FIXED = (
    "From Figures 6 and 7, the paper concludes that heads of the second and third layers attend at a constant shift "
    "from the query. Here every head is measured at every query; content-based attention is averaged over test images."
)


def write_paper(
    runs: Mapping[str, Sequence[RunFolder]],
    out: str | Path,
    *,
    data_root: str | None = None,
    command: str = "attnconv reproduce",
    notes: Sequence[str] = (),
    publication: bool = False,
) -> Path:
    """Write a page with the paper's figures and tables for which runs exist, and a list of those that are missing.

    Nothing is trained or downloaded. Figures show the first run of each model; accuracies are means over all its runs.

    Args:
        runs: Run folders of each model, one per seed, by model name (one of `ALL_RUNS`).
        out: Output folder; existing files with the same names are overwritten.
        data_root: Folder that contains CIFAR-10; None for the folder in the settings of each run.
        command: Command shown on the page; it trains a missing model NAME if ` --only NAME` is appended.
        notes: Sentences for the top of the page.
        publication: Also write the figures as PDF, omit their titles, and keep the text in SVG files editable.

    Returns:
        The path of the page, `index.html`.

    Raises:
        ValueError: If a model name is unknown, a folder contains no run, or a run has invalid files.
        OSError: If a file cannot be read or written.
    """
    if unknown := [name for name in runs if name not in ALL_RUNS]:
        raise ValueError(bad("runs", f"keys must be model names ({', '.join(ALL_RUNS)})", ", ".join(unknown)))
    every = {name: [RunData(name, run, data_root) for run in several] for name, several in runs.items() if several}
    known = {name: several for name, several in every.items() if name in PAPER_MODELS}
    out, missing = Path(out), list[str]()
    first = {name: several[0] for name, several in known.items()}
    folder = FigureFolder(out / "figures", publication)
    figures = [_figure(first, number, folder, command, missing) for number in FIGURES]
    written = _tables(every, known, command, missing)
    (out / "tables").mkdir(parents=True, exist_ok=True)
    for stem, made in written.items():
        write_text(out / "tables" / f"{stem}.md", f"{made.table.title}\n\n{made.table.markdown()}\n")
        write_json(out / "tables" / f"{stem}.json", json_values({"title": made.table.title, **made.values}))
    *paper, fixed, observations, layers = (made.table for made in written.values())
    sections = [
        Section("Tables", tables=paper),
        Section("Observations", text=_SEEN, tables=[observations, layers]),
        Section("Figure 6 in numbers", text=_FIXED, tables=[fixed] if fixed.rows else ()),
        *figures,
        Section("Missing", notes=missing or ["Nothing is missing."]),
    ]
    page = Page(_TITLE, _lead(known), facts=_facts(known), sections=sections, notes=notes)
    write_text(out / "README.md", _markdown(page))
    path = out / "index.html"
    write_text(path, render(page))
    return path


def _figure(
    runs: Mapping[str, RunData], number: int, folder: FigureFolder, command: str, missing: list[str]
) -> Section:
    """Draw and save one figure; add the reasons why it cannot be drawn to `missing`."""
    title, planned, notes = f"Figure {number}", FIGURES[number], list[str]()
    there = {name: runs[name] for name in planned.models if name in runs and runs[name].folder.metrics()}
    if absent := " ".join(name for name in planned.models if name not in there):
        notes.append(f"{title}: no run of {absent.replace(' ', ', ')}. To train it: {command} --only {absent}")
    name, figure = f"figure-{number:02d}", None
    if there or not planned.models:
        try:
            figure = planned.draw(title, *there.values())
        except (OSError, ValueError) as error:
            notes.append(f"{title} could not be drawn: {error}")
    missing += notes
    if figure is None:
        for ending in ("png", "svg", "pdf"):  # from an earlier call with different runs
            (folder.path / f"{name}.{ending}").unlink(missing_ok=True)
        return Section(title, notes=notes)
    epochs = (f"{run.settings.preset} after epoch {run.folder.metrics()[-1]['epoch']}" for run in there.values())
    origin = f" From {', '.join(epochs)}." if there else ""
    unit = there[planned.models[0]].unit if len(planned.models) == 1 else ""
    alt, caption = f"{title}. {CAPTIONS[number]}", f"{CAPTIONS[number]}{unit}{origin}"
    return Section(title, pictures=[folder.add(figure, name, alt=alt, caption=caption)], notes=notes)


def _tables(every: Runs, known: Runs, command: str, missing: list[str]) -> dict[str, PaperTable]:
    """Return the tables by file name; add the reasons for missing values to `missing`."""
    fixed = {}
    for name, (run, *_) in known.items():
        if isinstance(run.settings.model, AttentionSettings) and run.folder.last_weights.is_file():
            try:
                fixed[PAPER_MODELS[name].title] = run.end
            except (OSError, ValueError) as error:
                missing.append(f"Figure 6 in numbers, {name}: could not be measured: {error}")
    absent = [name for name in PAPER_MODELS if not tables.accuracies(known.get(name, ()))]
    missing += [f"Tables: no complete run of {name}. To train it: {command} --only {name}" for name in absent]
    observations = observe(every)
    for one in observations:
        made = f"To train its runs: {command} --only {' '.join(one.claim.models)}"
        missing += [f"Observation {one.claim.key!r}: {problem.removesuffix('.')}. {made}" for problem in one.problems]
    shown = "quadratic" if "quadratic" in known else next((name for name in known if name != "resnet18"), None)
    return {
        "table-1": tables.table_of_accuracy(known, 1),
        "table-2": tables.table_of_hyper_parameters(None if shown is None else known[shown][0]),
        "table-3": tables.table_of_encodings(),
        "table-4": tables.table_of_accuracy(known, 4),
        "trainings": tables.table_of_trainings(known),
        "counts": tables.table_of_counts(),
        "fixed-shifts": tables.table_of_fixed_shifts(fixed),
        "observations": table_of_observations(observations),
        "observations-by-layer": table_of_layers(observations),
    }


def _lead(runs: Runs) -> str:
    words = [
        f"{several[0].settings.preset} ({len(several)} {'run' if len(several) == 1 else 'runs'})"
        for several in runs.values()
    ]
    return f"From {', '.join(words)}." if words else "There are no runs; only results that need no run are shown."


def _facts(runs: Runs) -> list[tuple[str, str, str]]:
    facts = []
    for name, several in runs.items():
        if found := tables.accuracies(several):
            model = PAPER_MODELS[name]
            printed = model.accuracy
            aside = "not in the paper's tables" if printed is None else f"in the paper, on CIFAR-10: {printed:.1%}"
            facts.append((model.title, f"{statistics.fmean(found):.1%}", aside))
    return facts


def _markdown(page: Page) -> str:
    parts = [f"# {page.title}", page.lead, *page.notes]
    for section in page.sections:
        parts += [f"## {section.title}", *filter(None, [section.text]), *section.notes]
        parts += [f"**{table.title}**\n\n{table.markdown()}" for table in section.tables]
        parts += [f"![{it.alt}](figures/{it.files[0].name})\n\n{it.caption}" for it in section.pictures]
    return "\n\n".join(parts) + "\n"
