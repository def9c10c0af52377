"""Run the paper's experiments on one GPU, most important first, in several calls of a few minutes each.

    python -m experiments.paper_on_gpu --data-root PATH/TO/CIFAR --minutes 9 --export exported

Repeat the call until all jobs are done. The exit status is 0 if all jobs are done, 3 if there are jobs left, and 1 if a
job failed. Each job is a separate process, which is killed at the end of the time limit and resumed by the next call: a
training run after its last checkpoint, other jobs after their last completed part. One call must be long enough for at
least one such step. The jobs are, in this order:

    quadratic and resnet18, three seeds; generalised, pruned, learned, 16 heads; learned with content, with fewer
    epochs (stated in its name); quadratic with attention dropout, with the same number of epochs; fast CNNs, recast
    (`experiments.fast_recast`); sequences (`experiments.sequence`); initialisations of a vision transformer
    (`experiments.starts`); three stages of attention (`experiments.attention_only`); better recipes for quadratic and
    resnet18 (`experiments.recipes`); resnet18 recast and fine-tuned (`experiments.recast_resnet`), also with gated
    attention (`experiments.gated_recast`)

A script that was stopped three times before it finished is moved behind the other jobs.

Runs are planned by `attnconv reproduce` and trained by `attnconv.training.fitting`. Requirements are torch, the
dependencies of attnconv, and tyro for the other scripts, which are skipped with a message if it is not installed. If
the sources are copied without their git history, set the environment variable ATTNCONV_COMMIT to the commit.

To transfer the results, export them on the GPU machine and restore the folder of runs on the local machine:

    attnconv reproduce --draw --scale paper --out reproduction/paper              # on the GPU machine, after training
    python -m experiments.paper_on_gpu --export exported --weights quadratic --minutes 0  # on the GPU machine
    python -m experiments.paper_on_gpu --join exported --out reproduction/paper           # on the local machine
    python -m experiments.keep_reproduction --reproduction reproduction/paper --out results/paper

Runs can only resume on a machine that has their checkpoints; elsewhere they start from the beginning.
"""

import argparse
import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from attnconv._util.errors import bad
from attnconv.paper.training_plan import (
    ALL_RUNS,
    DROPPED,
    FIRST_SEED,
    PRUNED,
    SOURCE,
    NothingToPruneError,
    PlannedRun,
    plan_runs,
    pruned_start,
)
from attnconv.training.run_folder import RunFolder
from experiments.paper_export import RECIPE_RUNS, export, join
from experiments.recipe_candidates import over_epochs

FIRST: tuple[str, ...] = ("quadratic", "resnet18")
NEXT: tuple[str, ...] = (SOURCE, PRUNED, "learned", "quadratic-16-heads")
CONTENT = "learned-content"
CONTENT_EPOCHS = 100  # of this model and of the run with attention dropout
VIT = (  # the width, heads and depth of ViT-Ti, with 16 x 16 tokens, and its initialisations and recipes
    *("--width", "192", "--heads", "3", "--depth", "12", "--patch", "2", "--epochs", "100"),
    *("--rows", "default", "default, rate 0.002", "default, class token", "convolution", "convolution, rate 0.002"),
    *("convolution, class token", "convolution, half as long positions"),
    *("convolution, half as long positions, rate 0.002", "mimetic"),
)
STAGED = ("--rows", "three stages", "quadratic", "ResNet", "--width", "256", "--epochs", "100")
DONE, FAILED, MORE = 0, 1, 3
LEAST_SECONDS = 5.0  # minimum time left to start a job
CHECKPOINT_EVERY = 5  # epochs between checkpoints of long runs; an epoch takes seconds
PATIENCE = 3  # number of stops after which a script is moved behind the other jobs


@dataclass(frozen=True)
class Job:
    """A job, run in a separate process.

    Attributes:
        name: Name of its log file and, for a training run, of its run folder.
        words: Arguments after the Python interpreter.
        done: Function that returns whether the job is done.
        waits: Whether the job is moved behind others after being stopped several times.
    """

    name: str
    words: tuple[str, ...]
    done: Callable[[], bool]
    waits: bool = False


