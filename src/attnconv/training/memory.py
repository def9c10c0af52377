"""Memory of a training on the CPU: what a step frees, the next one uses again.

glibc takes every large tensor from the system and gives it back when it is freed; each new one is then fetched page by
page, and cleared. A training asks for the same sizes at every step, so the pages may as well stay.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Parameters of mallopt, from malloc.h. Once one is set, glibc adapts none of them any more; the usual values are those
# that it comes to by itself in a process that has freed a large tensor.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_KEEPING = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _TOP_PAD: 2**26}
_USUAL = {_MMAP_MAX: 2**16, _MMAP_THRESHOLD: 2**25, _TRIM_THRESHOLD: 2**26, _TOP_PAD: 2**17}


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep what is freed in the process while this lasts, and give it back at the end.

    Does nothing without glibc, and where the user has set its allocator up by `MALLOC_*_` or `GLIBC_TUNABLES`.
    """
    libc = _glibc()
    if libc is None or any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
        yield
        return
    _set(libc, _KEEPING)
    try:
        yield
    finally:
        _set(libc, _USUAL)
        libc.malloc_trim(0)


def _glibc() -> Any:
    """The C library of this process; None where it is not glibc."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None


def _set(libc: Any, values: dict[int, int]) -> None:
    for parameter, value in values.items():
        libc.mallopt(parameter, value)
