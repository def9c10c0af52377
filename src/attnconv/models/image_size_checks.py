"""What every model of this package requires of its images, in words rather than in a failed matrix product."""

import torch
import torch.fx
from torch import Tensor

from attnconv._util.errors import bad


def check_images(images: Tensor, *, channels: int, multiple: int = 1) -> None:
    """Refuse what is not a batch of images of the right kind.

    Only the shape and the dtype are looked at, never a value, so that the check costs nothing and compiles away.

    Args:
        images: must be (b, channels, height, width), floating point.
        channels: number of channels of the model's images.
        multiple: number that must divide height and width.

    Raises:
        TypeError: if the images are not floating point.
        ValueError: if the rank, the channels, or the size is wrong; an empty batch is legal, an empty image is not.
    """
    given: object = images
    if isinstance(given, torch.fx.Proxy):  # symbolic tracing: there is no shape yet
        return
    shape = tuple(images.shape)
    if not images.is_floating_point():
        fix = "Scale bytes to [0, 1] and normalise them first."
        raise TypeError(bad("images", "must be floating point", str(images.dtype), fix))
    if images.ndim != 4:
        fix = "Add a batch axis with images[None]." if images.ndim == 3 else ""
        raise ValueError(bad("images", f"must have shape (b, {channels}, height, width)", f"shape {shape}", fix))
    if images.shape[1] != channels:
        raise ValueError(bad("images", f"must have {channels} channels at dimension 1", f"shape {shape}"))
    if images.shape[2] == 0 or images.shape[3] == 0:
        raise ValueError(bad("images", "must have a height and a width of at least 1", f"shape {shape}"))
    if images.shape[2] % multiple or images.shape[3] % multiple:
        fix = "Crop or pad them."
        raise ValueError(bad("images", f"must have sides that {multiple} divides", f"shape {shape}", fix))
