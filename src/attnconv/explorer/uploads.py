"""A picture from a stranger, decoded without trusting anything that it says of itself.

Before any pixel is decoded: the number of bytes, the declared type, the type that the bytes have, the number of pixels
and the sides in the header, and the file's own checksums. A pixel takes 4 bytes decoded, 8 while its colours are
converted, and 12 in a progressive JPEG of four colours: 600 MB for the largest picture. Only the four formats below are
ever tried, so that Pillow's rarer decoders are out of reach.
"""

import io
import struct
import warnings
import zlib

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from torch import Tensor

from attnconv._errors import bad

LARGEST_UPLOAD = 20_000_000  # bytes
LARGEST_PICTURE = 50_000_000  # pixels: any telephone's usual ones
LARGEST_SIDE = 65_535  # pixels, JPEG's own limit: each row takes 8 bytes and a multiple of 4 however short it is
LARGEST_WEBP = 12_000_000  # pixels: its decoder keeps several copies of all of them, 16 bytes a pixel or 210 MB
TYPES = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}
ORIENTATION = 0x0112  # the entry of a file's EXIF that says how the camera was held
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = (TURNS[5], TURNS[6], TURNS[7], TURNS[8])
# Pillow's decoders raise all of these for broken files.
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    ArithmeticError,
    AttributeError,
    struct.error,
    zlib.error,
)


class UnsupportedTypeError(ValueError):
    """The bytes are no picture of a format that is taken, or of another than was declared."""


class TooLargeError(ValueError):
    """The picture has too many bytes or pixels."""


def read_upload(
    content: bytes, declared: str, sizes: tuple[int, int], *, channels: int = 3
) -> UInt8[Tensor, "channels height width"]:
    """Decode one picture, scaled to cover a rectangle and cropped to it about the centre; of several, the first.

    Args:
        content: The file.
        declared: Its media type as the sender says, such as `image/png`.
        sizes: Height and width of the result in pixels.
        channels: 3 for RGB, 1 for grey.

    Raises:
        UnsupportedTypeError: The type is not one of `TYPES`, or not what the bytes are; or it is a WebP that moves.
        TooLargeError: More bytes than `LARGEST_UPLOAD`, more pixels than `LARGEST_PICTURE` (WebP: `LARGEST_WEBP`), or a
            side longer than `LARGEST_SIDE`.
        ValueError: The picture is broken, or of more than 8 bits a channel, grey or coloured.
    """
    wanted = TYPES.get(declared.partition(";")[0].strip().lower())
    if wanted is None:
        raise UnsupportedTypeError(bad("image", f"must be one of {', '.join(TYPES)}", repr(declared[:60])))
    if len(content) > LARGEST_UPLOAD:
        requirement = f"must have at most {LARGEST_UPLOAD:,} bytes"
        raise TooLargeError(bad("image", requirement, f"{len(content):,}"))
    with warnings.catch_warnings():  # Pillow warns of large pictures and odd metadata: both are decided here
        warnings.simplefilter("ignore")
        try:
            _verify(content, wanted, declared)
            return _decode(content, wanted, sizes, "RGB" if channels == 3 else "L")
        except (UnsupportedTypeError, TooLargeError):
            raise
        except _BROKEN as error:
            first = str(error).partition("\n")[0][:200] or type(error).__name__
            raise ValueError(bad("image", "must be a whole picture of at most 8 bits a channel", first)) from error
        except (Image.DecompressionBombError, MemoryError) as error:
            raise TooLargeError(bad("image", "must be of an ordinary size", "one that unpacks to far more")) from error


def _verify(content: bytes, wanted: str, declared: str) -> None:
    """Type, size in pixels and checksums, from the header and without a pixel."""
    try:
        image = Image.open(io.BytesIO(content), formats=list(TYPES.values()))
    except UnidentifiedImageError as error:
        got = f"bytes that are none, declared as {declared[:60]!r}"
        raise UnsupportedTypeError(bad("image", f"must be one of {', '.join(TYPES)}", got)) from error
    with image:
        if ("JPEG" if image.format == "MPO" else image.format) != wanted:  # many telephones add a second picture
            raise UnsupportedTypeError(bad("image", f"must be the {wanted} that was declared", str(image.format)))
        frames = getattr(image, "n_frames", 1) if wanted == "WEBP" else 1
        if frames > 1:
            fix = "Save one of them as a picture."
            raise UnsupportedTypeError(bad("image", "must be a WebP that does not move", f"{frames} frames", fix))
        most = LARGEST_WEBP if wanted == "WEBP" else LARGEST_PICTURE
        if image.width * image.height > most:
            requirement = f"must have at most {most:,} pixels" + (" as WebP" if wanted == "WEBP" else "")
            raise TooLargeError(bad("image", requirement, f"{image.width} x {image.height}"))
        if max(image.size) > LARGEST_SIDE:
            requirement = f"must have sides of at most {LARGEST_SIDE:,} pixels"
            raise TooLargeError(bad("image", requirement, f"{image.width} x {image.height}"))
        image.verify()


def _decode(content: bytes, wanted: str, sizes: tuple[int, int], mode: str) -> Tensor:
    height, width = sizes
    with Image.open(io.BytesIO(content), formats=[wanted]) as image:
        _check_depth(image)
        if wanted != "JPEG":
            image.load()  # a PNG's EXIF may follow its pixels: what is wrong with those must come out here
        turn = _turn(image)
        if turn in SIDEWAYS:
            height, width = width, height
        image.draft(mode, (2 * width, 2 * height))  # JPEG only: decoded at a fraction of its size
        # Palettes cannot be scaled, and of transparent pixels the colour below is shown, as `attnconv.data` does.
        plain = image if image.mode in ("RGB", "L", "CMYK", "YCbCr") else image.convert(mode)
        fitted = ImageOps.fit(plain, (width, height), Image.Resampling.BILINEAR).convert(mode)
    if turn is not None:  # now that it is small
        fitted = fitted.transpose(turn)
    height, width = sizes
    pixels = np.asarray(fitted, np.uint8).reshape(height, width, -1).transpose(2, 0, 1).copy()
    return torch.from_numpy(pixels)


def _check_depth(image: ImageFile.ImageFile) -> None:
    """Refuse more than 8 bits a channel: of grey Pillow would cut the values off, and of colours the lower bits."""
    stored = str(image.tile[0][3]) if image.tile else ""  # of a PNG, such as `RGB;16B`: the mode is RGB all the same
    if image.mode[0] in "IF" or ";16" in stored:
        raise ValueError(f"mode {stored or image.mode}")


def _turn(image: Image.Image) -> Image.Transpose | None:
    """How to set a picture upright. EXIF that cannot be read turns nothing: the pixels are whole all the same."""
    try:
        return TURNS.get(image.getexif().get(ORIENTATION, 1))
    except _BROKEN:
        return None
