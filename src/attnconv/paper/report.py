"""The whole paper from run folders: Figures 1 to 14 and Tables 1 to 4 with its numbers beside ours, in one folder.

    OUT/index.html, README.md         everything on one page; the same in words and tables
    OUT/figures/figure-01.png, .svg   ... figure-14
    OUT/tables/table-1.md, .json      ... table-4; trainings (last and chosen epoch, time, device); counts (the paper's
                                      sizes, counted); fixed-shifts (Figure 6's claim); observations and
                                      observations-by-layer (what the paper saw, judged)

What the runs do not allow is named on both pages, with the command that makes it.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from attnconv._util.errors import bad
from attnconv.models.preset_tables import Table
from attnconv.models.settings import AttentionSettings
from attnconv.paper.claim_measures import MeasuredRun
from attnconv.paper.figures import CAPTIONS, FIGURES, PaperFigures
from attnconv.paper.fixed_shifts import FixedHead, fixed_heads, table_of_fixed_shifts, values_of
from attnconv.paper.models import PAPER_MODELS, run_model
from attnconv.paper.tables import (
    PaperTable,
    accuracies,
    table_of_accuracy,
    table_of_counts,
    table_of_encodings,
    table_of_hyper_parameters,
    table_of_trainings,
)
from attnconv.paper.verdict_tables import table_of_layers, table_of_observations, values_of_observations
from attnconv.paper.verdicts import Observation, observe
from attnconv.report.figure_style import save
from attnconv.report.html_page import Fact, Page, Picture, Section, render
from attnconv.training.run_folder import RunFolder, write_json, write_text

_SEEN = (
    "What the paper observed in its models, measured in each run and judged by limits that were set before the numbers "
    "were known. Chance levels come from shuffles of the run's own heads; the start is the same model before training."
)
_JUDGED = ("observations", "observations-by-layer")

RunPaths = str | Path | Sequence[str | Path]
_TITLE = "On the relationship between self-attention and convolutional layers: figures and tables"
_CLAIM = (
    "The paper reads from Figures 6 and 7 that heads of its layers 2 and 3 stand at a constant shift from the query. "
    "Here every head is asked at every query pixel; a model with content is averaged over test images first."
)


def write_paper(
    runs: Mapping[str, RunPaths], out: str | Path, *, command: str = "attnconv reproduce", notes: Sequence[str] = ()
) -> Path:
    """Write every figure and table of the paper that the runs allow, and name the others.

    Nothing is trained and nothing is downloaded. Figures show the first run of a model; accuracies are means over all.

    Args:
        runs: Preset -> its run folder, or one for each seed. Sizes are free: `quadratic`, `quadratic-small` and
            `quadratic-digits` are the same model of the paper; at most one of them may be given. Of the runs in
            `EXTRA_RUNS`, which no table or figure of the paper has, only observations are made.
        out: Folder to write to; older files of the same names are replaced.
        command: What trains a missing model, before ` --only NAME`.
        notes: Sentences for the head of the page.

    Returns:
        The page, `index.html`.

    Raises:
        ValueError: A name that is no model of the paper, two of the same model, a folder without a run, or files of a
            run that are not legal.
        OSError: A file cannot be read or written.
    """
    everything = _folders(runs)
    folders = {name: several for name, several in everything.items() if name in PAPER_MODELS}
    measured = {name: [MeasuredRun(run) for run in several] for name, several in everything.items()}
    out = Path(out)
    figures = PaperFigures({name: several[0] for name, several in folders.items()})
    missing: list[str] = []
    sections = [_figure_section(figures, number, out, command, missing) for number in FIGURES]
    claims = _claims(folders, measured, missing)
    observations = observe(measured)
    tables = {**_tables(folders, claims), **_judged(observations)}
    _write_tables(out / "tables", tables)
    absent = [name for name in PAPER_MODELS if not accuracies(folders.get(name, ()))]
    missing += [f"Tables: no complete run of {name}. It is made by: {command} --only {name}" for name in absent]
    missing += _unanswered(observations, command)
    lead = _lead(folders)
    shown = [tables[stem].table for stem in tables if stem not in ("fixed-shifts", *_JUDGED)]
    seen = Section("What was learned", text=_SEEN, tables=[tables[stem].table for stem in _JUDGED])
    claim = Section("Figure 6 in numbers", text=_CLAIM, tables=[tables["fixed-shifts"].table] if claims else ())
    page = Page(
        title=_TITLE,
        lead=lead,
        facts=_facts(folders),
        sections=[
            Section("Tables", tables=shown),
            seen,
            claim,
            *sections,
            Section("Missing", notes=missing or ["Nothing."]),
        ],
        tables=(),
        origin=(),
        notes=notes,
    )
    write_text(out / "README.md", _readme(lead, sections, list(tables.values()), missing, notes))
    path = out / "index.html"
    write_text(path, render(page))
    return path


def _folders(runs: Mapping[str, RunPaths]) -> dict[str, list[RunFolder]]:
    """Model of the paper -> its runs, all of which exist."""
    folders: dict[str, list[RunFolder]] = {}
    for preset, paths in runs.items():
        name = run_model(preset)
        several = [paths] if isinstance(paths, str | Path) else paths
        if name in folders:
            raise ValueError(bad("runs", f"must hold each model of the paper once, {name!r} too", repr(list(runs))))
        folders[name] = [RunFolder(Path(path)) for path in several]
        for run in folders[name]:
            run.record()
    return {name: several for name, several in folders.items() if several}


def _figure_section(figures: PaperFigures, number: int, out: Path, command: str, missing: list[str]) -> Section:
    """One figure, drawn and saved; or what would make it, added to `missing` as well."""
    title, notes = f"Figure {number}", []
    absent = figures.missing(number)
    if absent:
        words = f"{title}: no run of {', '.join(absent)}. Made by: {command} --only {' '.join(absent)}"
        missing.append(words)
        notes.append(words)
    stem = out / "figures" / f"figure-{number:02d}"
    try:
        figure = figures.draw(number)
    except (OSError, ValueError) as error:
        missing.append(f"{title} could not be drawn: {error}")
        notes, figure = [missing[-1]], None
    if figure is None:
        for ending in (".png", ".svg"):  # of an earlier call with other runs
            stem.with_suffix(ending).unlink(missing_ok=True)
        return Section(title, notes=notes)
    png, svg = save(figure, stem)
    of = [figures.runs[name] for name in FIGURES[number] if name not in absent]
    from_runs = ", ".join(f"{run.settings().preset} after epoch {run.metrics()[-1]['epoch']}" for run in of)
    caption = f"{CAPTIONS[number]} {f'From {from_runs}.' if of else 'Needs no run.'}"
    picture = Picture(png, svg, float(figure.get_size_inches()[0]), f"{title}. {CAPTIONS[number]}", caption)
    return Section(title, pictures=[picture], notes=notes)


def _claims(
    folders: Mapping[str, list[RunFolder]], measured: Mapping[str, list[MeasuredRun]], missing: list[str]
) -> dict[str, list[FixedHead]]:
    """The heads of every attention model's first run over shifts; what cannot be read is added to `missing`."""
    found = {}
    for name, (run, *_) in folders.items():
        if isinstance(run.settings().model, AttentionSettings) and run.last_weights.is_file():
            try:
                found[PAPER_MODELS[name].title] = fixed_heads(measured[name][0].end)
            except (OSError, ValueError) as error:
                missing.append(f"Figure 6 in numbers, {name}: could not be measured: {error}")
    return found


