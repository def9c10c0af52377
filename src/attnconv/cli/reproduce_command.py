"""`attnconv reproduce`: train what is missing of the paper at a chosen scale, and write its figures and tables."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from attnconv._util.errors import bad
from attnconv.cli.parsing import parse
from attnconv.cli.reproduce_pruned_model import NothingToPruneError, pruned_start
from attnconv.paper.training_plan import (
    PRUNED,
    SOURCE,
    PlannedRun,
    ScaleName,
    folder_name,
    plan_runs,
    runs_in,
    settings_at,
)
from attnconv.training.processes import is_first_process, world_size
from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import SettingsError

_EXAMPLES = """\
attnconv reproduce --scale tiny
attnconv reproduce --scale small --data-root PATH/TO/CIFAR --plan
attnconv reproduce --scale small --data-root PATH/TO/CIFAR --time
attnconv reproduce --scale mini --data-root PATH/TO/CIFAR --seeds 3 --out paper-mini
attnconv reproduce --scale small --data-root PATH/TO/CIFAR --seeds 3 --out paper-small
attnconv reproduce --scale paper --data-root PATH/TO/CIFAR --only quadratic resnet18
torchrun --nproc-per-node 4 -m attnconv reproduce --scale paper --data-root PATH/TO/CIFAR
"""


@dataclass(frozen=True)
class Reproduce:
    """Arguments of `attnconv reproduce`.

    Attributes:
        scale: tiny: digits, a few epochs, minutes, to see every step. mini: CIFAR-10, half the channels of the small
            presets, 10 epochs. small: the small presets on CIFAR-10, for two CPU cores overnight. paper: the paper's
            models and hyper-parameters, for one GPU.
        only: Train only these of the paper's models; none for all. resnet18, quadratic, quadratic-generalized,
            quadratic-generalized-pruned, learned, learned-content, quadratic-16-heads. By name only, beside them:
            quadratic-attention-dropout, which drops attention probabilities with rate 0.1 as the paper's code does.
        seeds: Runs of each model; Table 1 gives their mean and deviation.
        out: Folder for the runs and the pages; None for reproduction/SCALE.
        data_root: Folder that holds CIFAR-10; it is fetched where it is not there. tiny needs none.
        plan: Only print what would be trained.
        time: Only print what would be trained and how long that takes on this machine: every model is trained for some
            seconds. The pruned one is timed with all its heads.
        draw: Train nothing: write figures and tables of the runs that are in the folder, and say where they were
            trained in other ways than this scale's.
    """

    scale: ScaleName = "tiny"
    only: tuple[str, ...] = ()
    seeds: int = 1
    out: Path | None = None
    data_root: str = "data"
    plan: bool = False
    time: bool = False
    draw: bool = False


def run(words: Sequence[str]) -> int:
    """Plan, train what is missing, draw everything."""
    about = "Train what is missing of the paper's models, then write its Figures 1 to 14 and Tables 1 to 4 with the "
    about += "paper's numbers beside ours. Finished runs are kept and interrupted ones continued: call it again."
    arguments = parse(Reproduce, "reproduce", words, about=about, examples=_EXAMPLES)
    out = arguments.out or Path("reproduction") / arguments.scale
    try:
        runs = plan_runs(
            arguments.scale, out, names=arguments.only, seeds=arguments.seeds, data_root=arguments.data_root
        )
    except ValueError as error:
        raise SettingsError([str(error)]) from error
    if arguments.time and world_size() > 1:
        raise SettingsError([bad("--time", "must go with one process, which is what it times", world_size())])
    if arguments.draw:
        _write(arguments, out, _departures(out, arguments.scale))
        return 0
    if is_first_process():
        _print_plan(runs, _timed(runs) if arguments.time else {})
    if arguments.plan or arguments.time:
        return 0
    failures: list[str] = []
    notes: list[str] = []
    for planned in runs:
        words_about = _train(planned, out)
        (failures if words_about.startswith("Failed") else notes).append(words_about)
    if is_first_process():
        _write(arguments, out, [note for note in (*notes, *failures) if note])
    return 1 if failures else 0


def _write(arguments: Reproduce, out: Path, said: list[str]) -> None:
    """Figures and tables of all runs in the folder, those of earlier calls too."""
    from attnconv.paper import write_paper

    runs = {name: [run.path for run in several] for name, several in runs_in(out).items()}
    if arguments.scale != "paper":
        said = [f"Scale {arguments.scale}: smaller models than the paper's, trained for less time.", *said]
    page = write_paper(runs, out, command=_command(arguments, out), notes=said)
    print("\n".join([*said, f"Figures and tables: {page}"]))


def _departures(out: Path, scale: ScaleName) -> list[str]:
    """How the runs in the folder were trained otherwise than a scale's: a sentence for all that differ alike."""
    from attnconv.training.run_checks import differences

    alike: dict[str, list[str]] = {}
    for name, several in runs_in(out).items():
        planned = settings_at(scale, name)
        for run in several:
            made = replace(run.settings(), model=planned.model)  # of a pruned one no two are alike
            train = replace(planned.train, seed=made.train.seed, test_curve=True)
            changed = differences(replace(planned, train=train), made)
            words = ", ".join(f"{flag} {now} in place of {before}" for flag, before, now in changed)
            alike.setdefault(words, []).append(run.path.name)
    return [f"{', '.join(names)}: {words}." for words, names in alike.items() if words]


