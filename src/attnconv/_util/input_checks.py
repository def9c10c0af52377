"""Checks of a caller's models and images, before anything is computed."""

import torch
from torch import Tensor, nn

from attnconv._util.errors import bad

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # what layers compute in


def check_module(model: object, argument: str = "model") -> None:
    """Raise `TypeError` unless the argument is a module; a class of modules is none."""
    if not isinstance(model, nn.Module):
        raise TypeError(bad(argument, "must be an nn.Module", type(model).__name__))


def check_tensor(images: object, argument: str = "images") -> None:
    """Require a tensor with a batch axis."""
    if not isinstance(images, Tensor):
        raise TypeError(bad(argument, "must be a tensor, (b, c, height, width)", type(images).__name__))
    if images.dim() < 2:
        fix = "Add a batch axis with images[None]."
        raise ValueError(bad(argument, "must have a batch axis first", f"shape {tuple(images.shape)}", fix))


def check_dense(images: object, argument: str = "images", *, least: int = 0, dims: int | None = None) -> None:
    """Require a batch of at least `least` dense floating point images with `dims` axes each (None for any)."""
    check_tensor(images, argument)
    assert isinstance(images, Tensor)
    if images.layout != torch.strided:
        raise TypeError(bad(argument, "must be a dense tensor", str(images.layout)))
    if images.dtype not in FLOATING:
        fix = "Scale bytes to [0, 1] and normalise them."
        raise TypeError(bad(argument, "must be floating point of 16 to 64 bits", str(images.dtype), fix))
    if images.is_meta:
        raise ValueError(bad(argument, "must hold pixels", "a tensor on the meta device"))
    if dims is not None and images.dim() != dims + 2:
        raise ValueError(bad(argument, f"must be of {dims} axes, (b, c, *sizes)", f"shape {tuple(images.shape)}"))
    if 0 in images.shape[1:]:
        raise ValueError(bad(argument, "must have pixels", f"shape {tuple(images.shape)}"))
    if len(images) < least:
        raise ValueError(bad(argument, f"must be at least {least}", len(images)))
