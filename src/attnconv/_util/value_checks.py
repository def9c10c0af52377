"""Validation of arguments of any type: numbers, models and images."""

import operator
import sys
from collections.abc import Iterable
from typing import SupportsIndex, TypeGuard

import torch
from torch import Tensor, nn

from attnconv._util.errors import bad

LARGEST = 2**63 - 1  # the largest int64
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # dtypes of layers


def is_real(value: object) -> bool:
    """Return whether a value is a finite float, or an int within the range of floats, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_index(value: object) -> TypeGuard[SupportsIndex]:
    """Return whether a value is an integer (int, NumPy integer, SymInt), but not a bool or an array."""
    if isinstance(value, int):  # first, since a SymInt lacks the attributes below
        return not isinstance(value, bool)
    indexable = isinstance(value, SupportsIndex) and not isinstance(value, type)  # `int` itself has __index__
    return indexable and getattr(value, "ndim", 0) == 0 and "bool" not in str(getattr(value, "dtype", ""))


def whole(name: str, value: object, minimum: int, maximum: int = LARGEST) -> int:
    """Convert an integer to int; raise `TypeError` for other values and `ValueError` outside the range."""
    try:
        number = operator.index(value) if is_index(value) else None
    except TypeError:  # raised by floats from NumPy and torch
        number = None
    if number is None:
        raise TypeError(bad(name, f"must be an integer of at least {minimum}", repr(value)))
    if number < minimum:
        raise ValueError(bad(name, f"must be an integer of at least {minimum}", number))
    if number > maximum:
        raise ValueError(bad(name, f"must be at most {maximum}", number))
    return number


def indices(name: str, values: object, count: int) -> list[int]:
    """Convert indices below `count` to ints, without duplicates, in the order given."""
    found = list(values) if isinstance(values, Iterable) else None
    if found is None or not all(is_index(value) and 0 <= operator.index(value) < count for value in found):
        raise ValueError(bad(name, f"must be a list of integers from 0 to {count - 1}", found or repr(values)))
    return list(dict.fromkeys(map(operator.index, found)))


def check_module(model: object, argument: str = "model") -> None:
    """Raise `TypeError` unless the argument is an instance of `nn.Module`."""
    if not isinstance(model, nn.Module):
        raise TypeError(bad(argument, "must be an nn.Module", type(model).__name__))


def check_tensor(images: object, argument: str = "images") -> None:
    """Raise an error unless the argument is a tensor with a batch axis."""
    if not isinstance(images, Tensor):
        raise TypeError(bad(argument, "must be a tensor of shape (b, c, height, width)", type(images).__name__))
    if images.dim() < 2:
        fix = "Add a batch axis with images[None]."
        raise ValueError(bad(argument, "must have a batch axis first", f"shape {tuple(images.shape)}", fix))


def check_dense(images: object, argument: str = "images", *, least: int = 0, dims: int | None = None) -> None:
    """Raise an error unless the argument is a dense floating-point batch of `least` or more images with `dims` axes."""
    check_tensor(images, argument)
    assert isinstance(images, Tensor)
    if images.layout != torch.strided:
        raise TypeError(bad(argument, "must be a dense tensor", str(images.layout)))
    if images.dtype not in FLOATING:
        fix = "Scale uint8 images to [0, 1] and normalise them."
        raise TypeError(bad(argument, "must be floating-point with 16 to 64 bits per value", str(images.dtype), fix))
    if images.is_meta:
        raise ValueError(bad(argument, "must have data", "a tensor on the meta device"))
    if dims is not None and images.dim() != dims + 2:
        raise ValueError(bad(argument, f"must have {dims + 2} axes, (b, c, *sizes)", f"shape {tuple(images.shape)}"))
    if 0 in images.shape[1:]:
        raise ValueError(bad(argument, "must not be empty", f"shape {tuple(images.shape)}"))
    if len(images) < least:
        raise ValueError(bad(argument, f"must contain {least} or more images", len(images)))
