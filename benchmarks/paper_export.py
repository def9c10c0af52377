"""What leaves the machine that trained: records, and half-precision weights in parts of a size that travels.

    records.tar.gz                settings, metrics, heads, results and logs of every run
    NAME.safetensors.part-00 ...  the weights after the last complete epoch, cut at a fixed number of bytes
    parts.json                    per weights file its parts, bytes and SHA-256

`join` puts the parts together again and checks them; the files then load with `attnconv.load`.
"""

import hashlib
import json
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from attnconv._atomic import write_atomically
from attnconv._errors import bad
from attnconv.models.build import build
from attnconv.models.checkpoint import read_checkpoint, restore, save_weights

PART_BYTES = 15_000_000
RECIPE_RUNS = "recipes-kept/*/*"  # scale and epochs
RECORDS = ("settings.json", "metrics.jsonl", "heads.jsonl", "result.json")


def export(out: Path, target: Path, *, weights_of: Sequence[str], part_bytes: int = PART_BYTES) -> None:
    """Write everything anew; what an earlier call left is replaced.

    Args:
        out: Folder of the runs, `runs` and `logs` in it.
        target: Folder to write.
        weights_of: Names of the runs whose weights go along, where an epoch is complete; of a run that lies elsewhere
            its path from the folder `runs`, whose last two parts then name it.
        part_bytes: Most bytes of a part, at least 1.

    Raises:
        ValueError: Fewer than one byte.
    """
    if part_bytes < 1:
        raise ValueError(bad("part_bytes", "must be at least 1", part_bytes))
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.part-*"):
        old.unlink()
    listed: dict[str, Any] = {}
    for place in weights_of:
        weights = out / "runs" / place / "checkpoints" / "last.safetensors"
        if not weights.is_file():
            continue
        name = "-".join(Path(place).parts[-2:])
        content = in_precision(weights, torch.float16)
        pieces = [content[start : start + part_bytes] for start in range(0, len(content), part_bytes)]
        parts = [f"{name}.safetensors.part-{number:02d}" for number in range(len(pieces))]
        for part, piece in zip(parts, pieces, strict=True):
            write_atomically(target / part, piece)
        listed[f"{name}.safetensors"] = {
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
    """Files of runs that are text, tables and results of scripts, and logs."""
    places = ("runs/*", f"{RECIPE_RUNS}/*")
    found = [path for place in places for name in RECORDS for path in out.glob(f"{place}/{name}")]
    found += [*out.glob("runs/*-not-trained.txt"), *out.glob("*/results.json"), *out.glob("*/table.md")]
    return sorted({*found, *out.glob("logs/*")})


def in_precision(weights: Path, dtype: torch.dtype) -> bytes:
    """A checkpoint with its floating-point tensors in a dtype."""
    checkpoint = read_checkpoint(weights)
    model = build(checkpoint.settings)
    restore(model, checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / weights.name
        save_weights(
            file,
            model.to(dtype),
            checkpoint.settings,
            classes=checkpoint.classes,
            mean=checkpoint.mean,
            std=checkpoint.std,
            extra=checkpoint.extra,
        )
        return file.read_bytes()


def join(folder: Path) -> list[Path]:
    """Put weights together from their parts, beside them.

    Args:
        folder: That `export` wrote.

    Returns:
        The files, in order.

    Raises:
        ValueError: A part is missing, or the whole is not what was exported.
    """
    listed = json.loads((folder / "parts.json").read_text(encoding="utf-8"))
    made = []
    for name, about in listed.items():
        missing = [part for part in about["parts"] if not (folder / part).is_file()]
        if missing:
            raise ValueError(bad("folder", f"must hold all parts of {name}", f"none of {', '.join(missing)}"))
        content = b"".join((folder / part).read_bytes() for part in about["parts"])
        if hashlib.sha256(content).hexdigest() != about["sha256"]:
            fix = "Fetch its parts again."
            raise ValueError(bad("folder", f"must hold {name} as it was exported", "other bytes", fix))
        write_atomically(folder / name, content)
        made.append(folder / name)
    return made
