"""What of a reproduction goes into `results/`: tables, figures, every run's records, weights of one seed.

    python -m benchmarks.keep_reproduction --reproduction reproduction/mini --out results/paper-mini

Weights are those after the last epoch, in half precision; they load with `attnconv.load`.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import tyro

from attnconv._atomic import write_atomically
from attnconv._errors import bad
from attnconv.training.run_folder import RunFolder
from benchmarks.paper_export import half_precision

RECORDS = ("settings.json", "metrics.jsonl", "result.json")


@dataclass(frozen=True)
class Settings:
    """Arguments of the script."""

    reproduction: Path
    """Folder of `attnconv reproduce`."""
    out: Path
    """Folder of the results; files of the same names are replaced, others stay."""


def main(settings: Settings) -> list[Path]:
    """Copy; the files that were written.

    Raises:
        ValueError: There is no finished run.
    """
    source, out = settings.reproduction, settings.out
    runs = [folder for path in sorted(source.glob("runs/*/")) if (folder := RunFolder(path)).result() is not None]
    if not runs:
        raise ValueError(bad("--reproduction", "must hold a finished run", str(source)))
    copied = [*sorted(source.glob("figures/*.png")), *sorted(source.glob("tables/*"))]
    copied += [run.path / name for run in runs for name in RECORDS]
    written = []
    for path in copied:
        target = out / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        written.append(target)
    for run in runs:
        if "-seed-" not in run.path.name:  # the first seed's folder has none in its name
            target = out / "runs" / run.path.name / "weights.safetensors"
            write_atomically(target, half_precision(run.last_weights))
            written.append(target)
    return written


if __name__ == "__main__":
    print("\n".join(str(path) for path in main(tyro.cli(Settings))))
