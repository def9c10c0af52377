"""A visitor's picture, decoded without trusting it: size and declared type are checked before any pixel is decoded.

A pixel takes 4 bytes decoded, 8 while its colours are converted, and 12 in a progressive JPEG of four colours: 600 MB
for the largest picture.
"""

import warnings

from jaxtyping import UInt8
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.data.image_decoding import TooLargeError, UnsupportedTypeError, fit_picture, open_picture

LARGEST_UPLOAD = 20_000_000  # bytes
LARGEST_PICTURE = 50_000_000  # pixels: more than telephones usually take
TYPES = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}


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
        UnsupportedTypeError: The type is not one of `TYPES`, or not that of the bytes; or it is a WebP that moves.
        TooLargeError: It has more than `LARGEST_UPLOAD` bytes or `LARGEST_PICTURE` pixels, or too long a side.
        PictureError: The picture is broken, or of more than 8 bits a channel.
    """
    wanted = TYPES.get(declared.partition(";")[0].strip().lower())
    if wanted is None:
        raise UnsupportedTypeError(bad("image", f"must be one of {', '.join(TYPES)}", repr(declared[:60])))
    if len(content) > LARGEST_UPLOAD:
        raise TooLargeError(bad("image", f"must have at most {LARGEST_UPLOAD:,} bytes", f"{len(content):,}"))
    formats, most = tuple(TYPES.values()), 2 * max(sizes)
    with warnings.catch_warnings():  # Pillow warns of large pictures and odd metadata: both are decided elsewhere
        warnings.simplefilter("ignore")
        with open_picture(content, "image", formats=formats, largest=LARGEST_PICTURE) as image:
            if ("JPEG" if image.format == "MPO" else image.format) != wanted:  # many telephones add a second picture
                raise UnsupportedTypeError(bad("image", f"must be the {wanted} that was declared", str(image.format)))
            frames = getattr(image, "n_frames", 1) if wanted == "WEBP" else 1
            if frames > 1:
                fix = "Save one of them as a picture."
                raise UnsupportedTypeError(bad("image", "must be a WebP that does not move", f"{frames} frames", fix))
            image.draft("RGB" if channels == 3 else "L", (most, most))  # JPEG only: decoded at a fraction of its size
            return fit_picture(image, sizes, channels=channels)
