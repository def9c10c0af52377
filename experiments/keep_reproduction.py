"""What of a reproduction goes into `results/`: tables, figures, every run's records, its weights in half precision.

    python -m experiments.keep_reproduction --reproduction reproduction/mini --out results/paper-mini
    python -m experiments.keep_reproduction --reproduction reproduction/mini --out results/paper-mini --back

Weights are those after the last epoch, where they are there; they load with `attnconv.load`. Where a run of the same
name was kept that began at another time, `repeats.jsonl` gets a line that says how its loss and accuracy after every
epoch differ from the new one's. The second call goes the other way: it makes the folder of a reproduction from what was
kept, and `attnconv reproduce` then trains the runs that are missing in it.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from attnconv._util.atomic_write import write_atomically
from attnconv._util.errors import bad
from attnconv.training.run_folder import RunFolder, append_line
from experiments.paper_export import RECORDS, in_precision

KEPT_WEIGHTS = "weights.safetensors"
REPEATS = "repeats.jsonl"
IDENTITY = ("started", "commit", "device", "threads", "versions")


@dataclass(frozen=True)
class Settings:
    """Arguments of the script."""

    reproduction: Path
    """Folder of `attnconv reproduce`."""
    out: Path
    """Folder of the results; files of the same names are replaced, others stay."""
    back: bool = False
    """Make the runs of --reproduction from those kept in --out. Runs whose weights were not kept are left out, and
    so are runs that lie there already."""


def main(settings: Settings) -> list[Path]:
    """Copy; the files that were written.

    Raises:
        ValueError: There is no finished run.
    """
    return bring_back(settings) if settings.back else keep(settings)


def keep(settings: Settings) -> list[Path]:
    """From the reproduction to the results."""
    made, out = settings.reproduction, settings.out
    written: list[Path] = []
    for run in finished(made, "--reproduction"):
        target = RunFolder(out / "runs" / run.path.name)
        kept, again = target.path / KEPT_WEIGHTS, target.exists() and started(target) != started(run)
        if again:
            append_line(out / REPEATS, difference(target, run))
        written += copy(run, target, run.last_weights, kept, torch.float16, anew=again or not kept.is_file())
    for path in [*sorted(made.glob("figures/*.png")), *sorted(made.glob("tables/*"))]:
        target_file = out / path.relative_to(made)
        target_file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target_file)
        written.append(target_file)
    return written


def started(run: RunFolder) -> str:
    """When the training began, which no other did."""
    return str(run.record()["started"])


def difference(first: RunFolder, second: RunFolder) -> dict[str, Any]:
    """How much two trainings differ in what they measured: numbers that are equal, and the largest difference."""
    lines = list(zip(first.metrics(), second.metrics(), strict=True))
    loss = [abs(old["loss"] - new["loss"]) for old, new in lines]
    accuracy = [abs(old["accuracy"] - new["accuracy"]) for old, new in lines]
    return {
        "run": second.path.name,
        "trainings": [{name: run.record()[name] for name in IDENTITY} for run in (first, second)],
        "numbers": 2 * len(lines),
        "equal": loss.count(0) + accuracy.count(0),
        "largest_difference": {"loss": max(loss), "accuracy": max(accuracy)},
    }


def bring_back(settings: Settings) -> list[Path]:
    """From the results to a reproduction; runs that lie there stay as they are."""
    written: list[Path] = []
    for run in finished(settings.out, "--out"):
        weights, target = run.path / KEPT_WEIGHTS, RunFolder(settings.reproduction / "runs" / run.path.name)
        if weights.is_file() and not target.exists():
            written += copy(run, target, weights, target.last_weights, torch.float32)
    return written


def finished(folder: Path, name: str) -> list[RunFolder]:
    """The finished runs in a folder; `name` is the argument's."""
    runs = [run for path in sorted(folder.glob("runs/*/")) if (run := RunFolder(path)).result() is not None]
    if not runs:
        raise ValueError(bad(name, "must hold a finished run", str(folder)))
    return runs


def copy(
    run: RunFolder, target: RunFolder, weights: Path, new_weights: Path, dtype: torch.dtype, *, anew: bool = True
) -> list[Path]:
    """A run's records and, where they are there and wanted anew, weights; the files that were written.

    The record that marks the run as finished is written last.
    """
    target.path.mkdir(parents=True, exist_ok=True)
    written = []
    if anew and weights.is_file():
        new_weights.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(new_weights, in_precision(weights, dtype))
        written.append(new_weights)
    names = [name for name in RECORDS if (run.path / name).is_file()]
    for name in names:
        write_atomically(target.path / name, (run.path / name).read_bytes())
    return [*written, *(target.path / name for name in names)]


if __name__ == "__main__":
    print("\n".join(str(path) for path in main(tyro.cli(Settings))))
