"""Check the images of a model before its first matrix product."""

import torch
import torch.fx
from torch import Tensor

from attnconv._util.errors import bad


def check_images(images: Tensor, *, channels: int, multiple: int = 1) -> None:
    """Reject images that are not floating point, (b, channels, height, width), with sides that `multiple` divides.

    An empty batch is legal. Only the shape and the dtype are read, so the check compiles away.
    """
    given: object = images
    if isinstance(given, torch.fx.Proxy):  # symbolic tracing: there is no shape yet
        return
    if not images.is_floating_point():
        fix = "Scale bytes to [0, 1] and normalise them first."
        raise TypeError(bad("images", "must be floating point", str(images.dtype), fix))
    shape = tuple(images.shape)
    if images.ndim != 4 or shape[1] != channels or any(side == 0 or side % multiple for side in shape[2:]):
        fix = "Add a batch axis with images[None]." if images.ndim == 3 else ""
        requirement = f"must have shape (b, {channels}, height, width) with sides that {multiple} divides"
        raise ValueError(bad("images", requirement, f"shape {shape}", fix))
