"""Read image files and folders of images. This is the only module that opens image files, which are untrusted.

The format, size and bit depth, and the chunks of PNG files, are validated before pixels are decoded. Pillow needs 4
bytes per pixel, and up to 10 while it removes transparency: 800 MB for the largest image allowed. Large images are
decoded one at a time.

`read_folders` reads a data set with one folder per class, optionally in a folder per split:

    root/train/CLASS/*.png          root/CLASS/*.png
    root/test/CLASS/*.png

Images are read as RGB, also from subfolders of the classes, as in torchvision's `ImageFolder`.

The test images are those of `test`. If there is also a folder `val` (or `valid`, `validation`), it is the validation
set; without `test`, it is the test set. If there is neither, a fifth of the images, selected by the split seed, is the
test set.
"""

import io
import os
import re
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import final

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError
from PIL.Image import Transpose
from torch import Tensor

from attnconv._util.errors import bad, printable
from attnconv._util.value_checks import whole
from attnconv.data.image_set import ImageSet, held_out
from attnconv.data.settings import DataSettings

# Other formats are disabled, which excludes Pillow's rarer decoders and the external programs that some of them start.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
LARGEST_PICTURE = 80_000_000  # pixels
LARGEST_WEBP = 12_000_000  # pixels; the decoder keeps several copies, 16 bytes per pixel or 210 MB
LARGE_PICTURE = 16_000_000  # pixels; larger images are decoded one at a time
LONGEST_SIDE = 65_535  # pixels, the limit of JPEG; Pillow needs up to 50 bytes per pixel for very narrow images
# Transposition for each EXIF orientation; the sideways ones exchange height and width.
_SIDEWAYS = {5: Transpose.TRANSPOSE, 6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE, 8: Transpose.ROTATE_90}
_TURNS = {2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM, **_SIDEWAYS}
_DEEP = re.compile(r";16[BLN]")  # in Pillow's pixel layout; `BGR;16` has only 5 or 6 bits per channel
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_PNG_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_PIECE = 1 << 16  # bytes

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
LARGEST_SET = 16 << 30  # bytes in memory
MOST_ENLARGED = 2.0  # factor above which a note is added
NAMED = 10  # maximum number of files in a message

_one_large = threading.Lock()


class PictureError(ValueError):
    """Error for an image that is invalid, or does not have 8 bits per channel."""


class UnsupportedTypeError(PictureError):
    """Error for data that are not an image in a supported format."""


class TooLargeError(PictureError):
    """Error for an image with too many bytes or pixels."""


@contextmanager
def open_picture(
    source: Path | str | bytes, name: str = "", *, formats: tuple[str, ...] = FORMATS, largest: int = LARGEST_PICTURE
) -> Iterator[ImageFile.ImageFile]:
    """Open and validate an image of at most `largest` pixels, given the path or the content of its file.

    Errors in the `with` block are converted to `PictureError`s that give the `name` or the path of the image.
    """
    name = name or ("image" if isinstance(source, bytes) else str(source))
    if not isinstance(source, bytes) and not Path(source).is_file():  # reading a pipe might never end
        raise PictureError(bad(name, "must be an image file", "no such file"))
    try:
        with (
            io.BytesIO(source) if isinstance(source, bytes) else Path(source).open("rb") as file,
            Image.open(file, formats=formats) as image,
        ):
            _check_header(image, name, largest)
            if image.format == "PNG":
                place = file.tell()
                _check_png(file)
                file.seek(place)  # the start of the pixels
            with _one_large if image.width * image.height > LARGE_PICTURE else nullcontext():
                yield image
    except PictureError:
        raise
    except UnidentifiedImageError as error:
        requirement = f"must be a {' or '.join(', '.join(formats).rsplit(', ', 1))} image"
        raise UnsupportedTypeError(bad(name, requirement, "other content")) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning, MemoryError) as error:
        got = str(error) or "an image that does not fit in memory"
        raise TooLargeError(bad(name, f"must have at most {largest:,} pixels", got)) from error
    except Exception as error:  # Pillow's decoders raise almost any exception for broken files
        first = str(error).partition("\n")[0][:200].rstrip(".") or type(error).__name__
        raise PictureError(bad(name, "must be a valid image", first)) from error


