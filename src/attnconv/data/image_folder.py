"""Image folders: one folder per class, optionally inside folders for the splits.

    root/train/CLASS/*.png          root/CLASS/*.png
    root/test/CLASS/*.png

``test`` is what a run is tested on; without it ``val`` (or ``valid``, ``validation``) is, and with both ``val`` is the
validation set. With neither, every fifth image is held out for testing, by the split's seed. Images of at most
80 million pixels are turned upright (EXIF), converted to RGB, scaled until they cover the chosen square, and cropped to
it about the centre.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from attnconv._util.errors import bad, printable
from attnconv.data.decoded_cache import cache_folder, cached, key_of
from attnconv.data.image_decoding import fit_picture, open_picture
from attnconv.data.image_set import ImageSet, held_out
from attnconv.data.settings import DataSettings

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
LARGEST_SET = 16 << 30
"""Largest set that is taken into memory, in bytes."""

_VALIDATION = ("val", "valid", "validation")


@dataclass(frozen=True, eq=False)
class FolderSets:
    """What a root holds: a training set, the sets that have a folder of their own, and the classes."""

    train: ImageSet
    validation: ImageSet | None
    test: ImageSet
    classes: tuple[str, ...]


def read_folders(settings: DataSettings) -> FolderSets:
    """Read the image folders under a root.

    Args:
        settings: root, image size, the seed of splits, and where the cache is.

    Returns:
        The sets and the names of the classes, which are those of the folders in alphabetical order, with
        escapes for what cannot be printed.

    Raises:
        ValueError: if a folder is missing or empty, test images are of unknown classes, images are broken (the message
            names them), or they do not fit in memory.
    """
    root = Path(settings.root).expanduser()
    if not root.is_dir():
        raise ValueError(bad("--data.root", "must be a folder that exists", str(root.absolute())))
    train_folder = root / "train" if (root / "train").is_dir() else root
    apart = [root / name for name in _VALIDATION if (root / name).is_dir()][:1] if train_folder != root else []
    if train_folder != root and (root / "test").is_dir():
        apart.append(root / "test")
    classes = _classes(train_folder)
    names = tuple(map(printable, classes))
    train = _read_set(train_folder, classes, settings)
    others = [_read_set(folder, classes, settings) for folder in apart]
    if not others:
        count = max(1, len(train) // 5)
        kept, out = held_out(train.labels, count, seed=settings.split_seed, stratify=settings.stratify)
        return FolderSets(train.take(kept), None, train.take(out), names)
    return FolderSets(train, others[0] if len(others) == 2 else None, others[-1], names)


def read_image(
    path: Path | str, size: int | tuple[int, int], *, channels: int = 3
) -> UInt8[Tensor, "channels height width"]:
    """Read one image file, scaled to cover a square or rectangle and cropped to it about the centre.

    Args:
        path: the file: BMP, GIF, JPEG, PNG, PPM, TIFF or WebP, of at most 80,000,000 pixels (WebP 12,000,000) and
            65,535 a side.
        size: height and width of the result in pixels, one number or two, at least 1.
        channels: 3 for RGB, 1 for grey.

    Returns:
        The pixels as bytes.

    Raises:
        ValueError: if the file is missing, broken, too large or not of 8 bits a channel, or an argument is wrong.
    """
    if min(sizes := (size, size) if isinstance(size, int) else size) < 1:
        raise ValueError(bad("size", "must be at least 1", size))
    if channels not in (1, 3):
        raise ValueError(bad("channels", "must be 1 or 3", channels))
    with open_picture(path) as image:
        return fit_picture(image, sizes, channels=channels)


def _classes(folder: Path) -> tuple[str, ...]:
    names = tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."))
    if len(names) < 2:
        got = f"{', '.join(names) or 'no folder'} in {folder.absolute()}"
        raise ValueError(bad("--data.root", "must hold at least two folders, one per class", got))
    return names


def _read_set(folder: Path, classes: tuple[str, ...], settings: DataSettings) -> ImageSet:
    """Read one split, from the cache if it has been read before."""
    unknown = sorted(set(_classes(folder)) - set(classes))
    if unknown:
        got = f"{', '.join(unknown)} in {folder.absolute()}"
        raise ValueError(bad("--data.root", "must hold the classes of the training images only", got))
    files = {name: _images(folder / name) for name in classes if (folder / name).is_dir()}
    empty = [name for name, paths in files.items() if not paths]
    if empty:
        requirement = f"must hold images ({', '.join(SUFFIXES)})"
        raise ValueError(bad(str(folder / empty[0]), requirement, "none", "Add some, or remove the folder."))
    paths = [path for name in classes for path in files.get(name, [])]
    labels = torch.tensor([classes.index(path.parent.name) for path in paths])
    size = settings.image_size
    if (needed := len(paths) * 3 * size * size) > LARGEST_SET:
        got = f"{needed / (1 << 30):.1f} GiB for {len(paths):,} images"
        requirement = f"must be such that images fit in {LARGEST_SET >> 30} GiB"
        raise ValueError(bad("--data.image-size", requirement, f"{size}, which takes {got}"))
    states = [f"{path.relative_to(folder)} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths]
    key = key_of("folder", str(folder.absolute()), str(size), "RGB", *states)
    decode = partial(_decode, paths, size)
    tensors = cached("folder", key, lambda: {"images": decode()}, folder=cache_folder(settings.cache))
    return ImageSet(tensors["images"], labels)


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.name[0] != ".")


def _decode(paths: list[Path], size: int) -> UInt8[Tensor, "n c size size"]:
    """Decode all files, a few at a time (Pillow lets go of the interpreter for large images)."""

    def attempt(path: Path) -> Tensor | str:
        try:
            return read_image(path, size)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        results = list(pool.map(attempt, paths))
    broken = [result for result in results if isinstance(result, str)]
    if broken:
        more = f"\n... and {len(broken) - 10} more" if len(broken) > 10 else ""
        fix = "Replace or remove them:\n" + "\n".join(broken[:10]) + more
        raise ValueError(bad("--data.root", "must hold whole images only", f"{len(broken)} broken ones", fix))
    return torch.stack([result for result in results if not isinstance(result, str)])