def _judged(observations: Sequence[Observation]) -> dict[str, PaperTable]:
    values = values_of_observations(observations)
    made = (table_of_observations(observations), table_of_layers(observations))
    return {stem: PaperTable(table, values) for stem, table in zip(_JUDGED, made, strict=True)}


def _unanswered(observations: Sequence[Observation], command: str) -> list[str]:
    """What kept numbers from being measured, each with the command that makes the runs."""
    return [
        f"Observation {one.question.key!r}: {problem}. Its runs are made by: {command} --only "
        f"{' '.join(one.question.models)}"
        for one in observations
        for problem in one.problems
    ]


def _tables(folders: Mapping[str, list[RunFolder]], claims: dict[str, list[FixedHead]]) -> dict[str, PaperTable]:
    shown = "quadratic" if "quadratic" in folders else next((name for name in folders if name != "resnet18"), None)
    settings = None if shown is None else folders[shown][0].settings()
    return {
        "table-1": table_of_accuracy(folders, 1),
        "table-2": table_of_hyper_parameters(settings),
        "table-3": table_of_encodings(),
        "table-4": table_of_accuracy(folders, 4),
        "trainings": table_of_trainings(folders),
        "counts": table_of_counts(),
        "fixed-shifts": PaperTable(table_of_fixed_shifts(claims), values_of(claims)),
    }


def _write_tables(folder: Path, tables: Mapping[str, PaperTable]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stem, table in tables.items():
        write_text(folder / f"{stem}.md", f"{table.table.title}\n\n{table.table.markdown()}\n")
        write_json(folder / f"{stem}.json", {"title": table.table.title, **table.values})


def _lead(folders: Mapping[str, list[RunFolder]]) -> str:
    words = [
        f"{several[0].settings().preset} ({len(several)} {'run' if len(several) == 1 else 'runs'})"
        for several in folders.values()
    ]
    return f"Drawn from {', '.join(words)}." if words else "No run was given: only what needs none is shown."


def _facts(folders: Mapping[str, list[RunFolder]]) -> list[Fact]:
    facts = []
    for name, several in folders.items():
        if found := accuracies(several):
            printed = PAPER_MODELS[name].accuracy
            aside = "not in the paper's tables" if printed is None else f"paper, on CIFAR-10: {printed:.1%}"
            facts.append(Fact(PAPER_MODELS[name].title, f"{statistics.fmean(found):.1%}", aside))
    return facts


def _readme(
    lead: str, sections: Sequence[Section], tables: Sequence[PaperTable], missing: Sequence[str], notes: Sequence[str]
) -> str:
    parts = [f"# {_TITLE}", lead, *notes]
    parts += [f"## {table.table.title}\n\n{_rows(table.table)}" for table in tables]
    for section in sections:
        parts.append(f"## {section.title}")
        parts += section.notes
        parts += [f"![{it.alt}](figures/{it.png.name})\n\n{it.caption}" for it in section.pictures]
    parts += ["## Missing", "\n".join(f"- {line}" for line in missing) or "Nothing."]
    return "\n\n".join(parts) + "\n"


def _rows(table: Table) -> str:
    return table.markdown() if table.rows else "No run to measure."
