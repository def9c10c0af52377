"""Read some images of a folder, or of folders in it to any depth, for inspecting a model: no classes and no splits."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import final

import torch
from jaxtyping import UInt8
from torch import Tensor

from attnconv._util.errors import bad, printable
from attnconv._util.value_checks import whole
from attnconv.data.image_decoding import enlargement, fit_picture, open_picture
from attnconv.data.image_folder import SUFFIXES, is_image, listed

MOST_ENLARGED = 2.0  # without a note
NAMED = 10  # of those that are


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
        fix = "Replace or remove them, or pass skip_broken=True:\n" + listed(broken)
        raise ValueError(bad(str(folder), "must hold whole images", f"{len(broken)} broken ones", fix))
    if not found:
        got = f"only broken ones:\n{listed(broken)}" if broken else "none"
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
        if is_image(path) and not hidden and path.is_file():
            by_folder.setdefault(path.parent, []).append(path)
    return (path for some in zip_longest(*by_folder.values()) for path in some if path is not None)