def main(words: Sequence[str] | None = None) -> int:
    """Run jobs until the time limit, or the single job of a child process; return the exit status."""
    arguments = parse(words)
    if arguments.join is not None:
        print("\n".join(str(path) for path in join(arguments.join, arguments.out)))
        return DONE
    if arguments.job is not None:
        train_job(arguments)
        return DONE
    if arguments.script:
        run_script(arguments)
        return DONE
    jobs = plan(arguments)
    for job in jobs:
        print(f"{job.name}: {state(job, arguments.out)}")
    work(jobs, arguments.out, seconds=60 * arguments.minutes, again=arguments.again)
    if arguments.export is not None:
        export(arguments.out, arguments.export, weights_of=chosen_runs(arguments))
        for path in sorted(arguments.export.iterdir()):
            print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    states = [state(job, arguments.out) for job in jobs]
    print(", ".join(f"{states.count(word)} {word}" for word in ("done", "failed", "to do")), flush=True)
    return MORE if "to do" in states else FAILED if "failed" in states else DONE


def chosen_runs(arguments: argparse.Namespace) -> list[str]:
    """Return the runs whose weights are exported, as paths relative to the output folder."""
    places = [path for place in ("runs/*/", f"{RECIPE_RUNS}/*/") for path in sorted(arguments.out.glob(place))]
    return [str(path.relative_to(arguments.out)) for path in places if path.name in arguments.weights]


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, using only the standard library."""
    about, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m experiments.paper_on_gpu",
        description=about,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("reproduction/paper"), help="folder of runs and logs, on a local disk")
    add("--export", type=Path, help="folder for records and half-precision weights, rewritten after each call")
    add("--data-root", default="data", help="folder of CIFAR-10")
    add(
        "--minutes",
        type=float,
        default=9.0,
        help="time limit for jobs, not including the export; 0 runs no jobs, but prints their states",
    )
    add("--scale", choices=("paper", "small", "mini", "tiny"), default="paper", help="as in attnconv reproduce")
    add("--seeds", type=int, default=3, help="number of runs of quadratic, resnet18 and the scripts")
    add("--epochs", type=int, help="reduce the epochs of every run; run names include the number")
    add(
        "--precision",
        choices=("32", "bf16"),
        help="precision of all runs; default: bf16 at scale paper, otherwise that of the scale",
    )
    add("--compile", action="store_true", help="compile the models")
    add("--only", nargs="*", default=[], help="prefixes of the names of jobs to run; default: all jobs")
    add("--weights", nargs="*", default=[], metavar="RUN", help="run folders whose weights are also exported")
    add("--again", action="store_true", help="retry failed jobs")
    add("--join", type=Path, metavar="FOLDER", help="only restore OUT from an exported folder")
    add("--job", help=argparse.SUPPRESS)
    add("--script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    add("--parent", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def plan(arguments: argparse.Namespace) -> list[Job]:
    """Return all jobs in order."""
    again = [
        *("--out", str(arguments.out), "--data-root", arguments.data_root, "--scale", arguments.scale),
        *("--seeds", str(arguments.seeds)),
        *(("--epochs", str(arguments.epochs)) if arguments.epochs is not None else ()),
        *(("--precision", arguments.precision) if arguments.precision is not None else ()),
        *(("--compile",) if arguments.compile else ()),
        *("--parent", str(os.getpid())),
    ]
    jobs = [
        Job(run.folder.path.name, ("-m", "experiments.paper_on_gpu", "--job", run.folder.path.name, *again), done(run))
        for run in trainings(arguments)
    ]
    jobs += other_jobs(arguments)
    return [job for job in jobs if not arguments.only or job.name.startswith(tuple(arguments.only))]


def done(run: PlannedRun) -> Callable[[], bool]:
    """Return a function that checks whether a run is finished, or is known to have nothing to train."""
    return lambda: run.folder.result() is not None or note_of(run).is_file()


def note_of(run: PlannedRun) -> Path:
    """Return the path of the note that a run has nothing to train."""
    return run.folder.path.with_name(f"{run.folder.path.name}-not-trained.txt")


def trainings(arguments: argparse.Namespace) -> list[PlannedRun]:
    """Return the runs of the paper's models, most important first."""
    planned = plan_runs(
        arguments.scale, arguments.out, names=ALL_RUNS, seeds=arguments.seeds, data_root=arguments.data_root
    )
    known = {(run.name, run.settings.train.seed): run for run in planned}
    runs = [known[name, FIRST_SEED + seed] for seed in range(arguments.seeds) for name in FIRST]
    runs += [known[name, FIRST_SEED] for name in NEXT]
    late = [known[name, FIRST_SEED] for name in (CONTENT, DROPPED)]
    if arguments.epochs is not None:
        runs = [shortened(run, arguments.epochs) for run in runs]
    runs += [shortened(run, min(CONTENT_EPOCHS, arguments.epochs or math.inf)) for run in late]
    precision = arguments.precision or ("bf16" if arguments.scale == "paper" else None)
    return [adjusted(run, precision, compiled=arguments.compile) for run in runs]


