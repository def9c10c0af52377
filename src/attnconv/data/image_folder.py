"""Image folders: one folder per class, optionally inside folders for the splits.

    root/train/CLASS/*.png          root/CLASS/*.png
    root/test/CLASS/*.png

``test`` is what a run is tested on; without it ``val`` (or ``valid``, ``validation``) is, and with both ``val`` is the
validation set. With neither, every fifth image is held out for testing, by the split's seed. Images of at most
80 million pixels are turned upright (EXIF), converted to RGB, scaled until they cover the chosen square, and cropped to
it about the centre.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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


def read_folders(settings: DataSettings) -> tuple[dict[str, ImageSet], tuple[str, ...]]:
    """Read the image folders under a root.

    Args:
        settings: root, image size, the seed of splits, and where the cache is.

    Returns:
        The sets ``train``, ``test`` and, where it has a folder, ``validation``; and the names of the classes, which are
        those of the folders in alphabetical order, with escapes for what cannot be printed.

    Raises:
        ValueError: if a folder is missing or empty, test images are of unknown classes, images are broken (the message
            names them), or they do not fit in memory.
    """
    root = Path(settings.root).expanduser()
    if not root.is_dir():
        raise ValueError(bad("--data.root", "must be a folder that exists", str(root.absolute())))
    folders = {"train": root / "train" if (root / "train").is_dir() else root}
    if folders["train"] != root:
        apart = [root / name for name in _VALIDATION if (root / name).is_dir()][:1]
        if (root / "test").is_dir():
            apart.insert(0, root / "test")
        folders |= zip(("test", "validation"), apart, strict=False)
    classes = _classes(folders["train"])
    sets = {name: _read_set(folder, classes, settings) for name, folder in folders.items()}
    if "test" not in sets:
        train = sets["train"]
        count = max(1, len(train) // 5)
        kept, out = held_out(train.labels, count, seed=settings.split_seed, stratify=settings.stratify)
        sets |= {"train": train.take(kept), "test": train.take(out)}
    return sets, tuple(map(printable, classes))


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
    tensors = cached("folder", key, lambda: {"images": _decode(paths, size)}, folder=cache_folder(settings.cache))
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
        fix = "Replace or remove them:\n" + listed(broken)
        raise ValueError(bad("--data.root", "must hold whole images only", f"{len(broken)} broken ones", fix))
    return torch.stack([result for result in results if not isinstance(result, str)])


def listed(sentences: Sequence[str]) -> str:
    """The first ten, one a line, and how many more there are."""
    more = [f"... and {len(sentences) - 10} more"] if len(sentences) > 10 else []
    return "\n".join([*sentences[:10], *more])
