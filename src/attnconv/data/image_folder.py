"""Read image folders: one folder per class, optionally inside folders for the splits.

    root/train/CLASS/*.png          root/CLASS/*.png
    root/test/CLASS/*.png

A run is tested on `test`; without it on `val` (or `valid`, `validation`), and with both `val` is the validation set.
With neither, every fifth image is held out for testing, by the split's seed. Images are scaled and cropped as
`read_image` does.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from attnconv._util.errors import bad, printable
from attnconv.data.image_decoding import read_image
from attnconv.data.image_set import ImageSet, held_out
from attnconv.data.settings import DataSettings

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
LARGEST_SET = 16 << 30
"""Largest set that is read into memory, in bytes."""


def read_folders(settings: DataSettings) -> tuple[dict[str, ImageSet], tuple[str, ...]]:
    """Read the sets `train`, `test` and, where it has a folder, `validation`; and the names of the classes.

    The names are those of the folders in alphabetical order, with escapes for what cannot be printed.
    Raises `ValueError` for missing or empty folders, unknown classes, broken images and sets that do not fit in memory.
    """
    root = Path(settings.root).expanduser()
    if not root.is_dir():
        raise ValueError(bad("data.root", "must be a folder that exists", str(root.absolute())))
    folders = {"train": root / "train" if (root / "train").is_dir() else root}
    if folders["train"] != root:
        apart = [root / name for name in ("val", "valid", "validation") if (root / name).is_dir()][:1]
        if (root / "test").is_dir():
            apart.insert(0, root / "test")
        folders |= zip(("test", "validation"), apart, strict=False)
    classes = _classes(folders["train"])
    sets = {name: _read_set(folder, classes, settings.image_size) for name, folder in folders.items()}
    if "test" not in sets:
        train = sets["train"]
        count = max(1, len(train) // 5)
        kept, out = held_out(train.labels, count, seed=settings.split_seed, stratify=settings.stratify)
        sets |= {"train": train.take(kept), "test": train.take(out)}
    return sets, tuple(map(printable, classes))


def _classes(folder: Path) -> tuple[str, ...]:
    names = tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."))
    if len(names) < 2:
        got = f"{', '.join(names) or 'no folder'} in {folder.absolute()}"
        raise ValueError(bad("data.root", "must hold at least two folders, one per class", got))
    return names


def _read_set(folder: Path, classes: tuple[str, ...], size: int) -> ImageSet:
    """Read one split."""
    if unknown := sorted(set(_classes(folder)) - set(classes)):
        got = f"{', '.join(unknown)} in {folder.absolute()}"
        raise ValueError(bad("data.root", "must hold the classes of the training images only", got))
    paths, labels = [], []
    for label, name in enumerate(classes):
        if not (folder / name).is_dir():
            continue
        found = sorted(path for path in (folder / name).iterdir() if is_image(path))
        if not found:
            requirement = f"must hold images ({', '.join(SUFFIXES)})"
            raise ValueError(bad(str(folder / name), requirement, "none", "Add some, or remove the folder."))
        paths += found
        labels += [label] * len(found)
    if (needed := len(paths) * 3 * size * size) > LARGEST_SET:
        got = f"{size}, which takes {needed / (1 << 30):.1f} GiB for {len(paths):,} images"
        requirement = f"must be such that images fit in {LARGEST_SET >> 30} GiB"
        raise ValueError(bad("data.image_size", requirement, got))
    return ImageSet(_decode(paths, size), torch.tensor(labels))


def is_image(path: Path) -> bool:
    """Whether a name is that of an image, and not hidden."""
    return path.suffix.lower() in SUFFIXES and path.name[0] != "."


def _decode(paths: list[Path], size: int) -> UInt8[Tensor, "n c size size"]:
    """Decode all files, a few at a time: Pillow releases the GIL for large images."""

    def attempt(path: Path) -> Tensor | str:
        try:
            return read_image(path, size)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        results = list(pool.map(attempt, paths))
    if broken := [result for result in results if isinstance(result, str)]:
        fix = "Replace or remove them:\n" + listed(broken)
        raise ValueError(bad("data.root", "must hold whole images only", f"{len(broken)} broken ones", fix))
    return torch.stack([result for result in results if not isinstance(result, str)])


def listed(sentences: Sequence[str]) -> str:
    """The first ten sentences, one a line, and how many more there are."""
    more = [f"... and {len(sentences) - 10} more"] if len(sentences) > 10 else []
    return "\n".join([*sentences[:10], *more])