def shortened(run: PlannedRun, epochs: float) -> PlannedRun:
    """Reduce a run to at most `epochs` epochs (a third for a pruned model), and add the number to its name."""
    settings, path = run.settings, run.folder.path
    count = int(min(epochs // 3 or 1 if run.name == PRUNED else epochs, settings.train.epochs))
    if settings.train.epochs == count:
        return run
    settings = over_epochs(replace(settings, preset=f"{settings.preset}-{count}-epochs"), count)
    return replace(run, settings=settings, folder=RunFolder(path.with_name(f"{path.name}-{count}-epochs")))


def adjusted(run: PlannedRun, precision: str | None, *, compiled: bool) -> PlannedRun:
    """Change a run's precision and compilation; long runs do not write a checkpoint after every epoch."""
    every = CHECKPOINT_EVERY if run.settings.train.epochs >= 100 else 1
    train = replace(run.settings.train, compile=compiled, checkpoint_every=every)
    if precision is not None:
        train = replace(train, precision=precision)  # type: ignore[arg-type]  # validated by argparse
    return replace(run, settings=replace(run.settings, train=train))


def other_jobs(arguments: argparse.Namespace) -> list[Job]:
    """Return the jobs of other scripts; at scale tiny only those that use run folders."""
    if importlib.util.find_spec("tyro") is None:
        print("tyro: not installed; skipping all jobs except the training of the paper's models.", file=sys.stderr)
        return []
    out, root, seeds = arguments.out.resolve(), ("--root", arguments.data_root), ("--seeds", str(arguments.seeds))
    each_seed = ("--seeds", *map(str, range(arguments.seeds)))
    jobs = []
    if arguments.scale != "tiny":
        for preset in ("94", "96"):
            name, flags = f"fast-recast-{preset}", ("--preset", preset, "--held-out", "0", "--tuning-epochs", "2")
            jobs.append(script_job(name, "fast_recast", (*flags, *seeds, *root), out))
        jobs.append(script_job("sequence", "sequence", root, out))
        jobs.append(script_job("starts", "starts", (*VIT, *each_seed, *root), out))
        jobs.append(script_job("attention-only", "attention_only", (*STAGED, *each_seed, *root), out))
    first = next(run for run in trainings(arguments) if run.name == "resnet18")
    how = [*("--scale", arguments.scale), *("--paper-runs", str(out / "runs")), *seeds, *root]
    how += ["--epochs", str(first.settings.train.epochs)] if arguments.epochs is not None else []
    how += ["--precision", arguments.precision] if arguments.precision is not None else []
    how += ["--compile"] if arguments.compile else []
    jobs.append(script_job("recipes", "recipes", how, out))
    epochs = ("--epochs", "5" if arguments.scale == "paper" else "1")
    run = str(out / "runs" / first.folder.path.name)
    jobs.append(script_job("recast-resnet", "recast_resnet", ("--run", run, *epochs, *seeds, *root), out))
    if arguments.scale != "tiny":
        gated = ("--checkpoint", run, "--stage", "stages.7", *each_seed, *root)
        jobs.append(script_job("gated-recast", "gated_recast", gated, out))
    return jobs


def script_job(name: str, script: str, flags: Sequence[str], out: Path) -> Job:
    """Return the job of another experiment, which is done when its results are written."""
    words = ("-m", "experiments.paper_on_gpu", "--parent", str(os.getpid()), "--script", script, *flags)
    target = out / name
    return Job(
        name, (*words, "--kept", f"{target}-kept", "--out", str(target)), (target / "results.json").is_file, waits=True
    )


def run_script(arguments: argparse.Namespace) -> None:
    """Run another experiment with its flags, until the parent process ends."""
    if arguments.parent is not None:
        end_with(arguments.parent)
    import tyro

    name, *flags = arguments.script
    script = importlib.import_module(f"experiments.{name}")
    script.main(tyro.cli(script.Settings, args=flags))


def state(job: Job, out: Path) -> str:
    """Return the state of a job: `done`, `failed` or `to do`."""
    return "done" if job.done() else "failed" if failure_of(job, out).is_file() else "to do"


def failure_of(job: Job, out: Path) -> Path:
    """Return the path of the file that marks a failed job, so that later calls skip it."""
    return out / "logs" / f"{job.name}.failed.json"


def stops(job: Job, out: Path) -> int:
    """Return how often a job was stopped by the time limit."""
    file = out / "logs" / f"{job.name}.stops"
    return int(file.read_text(encoding="utf-8")) if file.is_file() else 0


def work(jobs: Sequence[Job], out: Path, *, seconds: float, again: bool) -> None:
    """Run jobs one after another until all are done or the time limit is reached, then kill the current job."""
    end = time.monotonic() + seconds
    (out / "logs").mkdir(parents=True, exist_ok=True)
    for job in sorted(jobs, key=lambda job: job.waits and stops(job, out) >= PATIENCE):
        if again:
            failure_of(job, out).unlink(missing_ok=True)
        if state(job, out) != "to do":
            continue
        left = end - time.monotonic()
        if left < min(LEAST_SECONDS, seconds / 2):
            return
        print(f"{job.name}: starting, {left / 60:.1f} minutes left.", flush=True)
        with (out / "logs" / f"{job.name}.log").open("ab") as log:
            try:
                code = subprocess.run([sys.executable, *job.words], stdout=log, stderr=log, timeout=left, check=False)
            except subprocess.TimeoutExpired:  # the job was killed; runs are safe to kill
                print(f"{job.name}: stopped by the time limit; the next call resumes it.", flush=True)
                (out / "logs" / f"{job.name}.stops").write_text(str(stops(job, out) + 1), encoding="utf-8")
                return
        if code.returncode or not job.done():
            failure_of(job, out).write_text(json.dumps({"code": code.returncode}), encoding="utf-8")
            print(f"{job.name}: failed, see {out / 'logs' / job.name}.log", flush=True)


def end_with(parent: int) -> None:
    """Exit within half a second after the parent process, so that two processes never train the same run."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)  # runs are safe to kill at any time

    threading.Thread(target=watch, daemon=True).start()


def train_job(arguments: argparse.Namespace) -> None:
    """Start or resume one training run."""
    if arguments.parent is not None:
        end_with(arguments.parent)
    from attnconv.training.fitting import fit

    run = next(run for run in trainings(arguments) if run.folder.path.name == arguments.job)
    settings, start = run.settings, None
    if run.name == PRUNED:
        source = next(
            r for r in trainings(arguments) if (r.name, r.settings.train.seed) == (SOURCE, settings.train.seed)
        )
        if source.folder.result() is None:
            requirement = f"must have a finished source run {source.folder.path.name}"
            raise ValueError(bad("--job", requirement, run.folder.path.name))
        try:
            settings, start, _ = pruned_start(run, source.folder)
        except NothingToPruneError as reason:
            note_of(run).write_text(f"{reason}\n", encoding="utf-8")
            return
    command = ["python", "-m", "experiments.paper_on_gpu", *sys.argv[1:]]
    fit(settings, run.folder.path, resume=True, start_from=start, command=command)


if __name__ == "__main__":
    sys.exit(main())