def read_image(
    path: Path | str, size: int | tuple[int, int], *, channels: int = 3
) -> UInt8[Tensor, "channels height width"]:
    """Read an image file as uint8, resize it to cover the given size, and centre-crop it.

    Args:
        path: BMP, GIF, JPEG, PNG, PPM, TIFF or WebP file with at most 80,000,000 pixels (WebP 12,000,000) and sides of
            at most 65,535 pixels.
        size: Height and width of the result in pixels, or one integer for both, at least 1.
        channels: 3 for RGB, 1 for greyscale.

    Raises:
        ValueError: If the file is missing, broken, too large or not of 8 bits per channel, or an argument is invalid.
    """
    if min(sizes := (size, size) if isinstance(size, int) else size) < 1:
        raise ValueError(bad("size", "must be at least 1", size))
    if channels not in (1, 3):
        raise ValueError(bad("channels", "must be 1 or 3", channels))
    with open_picture(path) as image:
        return fit_picture(image, sizes, channels=channels)


def fit_picture(
    image: Image.Image, sizes: tuple[int, int], *, channels: int = 3
) -> UInt8[Tensor, "channels height width"]:
    """Decode an open image, apply its EXIF orientation, resize it to cover the given size, and centre-crop it.

    Only the first frame is decoded, and transparency is ignored. The result is uint8.
    """
    mode = "RGB" if channels == 3 else "L"
    image.load()  # before EXIF, which may follow the pixels of a PNG
    if image.mode == "P" and image.palette is None:
        raise SyntaxError("no palette")
    turn = _orientation(image)
    width, height = sizes if turn in _SIDEWAYS else sizes[::-1]
    if image.mode == "P" and image.has_transparency_data:
        image = image.convert("RGBA")  # avoids a warning from Pillow
    # Images with palettes or transparency must be converted before resizing; for others, converting later is faster.
    plain = image if image.mode in ("RGB", "L", "CMYK", "YCbCr") else image.convert(mode)
    fitted = ImageOps.fit(plain, (width, height), Image.Resampling.BILINEAR).convert(mode)
    if turn in _TURNS:  # faster after resizing
        fitted = fitted.transpose(_TURNS[turn])
    pixels = np.asarray(fitted, np.uint8).reshape(*sizes, channels).transpose(2, 0, 1).copy()
    return torch.from_numpy(pixels)


def _orientation(image: Image.Image) -> int:
    with suppress(Exception):  # the pixels are valid even if EXIF is not
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    return 1


def _check_header(image: ImageFile.ImageFile, name: str, largest: int) -> None:
    got = f"{image.width} x {image.height}"
    most = min(largest, LARGEST_WEBP) if image.format == "WEBP" else largest
    if image.width * image.height > most:
        requirement = f"must have at most {most:,} pixels" + (" as WebP" if most < largest else "")
        raise TooLargeError(bad(name, requirement, got))
    if max(image.size) > LONGEST_SIDE:
        raise TooLargeError(bad(name, f"must have sides of at most {LONGEST_SIDE:,} pixels", got))
    codec, arguments = (image.tile[0][0], image.tile[0][3]) if image.tile else ("", "")
    deep = codec in ("ppm", "ppm_plain") and isinstance(arguments, tuple) and arguments[-1] > 255  # the maximum value
    if image.mode[0] in "IF" or deep or _DEEP.search(str(arguments)):
        raise PictureError(bad(name, "must have 8 bits per channel", f"an image of mode {image.mode}, {arguments}"))


