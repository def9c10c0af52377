"""Payloads of one model on given images and on uploaded image files, and its logits with changed heads.

Uploads are untrusted: size and declared type are checked before any pixel is decoded. Decoding needs 4 bytes per pixel,
8 during colour conversion, and 12 for a progressive CMYK JPEG: 600 MB for the largest accepted image.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, final

import msgspec
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.module_state import evaluating
from attnconv.data.augmentation import normalise
from attnconv.data.image_files import TooLargeError, UnsupportedTypeError, fit_picture, open_picture
from attnconv.explorer.payload_write import Pictures, logits_of, payload
from attnconv.surgery.head_ablation import HeadChange, ablated

LARGEST_UPLOAD = 20_000_000  # bytes
LARGEST_PICTURE = 50_000_000  # pixels: more than most phone cameras produce
TYPES = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}


@final
@dataclass(frozen=True, eq=False)
class Session:
    """Payloads of one model for different images.

    Args:
        model: Any module that `visit_attention` can read.
        sizes: Height and width of the model's input, in pixels.
        mean: Mean of each channel, for pixels scaled to [0, 1]; one number for greyscale, three for RGB.
        std: Standard deviation of each channel, for pixels scaled to [0, 1].
        examples: The images of the first payload.
        options: Further arguments of `payload`: `title`, `snapshots`, `layers`, `grid`, `prefix`, `budget`,
            `classes`, `random`, `ablations`.

    Example:
        >>> from attnconv import SelfAttention2d
        >>> from attnconv.explorer import read_payload
        >>> session = Session(SelfAttention2d(3, 4, heads=2), (4, 6), mean=(0.5,) * 3, std=(0.5,) * 3)
        >>> pixels = torch.arange(72, dtype=torch.uint8).reshape(1, 3, 4, 6)
        >>> read_payload(session.payload(pixels, ("steps",))).names
        ('steps',)
    """

    model: nn.Module
    sizes: tuple[int, int]
    _: KW_ONLY
    mean: Sequence[float]
    std: Sequence[float]
    examples: UInt8[Tensor, "b c height width"] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def payload(
        self, pixels: UInt8[Tensor, "b c height width"], names: Sequence[str] = (), labels: Sequence[str] = ()
    ) -> bytes:
        """Compute the payload of some images; raises the same errors as `attnconv.explorer.payload`."""
        images = self._inputs(pixels)
        pictures = Pictures(pixels.expand(-1, 3, -1, -1).movedim(1, -1), tuple(names), tuple(labels))
        return payload(self.model, images, pictures=pictures, **self.options)

    def answer(self, content: bytes, declared: str, heads: str | None = None) -> bytes:
        """Compute the answer to a request; pass this method to `app` as `answer`.

        Args:
            content: One image file; empty for the examples, if `heads` is given.
            declared: The file's media type.
            heads: Changed heads, as JSON: the second argument of `attnconv.surgery.ablated`.

        Returns:
            A payload or, if `heads` is given, the logits of the changed model for each image, as JSON.

        Raises:
            ValueError: If the image is rejected (see `read_upload`), all of its pixels have the same colour, or the
                heads cannot be changed.
        """
        pixels = self.examples
        if content or heads is None or pixels is None:
            pixels = read_upload(content, declared, self.sizes, channels=len(self.mean))[None]
        if heads is None:
            return self.payload(pixels, ("your image",))
        try:
            changes = msgspec.json.decode(heads, type=dict[str, dict[int, HeadChange]])
        except ValueError as error:
            requirement = "must map names of layers to mappings from heads to changes"
            raise ValueError(bad("heads", requirement, heads[:80])) from error
        reading: dict[str, Any] = {name: self.options.get(name) for name in ("grid", "prefix")}
        with torch.no_grad(), evaluating(self.model), ablated(self.model, changes, **reading):
            output = self.model(self._inputs(pixels))
        logits = logits_of(output, len(pixels), len(self.options.get("classes", ())))
        if logits is None:
            raise ValueError(bad("model", "must return finite logits of known classes", type(output).__name__))
        return msgspec.json.encode(logits.tolist())

    def _inputs(self, pixels: UInt8[Tensor, "b c height width"]) -> Float[Tensor, "b c height width"]:
        some = next(self.model.parameters(), torch.zeros(()))  # a model may have no parameters
        return normalise(pixels, tuple(self.mean), tuple(self.std)).to(some.device, some.dtype)


def read_upload(
    content: bytes, declared: str, sizes: tuple[int, int], *, channels: int = 3
) -> UInt8[Tensor, "channels height width"]:
    """Decode one image file, scaled and centre-cropped to the given size; only the first frame is used.

    Args:
        content: The file's bytes.
        declared: The media type that the client declares, such as `image/png`.
        sizes: Height and width of the result in pixels.
        channels: 3 for RGB, 1 for greyscale.

    Raises:
        UnsupportedTypeError: If the declared type is not in `TYPES` or not that of the file, or a WebP is animated.
        TooLargeError: If the file has over `LARGEST_UPLOAD` bytes, or the image has too many pixels (in total or per
            side).
        PictureError: If the image is broken, or has more than 8 bits per channel.
    """
    wanted = TYPES.get(declared.partition(";")[0].strip().lower())
    if wanted is None:
        raise UnsupportedTypeError(bad("image", f"must be one of {', '.join(TYPES)}", repr(declared[:60])))
    if len(content) > LARGEST_UPLOAD:
        raise TooLargeError(bad("image", f"must have at most {LARGEST_UPLOAD:,} bytes", f"{len(content):,}"))
    formats, most = tuple(TYPES.values()), 2 * max(sizes)
    with warnings.catch_warnings():  # Pillow warns about large images and odd metadata, which are checked elsewhere
        warnings.simplefilter("ignore")
        with open_picture(content, "image", formats=formats, largest=LARGEST_PICTURE) as image:
            if ("JPEG" if image.format == "MPO" else image.format) != wanted:  # many phones add a second image
                raise UnsupportedTypeError(bad("image", f"must be {wanted}, as declared", str(image.format)))
            frames = getattr(image, "n_frames", 1) if wanted == "WEBP" else 1
            if frames > 1:
                fix = "Save a single frame."
                raise UnsupportedTypeError(bad("image", "must not be an animated WebP", f"{frames} frames", fix))
            image.draft("RGB" if channels == 3 else "L", (most, most))  # decodes a JPEG at a fraction of its size
            return fit_picture(image, sizes, channels=channels)
