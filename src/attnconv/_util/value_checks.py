"""Checks of single values, for arguments that may arrive with any type."""

import operator
import sys
from collections.abc import Iterable
from typing import SupportsIndex, TypeGuard

from attnconv._util.errors import bad

LARGEST = 2**63 - 1  # of int64


def is_real(value: object) -> bool:
    """Whether a value is a finite int or float, no bool, and no int that is larger than every float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_index(value: object) -> TypeGuard[SupportsIndex]:
    """Whether Python accepts a value as a whole number (also numpy's and a compiler's symbols); no bool, no array."""
    if isinstance(value, int):  # first: a compiler's symbols have no attributes to ask for
        return not isinstance(value, bool)
    indexable = isinstance(value, SupportsIndex) and not isinstance(value, type)  # `int` itself has __index__
    return indexable and getattr(value, "ndim", 0) == 0 and "bool" not in str(getattr(value, "dtype", ""))


def whole(name: str, value: object, minimum: int, maximum: int = LARGEST) -> int:
    """Return a whole number as an int. Raises `TypeError` for other values and `ValueError` out of range."""
    try:
        number = operator.index(value) if is_index(value) else None
    except TypeError:  # of numpy's and torch's floats
        number = None
    if number is None:
        raise TypeError(bad(name, f"must be a whole number of at least {minimum}", repr(value)))
    if number < minimum:
        raise ValueError(bad(name, f"must be a whole number of at least {minimum}", number))
    if number > maximum:
        raise ValueError(bad(name, f"must be at most {maximum}", number))
    return number


def indices(name: str, values: object, count: int) -> list[int]:
    """Return whole numbers below a count as ints, each once, in the order given."""
    found = list(values) if isinstance(values, Iterable) else None
    if found is None or not all(is_index(value) and 0 <= operator.index(value) < count for value in found):
        raise ValueError(bad(name, f"must be a list of whole numbers from 0 to {count - 1}", found or repr(values)))
    return list(dict.fromkeys(map(operator.index, found)))
