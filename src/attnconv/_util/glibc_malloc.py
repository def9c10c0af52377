"""Settings of glibc's memory allocator for training and benchmarks. They have an effect only on Linux.

By default, whether glibc keeps freed blocks or returns them to the system depends on the history of the process. This
changes the time of the same computation by up to a factor of two, and its memory by up to a third.
"""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4  # parameters of `mallopt`
# The values to which glibc adapts after a large tensor is freed. Setting any of them turns the adaptation off.
_USUAL = {_MMAP_MAX: 2**16, _MMAP_THRESHOLD: 2**25, _TRIM_THRESHOLD: 2**26, _TOP_PAD: 2**17}


def keep_freed_memory() -> None:
    """Allocate blocks of any size from one heap and never shrink it, so that repeated work reuses its pages."""
    _allocator("mallopt", _MMAP_MAX, 0)
    _allocator("mallopt", _TRIM_THRESHOLD, -1)  # never
    _allocator("mallopt", _TOP_PAD, 2**26)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Apply `keep_freed_memory` within the block, unless the user has set `MALLOC_*` or `GLIBC_TUNABLES`."""
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
    """Allocate each block of at least 1 MiB with `mmap`, so that peak memory includes no fragmentation."""
    _allocator("mallopt", _MMAP_THRESHOLD, 2**20)


def give_back() -> None:
    """Return freed memory to the system."""
    gc.collect()
    _allocator("malloc_trim", 0)


def _allocator(name: str, *numbers: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:
        function(*numbers)
