"""`attnconv reproduce`: train the models of the paper, and reproduce its figures and tables."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from attnconv._util.processes import is_first_process
from attnconv._util.settings import Fine, Natural, Problem
from attnconv.cli.output import print_table, resumed_by
from attnconv.cli.parsing import in_flags
from attnconv.paper import training_plan
from attnconv.paper.training_plan import PRUNED, SOURCE, PlannedRun, ScaleName
from attnconv.training.run_folder import RunFolder


@dataclass(frozen=True)
class Arguments:
    """Train the models of the paper, and reproduce its Figures 1 to 14 and Tables 1 to 4.

    The tables also show the published numbers. A repeated command skips complete runs and resumes interrupted ones.

    Examples:
        attnconv reproduce --scale tiny
        attnconv reproduce --scale small --data-root data --plan
        attnconv reproduce --scale mini --data-root data --seeds 3 --out paper-mini
        attnconv reproduce --scale paper --data-root data --only quadratic resnet18
        torchrun --nproc-per-node 4 -m attnconv reproduce --scale paper

    Attributes:
        scale: mini: like small, with half the channels and 10 epochs. paper: the paper's models and hyperparameters, on
            CIFAR-10; needs a GPU. small: the presets whose names end in -small, on CIFAR-10; takes a few hours on
            two CPU cores with AVX-512. tiny: very small models, on digits for a few epochs; takes a few minutes.
        only: Models to train: resnet18, quadratic, quadratic-generalized, quadratic-generalized-pruned, learned,
            learned-content, quadratic-16-heads. The default is all of these. quadratic-attention-dropout, which has the
            attention dropout of the paper's code (rate 0.1), is trained only if named.
        seeds: Number of runs of each model, with different seeds. Table 1 reports the mean and standard deviation.
        out: Folder for the runs, figures and tables. The default is reproduction/SCALE.
        data_root: Folder that contains CIFAR-10, which is downloaded if it is missing. Not used with --scale tiny.
        plan: Print the planned runs and exit.
        draw: Skip training; write the figures and tables of the existing runs, and report settings that differ from
            those of the scale.
        publication: Prepare figures for print: add PDF files, omit titles, and keep the text of SVG files editable.
    """

    scale: ScaleName = "tiny"
    only: tuple[str, ...] = ()
    seeds: Natural = 1
    out: Path | None = None
    data_root: str = "data"
    plan: bool = False
    draw: bool = False
    publication: bool = False

    def conflicts(self, _: Fine) -> Iterator[Problem]:
        if unknown := [name for name in self.only if name not in training_plan.ALL_RUNS]:
            yield Problem("only", f"must be among {', '.join(training_plan.ALL_RUNS)}", ", ".join(unknown))


def run(arguments: Arguments) -> int:
    """Train the incomplete runs, then write figures and tables."""
    scale, out = arguments.scale, arguments.out or Path("reproduction") / arguments.scale
    if arguments.draw:
        _write(arguments, out, _departures(out, scale))
        return 0
    runs = training_plan.plan_runs(
        scale, out, names=arguments.only, seeds=arguments.seeds, data_root=arguments.data_root
    )
    if is_first_process():
        _print_plan(runs)
    if arguments.plan:
        return 0
    from attnconv.training.run_recorder import DivergedError

    failures: list[str] = []
    notes: list[str] = []
    for planned in runs:
        try:
            _train(planned, out, notes)
        except training_plan.NothingToPruneError as reason:
            notes.append(str(reason))
        except DivergedError as error:  # continue with the other runs
            failures.append(f"Failed: {planned.folder.path.name}: {error}")
    if is_first_process():
        _write(arguments, out, notes + failures)
    return 1 if failures else 0


def _write(arguments: Arguments, out: Path, notes: list[str]) -> None:
    """Write the figures and tables of all runs in the folder, including those of earlier calls."""
    from attnconv.paper import write_paper
    from attnconv.training.progress_bars import working

    if arguments.scale != "paper":
        notes = [f"Scale {arguments.scale}: smaller models than the paper's, trained for fewer epochs.", *notes]
    options = ["--seeds", str(arguments.seeds), "--data-root", arguments.data_root, "--out", str(out)]
    command = shlex.join(["attnconv", "reproduce", "--scale", arguments.scale, *options])
    with working("Drawing figures and tables"):
        runs = training_plan.runs_in(out)
        data_root, publication = arguments.data_root, arguments.publication
        page = write_paper(runs, out, data_root=data_root, command=command, notes=notes, publication=publication)
    print("\n".join([*notes, f"Figures and tables: {page}"]))


def _departures(out: Path, scale: ScaleName) -> list[str]:
    """Describe how runs differ from a scale's settings, in one sentence per group of runs with the same differences."""
    from attnconv.training.run_checks import differences

    alike: dict[str, list[str]] = {}
    for name, several in training_plan.runs_in(out).items():
        planned = training_plan.settings_at(scale, name)
        for run in several:
            made = run.settings()
            if name == PRUNED:  # its heads always differ
                made = replace(made, model=planned.model)
            train = replace(planned.train, seed=made.train.seed, test_curve=True)
            changed = differences(replace(planned, train=train), made)
            words = ", ".join(f"{in_flags(name)} {now} instead of {before}" for name, before, now in changed)
            alike.setdefault(words, []).append(run.path.name)
    return [f"{', '.join(names)}: {words}." for words, names in alike.items() if words]


def _print_plan(runs: Sequence[PlannedRun]) -> None:
    rows = []
    for run in runs:
        train, rate = run.settings.train, f"{run.settings.optim.learning_rate:g}"
        numbers = (str(train.epochs), str(train.batch_size), rate, train.precision)
        rows.append((run.folder.path.name, *numbers, run.state))
    print_table("Runs", ("run", "epochs", "batch size", "learning rate", "precision", "state"), rows)
    waiting = sum(run.state != "finished" for run in runs)
    data = ", ".join(dict.fromkeys(run.settings.data.name for run in runs))
    print(f"{waiting} of {len(runs)} runs to train, on {data}.", flush=True)


def _train(planned: PlannedRun, out: Path, notes: list[str]) -> None:
    from attnconv.training.fitting import fit
    from attnconv.training.run_checks import check_folder

    settings, start, folder = planned.settings, None, planned.folder
    if planned.name == PRUNED:
        source = RunFolder(out / "runs" / training_plan.folder_name(SOURCE, settings.train.seed))
        settings, start, note = training_plan.pruned_start(planned, source)
        notes.append(note)
    if is_first_process():
        finished = planned.state == "finished"
        epochs = "already complete" if finished else f"{planned.state}, {settings.train.epochs} epochs in total"
        print(f"{folder.path.name}: {epochs}.", flush=True)
    if planned.state == "finished":
        check_folder(folder, settings, resume=True)  # the tables must not mix settings
    else:
        with resumed_by("repeating the command"):
            fit(settings, folder.path, resume=True, start_from=start, command=["attnconv", *sys.argv[1:]])
