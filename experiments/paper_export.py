"""Export of runs for download: records, and half-precision weights in parts of limited size.

    records.tar.gz                settings, metrics, heads, results and logs of every run, tables and figures
    NAME.safetensors.part-00 ...  weights after the last completed epoch, split into parts of a fixed size
    parts.json                    run, parts, size in bytes and SHA-256 of each weights file

`join` verifies the files and restores the folder of runs for `attnconv reproduce --draw` and
`experiments.keep_reproduction`. The exported weights are the only checkpoints in it.
"""

import hashlib
import json
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attnconv._util.atomic_write import write_atomically
from attnconv._util.errors import bad
from attnconv.models.checkpoint import About, load_weights, read_checkpoint, weights_bytes
from attnconv.models.classifiers import build
from attnconv.training.run_folder import RunFolder

PART_BYTES = 15_000_000
RECIPE_RUNS = "recipes-kept/*/*"  # folders of scale and epochs
RECORDS = ("settings.json", "metrics.jsonl", "heads.jsonl", "result.json")


def export(out: Path, target: Path, *, weights_of: Sequence[str], part_bytes: int = PART_BYTES) -> None:
    """Write the export, replacing the files of an earlier export.

    Args:
        out: Folder that contains `runs` and `logs`.
        target: Folder to write to.
        weights_of: Runs whose weights are exported if they completed an epoch, as paths relative to `out`.
        part_bytes: Maximum size of a part in bytes, at least 1.
    """
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.part-*"):
        old.unlink()
    listed: dict[str, Any] = {}
    for place in weights_of:
        weights = RunFolder(out / place).last_weights
        if not weights.is_file():
            continue
        name = "-".join(Path(place).parts[-2:]).removeprefix("runs-")
        content = in_precision(weights, torch.float16)
        pieces = [content[start : start + part_bytes] for start in range(0, len(content), part_bytes)]
        parts = [f"{name}.safetensors.part-{number:02d}" for number in range(len(pieces))]
        for part, piece in zip(parts, pieces, strict=True):
            write_atomically(target / part, piece)
        listed[f"{name}.safetensors"] = {
            "run": Path(place).as_posix(),
            "parts": parts,
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    write_atomically(target / "parts.json", (json.dumps(listed, indent=2) + "\n").encode())
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "records.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            for path in record_files(out):
                tar.add(path, path.relative_to(out))
        write_atomically(target / "records.tar.gz", archive.read_bytes())


def record_files(out: Path) -> list[Path]:
    """Return the text files of runs, tables, figures, results of scripts, and logs."""
    runs = [f"{place}/{name}" for place in ("runs/*", f"{RECIPE_RUNS}/*") for name in RECORDS]
    others = ("runs/*-not-trained.txt", "*/results.json", "*/table.md", "logs/*", "tables/*", "figures/*.png", "*.md")
    return sorted({path for place in (*runs, *others) for path in out.glob(place)})


def in_precision(weights: Path, dtype: torch.dtype) -> bytes:
    """Return the bytes of a checkpoint with its floating-point tensors converted to `dtype`."""
    checkpoint = read_checkpoint(weights)
    model = build(checkpoint.settings)
    load_weights(model, checkpoint)
    about = About(checkpoint.classes, checkpoint.mean, checkpoint.std)
    return weights_bytes(model.to(dtype), checkpoint.settings, about, checkpoint.extra)


def join(folder: Path, out: Path) -> list[Path]:
    """Restore the folder of runs from an export.

    Args:
        folder: Folder written by `export`.
        out: Folder to restore; files with the same names are replaced.

    Returns:
        Paths of the weights files.

    Raises:
        FileNotFoundError: A part is missing. Nothing is written in this case.
        ValueError: A checksum does not match. Nothing is written in this case.
    """
    listed = json.loads((folder / "parts.json").read_text(encoding="utf-8"))
    contents = {about["run"]: _whole(folder, name, about) for name, about in listed.items()}
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "records.tar.gz") as tar:
        tar.extractall(out, filter="data")
    made = []
    for run, content in contents.items():
        weights = RunFolder(out / run).last_weights
        weights.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(weights, content)
        write_atomically(weights, in_precision(weights, torch.float32))
        made.append(weights)
    return made


def _whole(folder: Path, name: str, about: Mapping[str, Any]) -> bytes:
    """Return the bytes of a weights file, joined from its parts."""
    content = b"".join((folder / part).read_bytes() for part in about["parts"])
    if hashlib.sha256(content).hexdigest() != about["sha256"]:
        raise ValueError(bad("folder", f"must contain {name} as exported", "other bytes", "Download them again."))
    return content
