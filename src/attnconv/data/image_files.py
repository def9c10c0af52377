"""Open untrusted image files. Every image file of the library is opened here.

Format, size, depth and a PNG's chunks are checked before a pixel is decoded. Pillow keeps 4 bytes a pixel, and up to 10
while it drops transparency: 800 MB for the largest image. Of large images, one is decoded at a time.
"""

import io
import re
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError
from torch import Tensor

from attnconv._util.errors import bad

# Pillow tries no other format, so its rarer decoders, and the programs they start, are out of reach.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
LARGEST_PICTURE = 80_000_000  # pixels
LARGEST_WEBP = 12_000_000  # pixels: its decoder keeps several copies of all of them, 16 bytes a pixel or 210 MB
LARGE_PICTURE = 16_000_000  # pixels: two of more are not decoded at once
LONGEST_SIDE = 65_535  # pixels: the most that JPEG has; Pillow takes up to 50 bytes a pixel for one pixel's width
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (_TURNS[5], _TURNS[6], _TURNS[7], _TURNS[8])
# Pillow's decoders raise all of these for broken files.
_BROKEN: tuple[type[Exception], ...] = (OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError)
_BROKEN += (ArithmeticError, AttributeError, RuntimeError, struct.error, zlib.error)
_DEEP = re.compile(r";16[BLN]")  # in the layout that a file's pixels have; `BGR;16` has 5 or 6 bits a channel
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by the type of colour
_PNG_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_PIECE = 1 << 16  # bytes

_one_large = threading.Lock()


class PictureError(ValueError):
    """The image is broken, or not of 8 bits a channel."""


class UnsupportedTypeError(PictureError):
    """The bytes are not an image of a supported format."""


class TooLargeError(PictureError):
    """The image has too many bytes or pixels."""


@contextmanager
def open_picture(
    source: Path | str | bytes, name: str = "", *, formats: tuple[str, ...] = FORMATS, largest: int = LARGEST_PICTURE
) -> Iterator[ImageFile.ImageFile]:
    """Open an image file, or its content, and check it.

    Errors of Pillow inside the `with` block become a `PictureError`, which calls the image by `name`, or by its path.
    `largest` is in pixels.
    """
    name = name or ("image" if isinstance(source, bytes) else str(source))
    try:
        with _opened(source, name) as file, Image.open(file, formats=formats) as image:
            _check_header(image, name, largest)
            if image.format == "PNG":
                place = file.tell()
                _check_png(file)
                file.seek(place)  # of the pixels
            with _one_large if image.width * image.height > LARGE_PICTURE else nullcontext():
                yield image
    except PictureError:
        raise
    except UnidentifiedImageError as error:
        raise UnsupportedTypeError(bad(name, "must be a whole image", f"none of {', '.join(formats)}")) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning, MemoryError) as error:
        got = str(error) or "one that does not fit into memory"
        raise TooLargeError(bad(name, f"must have at most {largest:,} pixels", got)) from error
    except _BROKEN as error:
        first = str(error).partition("\n")[0][:200].rstrip(".") or type(error).__name__
        raise PictureError(bad(name, "must be a whole image", first)) from error


def _opened(source: Path | str | bytes, name: str) -> io.BytesIO | io.BufferedReader:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    if not Path(source).is_file():  # a pipe might never end
        raise PictureError(bad(name, "must be an image file", "no file of that name"))
    return Path(source).open("rb")


