"""glibc's memory allocator while something is trained or measured; elsewhere than on Linux nothing happens.

By itself glibc keeps freed blocks or returns them to the system, depending on the history of the process. Equal work
then differs by a factor of two in time, or a third in memory.
"""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4  # names of `mallopt`
# What glibc adapts to in a process that has freed a large tensor. Once one is set it adapts no more.
_USUAL = {_MMAP_MAX: 2**16, _MMAP_THRESHOLD: 2**25, _TRIM_THRESHOLD: 2**26, _TOP_PAD: 2**17}


def keep_freed_memory() -> None:
    """Take blocks of any size from one heap, and keep it: later rounds of the same work get no new pages."""
    _allocator("mallopt", _MMAP_MAX, 0)
    _allocator("mallopt", _TRIM_THRESHOLD, -1)  # never
    _allocator("mallopt", _TOP_PAD, 2**26)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """`keep_freed_memory` within the block. The user's own settings, `MALLOC_*` or `GLIBC_TUNABLES`, come first."""
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
        yield
        return
    keep_freed_memory()
    try:
        yield
    finally:
        for parameter, value in _USUAL.items():
            _allocator("mallopt", parameter, value)
        give_back()


def map_large_blocks() -> None:
    """Map blocks of 1 MiB and more, each on its own, so that peaks of memory hold no holes."""
    _allocator("mallopt", _MMAP_THRESHOLD, 2**20)


def give_back() -> None:
    """Give freed memory back to the system."""
    gc.collect()
    _allocator("malloc_trim", 0)


def _allocator(name: str, *numbers: int) -> None:
    """Call a function of the C library where there is one."""
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:
        function(*numbers)
