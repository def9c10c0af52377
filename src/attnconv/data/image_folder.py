"""Read folders of images, scaled and cropped as `read_image` does.

`read_folders` reads a data set: one folder per class, optionally inside folders for the splits.

    root/train/CLASS/*.png          root/CLASS/*.png
    root/test/CLASS/*.png

A run is tested on `test`; without it on `val` (or `valid`, `validation`), and with both `val` is the validation set.
With neither, every fifth image is held out for testing, by the split's seed.

`read_pictures` reads some images for inspecting a model, of a folder and of folders in it to any depth.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import final

import torch
from jaxtyping import UInt8
from torch import Tensor

from attnconv._util.errors import bad, printable
from attnconv._util.value_checks import whole
from attnconv.data.image_files import enlargement, fit_picture, open_picture, read_image
from attnconv.data.image_set import ImageSet, held_out
from attnconv.data.settings import DataSettings

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
LARGEST_SET = 16 << 30  # bytes in memory
MOST_ENLARGED = 2.0  # without a note
NAMED = 10  # broken files, or enlarged ones


def read_folders(settings: DataSettings) -> tuple[dict[str, ImageSet], tuple[str, ...]]:
    """Read the sets `train`, `test` and, where it has a folder, `validation`; and the classes in alphabetical order."""
    root = Path(settings.root).expanduser()
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
    if unknown := sorted(set(_classes(folder)) - set(classes)):
        got = f"{', '.join(unknown)} in {folder.absolute()}"
        raise ValueError(bad("data.root", "must hold the classes of the training images only", got))
    paths, labels = [], []
    for label, name in enumerate(classes):
        if not (folder / name).is_dir():
            continue
        found = sorted(path for path in (folder / name).iterdir() if _is_image(path))
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
        fix = "Replace or remove them:\n" + _listed(broken)
        raise ValueError(bad("data.root", "must hold whole images only", f"{len(broken)} broken ones", fix))
    return torch.stack([result for result in results if not isinstance(result, str)])


@final
@dataclass(frozen=True, eq=False)
class FolderPictures:
    """Images of a folder.

    Attributes:
        pixels: Bytes.
        names: Of the files, below the folder, escaped for printing.
        notes: Why each file was skipped, and which files had to be enlarged more than twice.
    """

    pixels: UInt8[Tensor, "b channels height width"]
    names: tuple[str, ...]
    notes: tuple[str, ...]


def read_pictures(
    folder: Path | str,
    sizes: tuple[int, int],
    *,
    count: int,
    channels: int = 3,
    skip_broken: bool = False,
    varied: bool = False,
) -> FolderPictures:
    """Read some images of a folder, each scaled to cover a rectangle and cropped to it about the centre.

    Args:
        folder: Holds images, or folders of them.
        sizes: Height and width in pixels.
        count: How many images to read at most, at least 1: in turn from each folder, by name.
        channels: 3 for RGB, 1 for grey.
        skip_broken: Skip files that cannot be read, instead of raising.
        varied: Whether an image of one colour counts as broken.

    Raises:
        TypeError: `count` is not a whole number.
        ValueError: A size is below 1, the folder is missing or holds no whole image, or files are broken (the message
            names them) and are not to be skipped.
    """
    count, folder = whole("count", count, 1), Path(folder).expanduser()
    if min(sizes) < 1:
        raise ValueError(bad("sizes", "must be at least 1", sizes))
    if not folder.is_dir():
        raise ValueError(bad("folder", "must be a folder that exists", str(folder.absolute())))
    found: list[tuple[str, Tensor, float]] = []
    broken: list[str] = []
    for path in _in_turn(folder):
        if len(found) + (0 if skip_broken else len(broken)) == count:
            break
        try:
            found.append((printable(path.relative_to(folder).as_posix()), *_read(path, sizes, channels, varied)))
        except ValueError as error:
            broken.append(str(error))
    if broken and not skip_broken:
        fix = "Replace or remove them, or pass skip_broken=True:\n" + _listed(broken)
        raise ValueError(bad(str(folder), "must hold whole images", f"{len(broken)} broken ones", fix))
    if not found:
        got = f"only broken ones:\n{_listed(broken)}" if broken else "none"
        raise ValueError(bad(str(folder), f"must hold images ({', '.join(SUFFIXES)})", got))
    notes = [f"Skipped a broken file. {sentence}" for sentence in broken]
    if enlarged := [f"{name} {factor:.1f} times" for name, _, factor in found if factor > MOST_ENLARGED]:
        more = f" and {len(enlarged) - NAMED} more" if len(enlarged) > NAMED else ""
        notes.append(f"Enlarged to {sizes[0]} x {sizes[1]} pixels: {', '.join(enlarged[:NAMED])}{more}.")
    names, images, _ = zip(*found, strict=True)
    return FolderPictures(torch.stack(images), names, tuple(notes))


def _read(path: Path, sizes: tuple[int, int], channels: int, varied: bool) -> tuple[Tensor, float]:
    """Decode one image; returns it and by how much it is enlarged."""
    with open_picture(path) as image:
        pixels, factor = fit_picture(image, sizes, channels=channels), enlargement(image, sizes)
    if varied and pixels[0].numel() > 1 and bool((pixels == pixels[:, :1, :1]).all()):
        raise ValueError(bad(str(path), "must show more than one colour", f"{pixels[:, 0, 0].tolist()} everywhere"))
    return pixels, factor


def _in_turn(folder: Path) -> Iterator[Path]:
    """All image files below a folder: the first of each folder that holds any, then the second of each, and so on."""
    by_folder: dict[Path, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if _is_image(path) and not hidden and path.is_file():
            by_folder.setdefault(path.parent, []).append(path)
    return (path for some in zip_longest(*by_folder.values()) for path in some if path is not None)


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.name[0] != "."


def _listed(sentences: Sequence[str]) -> str:
    """The first sentences, one a line, and how many more there are."""
    more = [f"... and {len(sentences) - NAMED} more"] if len(sentences) > NAMED else []
    return "\n".join([*sentences[:NAMED], *more])
