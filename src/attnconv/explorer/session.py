"""The payload of a model on chosen images, and on every picture that a visitor sends."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from attnconv.data.augmentation import normalise
from attnconv.explorer.payload_write import Pictures, payload
from attnconv.explorer.uploaded_images import read_upload


@final
class Session:
    """Payloads of one model on any images.

    Args:
        model: Any module with attention that `visit_attention` reads.
        sizes: Height and width of its images, in pixels.
        mean: Mean of each channel, for images in [0, 1]; one number for grey images, three for RGB.
        std: Standard deviation of each channel.
        options: Further arguments of `payload`: `title`, `moments`, `layers`, `grid`, `prefix`, `budget`.

    Example:
        >>> import torch
        >>> from attnconv import SelfAttention2d
        >>> from attnconv.explorer import read_payload
        >>> session = Session(SelfAttention2d(3, 4, heads=2), (4, 6), mean=(0.5,) * 3, std=(0.5,) * 3)
        >>> pixels = torch.arange(72, dtype=torch.uint8).reshape(1, 3, 4, 6)
        >>> read_payload(session.payload(pixels, ("steps",))).names
        ('steps',)
    """

    def __init__(
        self,
        model: nn.Module,
        sizes: tuple[int, int],
        *,
        mean: Sequence[float],
        std: Sequence[float],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._model, self._sizes, self._mean, self._std = model, sizes, tuple(mean), tuple(std)
        self._options = dict(options or {})

    def payload(self, pixels: UInt8[Tensor, "b c height width"], names: Sequence[str] = ()) -> bytes:
        """The payload of some images, with the errors of `attnconv.explorer.payload`."""
        some = next(self._model.parameters(), torch.zeros(()))  # attention needs none
        images = normalise(pixels, self._mean, self._std).to(some.device, some.dtype)
        pictures = Pictures(pixels.expand(-1, 3, -1, -1).movedim(1, -1), tuple(names))
        return payload(self._model, images, pictures=pictures, **self._options)

    def answer(self, content: bytes, declared: str) -> bytes:
        """The payload of one picture file with its declared media type, for `app`.

        Raises:
            ValueError: The picture is rejected (see `read_upload`), or has one colour only.
        """
        pixels = read_upload(content, declared, self._sizes, channels=len(self._mean))
        return self.payload(pixels[None], ("your image",))