def read_image(
    path: Path | str, size: int | tuple[int, int], *, channels: int = 3
) -> UInt8[Tensor, "channels height width"]:
    """Read one image file, scaled to cover a square or rectangle and cropped to it about the centre.

    Args:
        path: BMP, GIF, JPEG, PNG, PPM, TIFF or WebP, of at most 80,000,000 pixels (WebP 12,000,000) and 65,535 a side.
        size: Height and width of the result in pixels, one number or two, at least 1.
        channels: 3 for RGB, 1 for grey.

    Returns:
        The pixels as bytes.

    Raises:
        ValueError: The file is missing, broken, too large or not of 8 bits a channel, or an argument is wrong.
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
    """Decode an open image: turned upright (EXIF), scaled to cover a rectangle, cropped to it about the centre.

    Of an image with several frames this is the first, and of transparent pixels the colour below.
    """
    mode = "RGB" if channels == 3 else "L"
    image.load()  # a PNG's EXIF may follow its pixels, whose errors must come first
    if image.mode == "P" and image.palette is None:
        raise SyntaxError("no palette")
    turn = _turn(image)
    width, height = sizes if turn in _SIDEWAYS else sizes[::-1]
    if image.mode == "P" and image.has_transparency_data:
        image = image.convert("RGBA")  # or Pillow warns
    # Palettes and transparency cannot be scaled as they are; the other modes can, before they are converted.
    plain = image if image.mode in ("RGB", "L", "CMYK", "YCbCr") else image.convert(mode)
    fitted = ImageOps.fit(plain, (width, height), Image.Resampling.BILINEAR).convert(mode)
    if turn is not None:  # now that it is small
        fitted = fitted.transpose(turn)
    pixels = np.asarray(fitted, np.uint8).reshape(*sizes, channels).transpose(2, 0, 1).copy()
    return torch.from_numpy(pixels)


def enlargement(image: Image.Image, sizes: tuple[int, int]) -> float:
    """By how much `fit_picture` enlarges a decoded image; below 1 where it shrinks it."""
    width, height = image.size[::-1] if _turn(image) in _SIDEWAYS else image.size
    return max(sizes[0] / height, sizes[1] / width)


def _turn(image: Image.Image) -> Image.Transpose | None:
    """How to turn an image upright. EXIF that cannot be read turns nothing: the pixels are whole all the same."""
    try:
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except _BROKEN:
        return None


def _check_header(image: ImageFile.ImageFile, name: str, largest: int) -> None:
    """Refuse images with too many pixels or more than 8 bits a channel."""
    got = f"{image.width} x {image.height}"
    most = min(largest, LARGEST_WEBP) if image.format == "WEBP" else largest
    if image.width * image.height > most:
        requirement = f"must have at most {most:,} pixels" + (" as WebP" if most < largest else "")
        raise TooLargeError(bad(name, requirement, got))
    if max(image.size) > LONGEST_SIDE:
        raise TooLargeError(bad(name, f"must have sides of at most {LONGEST_SIDE:,} pixels", got))
    codec, arguments = (image.tile[0][0], image.tile[0][3]) if image.tile else ("", "")
    deep = codec == "ppm" and isinstance(arguments, tuple) and arguments[-1] > 255  # the largest value
    if image.mode[0] in "IF" or deep or _DEEP.search(str(arguments)):
        raise PictureError(bad(name, "must have 8 bits a channel", f"an image of mode {image.mode}, {arguments}"))


def _check_png(file: io.BytesIO | io.BufferedReader) -> None:
    """Verify the checksums of a PNG's chunks, and that its pixels unpack to as many bytes as its header says."""
    size = file.seek(0, io.SEEK_END)
    file.seek(8)
    inflate, missing, kind = zlib.decompressobj(), 0, b""
    while kind != b"IEND":
        length, kind = struct.unpack(">I4s", file.read(8))
        name = kind.decode("ascii", "replace")
        if length > size - file.tell():
            raise SyntaxError(f"a chunk {name} that is cut off")
        data = file.read(length)
        if struct.unpack(">I", file.read(4))[0] != zlib.crc32(data, zlib.crc32(kind)):
            raise SyntaxError(f"a chunk {name} whose checksum does not fit")
        if kind == b"IHDR":
            missing = _png_bytes(data)
        while kind == b"IDAT" and missing > 0:
            piece = inflate.decompress(data, _PIECE)
            missing, data = missing - len(piece), inflate.unconsumed_tail
            if not piece and not data:
                break
    if missing > 0:
        raise SyntaxError(f"pixels of which {missing:,} bytes are missing")


def _png_bytes(header: bytes) -> int:
    """Bytes that the pixels of a PNG unpack to: rows of whole bytes, each behind one that names its filter."""
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    bits = depth * _PNG_CHANNELS[colour]
    total = 0
    for left, top, across, down in _PNG_PASSES if interlaced else ((0, 0, 1, 1),):
        columns, rows = max(0, -(-(width - left) // across)), max(0, -(-(height - top) // down))
        total += rows * (1 + -(-columns * bits // 8)) if columns else 0
    return total
