"""Copy a reproduction to `results/`: tables, figures, and the records and half-precision weights of every run.

    python -m experiments.keep_reproduction --reproduction reproduction/mini --out results/paper-mini
    python -m experiments.keep_reproduction --reproduction reproduction/mini --out results/paper-mini --back

The weights are those after the last epoch, if available, and can be loaded with `attnconv.load`. If `results/` already
has a run with the same name and a different start time, a line is added to `repeats.jsonl` with the differences between
both runs in loss and accuracy per epoch. The second command copies in the other direction: it restores the folder of a
reproduction, and `attnconv reproduce` then trains only the missing runs.
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
    """Folder written by `attnconv reproduce`."""
    out: Path
    """Folder of the results. Files with the same names are replaced; other files are kept."""
    back: bool = False
    """Restore the runs in --reproduction from those in --out. Runs without weights and runs that already exist are
    skipped."""


def main(settings: Settings) -> list[Path]:
    """Copy files in the chosen direction; return the written files.

    Raises:
        ValueError: There is no finished run.
    """
    return bring_back(settings) if settings.back else keep(settings)


def keep(settings: Settings) -> list[Path]:
    """Copy the reproduction to the results."""
    made, out = settings.reproduction, settings.out
    written: list[Path] = []
    for run in finished(made, "--reproduction"):
        target = RunFolder(out / "runs" / run.path.name)
        kept = target.path / KEPT_WEIGHTS
        again = target.exists() and target.record()["started"] != run.record()["started"]
        if again:
            append_line(out / REPEATS, difference(target, run))
        written += copy(run, target, run.last_weights, kept, torch.float16, anew=again or not kept.is_file())
    for path in [*sorted(made.glob("figures/*.png")), *sorted(made.glob("tables/*"))]:
        target_file = out / path.relative_to(made)
        target_file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target_file)
        written.append(target_file)
    return written


def difference(first: RunFolder, second: RunFolder) -> dict[str, Any]:
    """Compare the metrics of two training runs: number of equal values, and largest difference."""
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
    """Copy results to a reproduction, skipping runs that already exist there."""
    written: list[Path] = []
    for run in finished(settings.out, "--out"):
        weights, target = run.path / KEPT_WEIGHTS, RunFolder(settings.reproduction / "runs" / run.path.name)
        if weights.is_file() and not target.exists():
            written += copy(run, target, weights, target.last_weights, torch.float32)
    return written


def finished(folder: Path, name: str) -> list[RunFolder]:
    """Return the finished runs in a folder; `name` is the argument's name for the error message."""
    runs = [run for path in sorted(folder.glob("runs/*/")) if (run := RunFolder(path)).result() is not None]
    if not runs:
        raise ValueError(bad(name, "must contain a finished run", str(folder)))
    return runs


def copy(
    run: RunFolder, target: RunFolder, weights: Path, new_weights: Path, dtype: torch.dtype, *, anew: bool = True
) -> list[Path]:
    """Copy a run's records and, if `anew`, its weights if they exist; return the written files.

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