def _command(arguments: Reproduce, out: Path) -> str:
    """What makes the same again, but for `--only`."""
    words = ["attnconv", "reproduce", "--scale", arguments.scale]
    defaults = Reproduce()
    if arguments.seeds != defaults.seeds:
        words += ["--seeds", str(arguments.seeds)]
    if arguments.data_root != defaults.data_root:
        words += ["--data-root", arguments.data_root]
    return shlex.join([*words, "--out", str(out)])


def _timed(runs: Sequence[PlannedRun]) -> dict[str, float]:
    """Seconds that a run takes on this machine, of each model that has one to train."""
    from rich.console import Console

    from attnconv.data.load_splits import load
    from attnconv.training.progress_bars import downloading
    from attnconv.training.time_estimate import training_seconds

    firsts = {planned.name: planned.settings for planned in reversed(runs) if planned.state != "finished"}
    taken, console = {}, Console(stderr=True)
    for name, settings in reversed(firsts.items()):
        with downloading() as report:
            data = load(settings.data, progress=report)
        with console.status(f"timing {name}"):
            taken[name] = training_seconds(settings, data)
    return taken


def _print_plan(runs: Sequence[PlannedRun], seconds: Mapping[str, float]) -> None:
    """The runs as a table.

    Args:
        runs: Of the reproduction.
        seconds: What a run of each model takes; of those that were timed.
    """
    from rich.console import Console

    from attnconv.cli.network_comparison import plain_table

    columns = ("run", "epochs", "batch", "rate", "numbers", "state", *(["time"] if seconds else []))
    table = plain_table("What is trained", columns, left=1)
    for planned in runs:
        train, rate = planned.settings.train, planned.settings.optim.learning_rate
        words = [planned.folder.path.name, str(train.epochs), str(train.batch_size), f"{rate:g}"]
        words += [train.precision, planned.state]
        if seconds:
            words.append(_duration(seconds[planned.name]) if planned.name in seconds else "")
        table.add_row(*words)
    Console().print(table)
    waiting = [planned for planned in runs if planned.state != "finished"]
    data = ", ".join(dict.fromkeys(planned.settings.data.name for planned in runs))
    left = sum(seconds[run.name] * (1 - run.epochs_done / run.settings.train.epochs) for run in waiting if seconds)
    said = f" About {_duration(left)} on this machine, one run after the other." if left else ""
    print(f"{len(waiting)} of {len(runs)} runs to train, on {data}.{said}", flush=True)


def _duration(seconds: float) -> str:
    """Such as `40 s`, `39 min` or `6.3 h`.

    Example:
        >>> _duration(40), _duration(2340), _duration(22680)
        ('40 s', '39 min', '6.3 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _train(planned: PlannedRun, out: Path) -> str:
    """Train one run unless it is finished; what is to be said about it, if anything."""
    from attnconv.training.fitting import fit
    from attnconv.training.initial_model import measure_start
    from attnconv.training.run_checks import check_folder
    from attnconv.training.run_recorder import DivergedError

    settings, start, said = planned.settings, None, ""
    name, folder = planned.folder.path.name, planned.folder
    if planned.name == PRUNED:
        try:
            begun = pruned_start(planned, RunFolder(out / "runs" / folder_name(SOURCE, settings.train.seed)))
        except NothingToPruneError as reason:
            return str(reason)
        settings, start, said = begun.settings, begun.weights, begun.said
    if planned.state == "finished":
        check_folder(folder, settings, resume=True)  # a table of other settings would mislead
        if is_first_process():
            print(f"{name}: finished before.", flush=True)
            measure_start(folder)
        return said
    if is_first_process():
        print(f"{name}: {planned.state}, epochs: {settings.train.epochs} in all.", flush=True)
    try:
        fit(settings, folder.path, resume=True, start_from=start, command=["attnconv", *sys.argv[1:]])
    except DivergedError as error:
        return f"Failed: {name}: {error}"  # the other runs are still worth having
    if is_first_process():
        measure_start(folder)  # of the pruned model: what pruning alone costs
    return said