def _check_png(file: io.BytesIO | io.BufferedReader) -> None:
    """Verify the checksums of the chunks of a PNG file, and that its pixel data have the size stated by the header."""
    size = file.seek(0, io.SEEK_END)
    file.seek(8)
    inflate, missing, kind = zlib.decompressobj(), 0, b""
    while kind != b"IEND":
        length, kind = struct.unpack(">I4s", file.read(8))
        name = kind.decode("ascii", "replace")
        if length > size - file.tell():
            raise SyntaxError(f"a truncated chunk {name}")
        data = file.read(length)
        if struct.unpack(">I", file.read(4))[0] != zlib.crc32(data, zlib.crc32(kind)):
            raise SyntaxError(f"a wrong checksum of chunk {name}")
        if kind == b"IHDR":
            missing = _png_bytes(data)
        while kind == b"IDAT" and missing > 0:
            piece = inflate.decompress(data, _PIECE)
            missing, data = missing - len(piece), inflate.unconsumed_tail
            if not piece and not data:
                break
    if missing > 0:
        raise SyntaxError(f"pixel data with {missing:,} missing bytes")


def _png_bytes(header: bytes) -> int:
    """Return the decompressed size in bytes of a PNG's pixel data: whole bytes of pixels and a filter byte per row."""
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    bits = depth * _PNG_CHANNELS[colour]
    total = 0
    for left, top, across, down in _PNG_PASSES if interlaced else ((0, 0, 1, 1),):
        columns, rows = max(0, -(-(width - left) // across)), max(0, -(-(height - top) // down))
        total += rows * (1 + -(-columns * bits // 8)) if columns else 0
    return total


def class_names(root: Path) -> tuple[str, ...]:
    """List the classes of a data set of image folders in alphabetical order."""
    return _classes(root / "train" if (root / "train").is_dir() else root)


def read_folders(settings: DataSettings, image_size: int) -> tuple[dict[str, ImageSet], tuple[str, ...]]:
    """Read the sets `train`, `test` and, if it has a folder, `validation`, and the classes in alphabetical order."""
    root, image_size = Path(settings.root).expanduser(), whole("image_size", image_size, 1)
    folders = {"train": root / "train" if (root / "train").is_dir() else root}
    if folders["train"] != root:
        apart = [root / name for name in ("val", "valid", "validation") if (root / name).is_dir()][:1]
        if (root / "test").is_dir():
            apart.insert(0, root / "test")
        folders |= zip(("test", "validation"), apart, strict=False)
    classes = class_names(root)
    sets = {name: _read_set(folder, classes, image_size) for name, folder in folders.items()}
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
        raise ValueError(bad("data.root", "must contain at least two folders, one per class", got))
    return names


def _read_set(folder: Path, classes: tuple[str, ...], size: int) -> ImageSet:
    if unknown := sorted(set(_classes(folder)) - set(classes)):
        got = f"{', '.join(unknown)} in {folder.absolute()}"
        raise ValueError(bad("data.root", "must contain only folders of classes that have training images", got))
    paths, labels = [], []
    for label, name in enumerate(classes):
        if not (folder / name).is_dir():
            continue
        found = list(_images_in(folder / name))
        if not found:
            requirement = f"must contain images ({', '.join(SUFFIXES)})"
            raise ValueError(bad(str(folder / name), requirement, "none", "Add images, or remove the folder."))
        paths += found
        labels += [label] * len(found)
    if (needed := len(paths) * 3 * size * size) > LARGEST_SET:
        got = f"{size}, which requires {needed / (1 << 30):.1f} GiB for {len(paths):,} images"
        raise ValueError(bad("image_size", f"must be so small that all images fit in {LARGEST_SET >> 30} GiB", got))
    return ImageSet(_decode(paths, size), torch.tensor(labels))


def _decode(paths: list[Path], size: int) -> UInt8[Tensor, "n c size size"]:
    """Decode all files, several in parallel, since Pillow releases the GIL for large images."""

    def attempt(path: Path) -> Tensor | str:
        try:
            return read_image(path, size)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        results = list(pool.map(attempt, paths))
    if broken := [result for result in results if isinstance(result, str)]:
        fix = "Replace or remove them:\n" + _listed(broken)
        raise ValueError(bad("data.root", "must contain only valid images", f"broken files ({len(broken)})", fix))
    return torch.stack([result for result in results if not isinstance(result, str)])


@final
@dataclass(frozen=True, eq=False)
class FolderPictures:
    """Images read from a folder or a data set.

    Attributes:
        pixels: Images (b, channels, height, width), uint8.
        names: Paths of the files relative to the folder, escaped for printing.
        notes: One sentence for each skipped file, and one about images that were enlarged more than twofold, if any.
        labels: The class of each image; empty if unknown.
        classes: Names of all classes of the data set; empty if unknown.
    """

    pixels: UInt8[Tensor, "b channels height width"]
    names: tuple[str, ...]
    notes: tuple[str, ...]
    labels: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


def read_pictures(
    folder: Path | str,
    sizes: tuple[int, int],
    *,
    count: int,
    channels: int = 3,
    skip_broken: bool = False,
    varied: bool = False,
) -> FolderPictures:
    """Read images from a folder, resize them to cover the given sizes, and centre-crop them.

    Args:
        folder: Folder of images, which may be in subfolders.
        sizes: Height and width of the result in pixels.
        count: Maximum number of images, at least 1; they are taken from the subfolders in turn, in alphabetical order.
        channels: 3 for RGB, 1 for greyscale.
        skip_broken: Skip files that cannot be read, instead of raising an error.
        varied: Treat images of a single colour as broken.

    Raises:
        TypeError: If `count` is not an integer.
        ValueError: If a size is below 1, the folder is missing or contains no valid image, or files are broken and
            `skip_broken` is False (the message lists them).
    """
    count, folder = whole("count", count, 1), Path(folder).expanduser()
    if min(sizes) < 1:
        raise ValueError(bad("sizes", "must be at least 1", sizes))
    if not folder.is_dir():
        raise ValueError(bad("folder", "must be an existing folder", folder.absolute()))
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
        raise ValueError(bad(str(folder), "must contain only valid images", f"broken files ({len(broken)})", fix))
    if not found:
        got = f"only broken files:\n{_listed(broken).removesuffix('.')}" if broken else "none"
        raise ValueError(bad(str(folder), f"must contain images ({', '.join(SUFFIXES)})", got))
    notes = [f"Skipped a broken file. {sentence}" for sentence in broken]
    if enlarged := [f"{name} {factor:.1f} times" for name, _, factor in found if factor > MOST_ENLARGED]:
        more = f" and {len(enlarged) - NAMED} more" if len(enlarged) > NAMED else ""
        notes.append(f"Enlarged to {sizes[0]} x {sizes[1]} pixels: {', '.join(enlarged[:NAMED])}{more}.")
    names, images, _ = zip(*found, strict=True)
    return FolderPictures(torch.stack(images), names, tuple(notes))


def _read(path: Path, sizes: tuple[int, int], channels: int, varied: bool) -> tuple[Tensor, float]:
    """Decode one image; return it and the factor by which it is enlarged."""
    with open_picture(path) as image:
        pixels = fit_picture(image, sizes, channels=channels)
        width, height = image.size[::-1] if _orientation(image) in _SIDEWAYS else image.size
    factor = max(sizes[0] / height, sizes[1] / width)
    if varied and pixels[0].numel() > 1 and bool((pixels == pixels[:, :1, :1]).all()):
        raise ValueError(bad(str(path), "must have more than one colour", f"{pixels[:, 0, 0].tolist()} in every pixel"))
    return pixels, factor


def _in_turn(folder: Path) -> Iterator[Path]:
    """Yield the image files of a folder and its subfolders: the first of each folder, then the second, and so on."""
    by_folder: dict[Path, list[Path]] = {}
    for path in _images_in(folder):
        by_folder.setdefault(path.parent, []).append(path)
    return (path for some in zip_longest(*by_folder.values()) for path in some if path is not None)


def _images_in(folder: Path) -> Iterator[Path]:
    """Yield the image files of a folder and its subfolders in alphabetical order, except hidden ones.

    Broken links are included, so that reading them raises an error.
    """
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix.lower() in SUFFIXES and not hidden and not path.is_dir():
            yield path


def _listed(sentences: Sequence[str]) -> str:
    """Return the first sentences, one per line, and the number of others."""
    more = [f"... and {len(sentences) - NAMED} more"] if len(sentences) > NAMED else []
    return "\n".join([*sentences[:NAMED], *more])
