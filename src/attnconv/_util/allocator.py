"""What the C library does with freed memory while something is trained or measured.

Left to itself, glibc gives freed blocks back to the system or keeps them, as the history of the process has it, and
pages that were given back are cleared and mapped anew when they are next used. Two contenders that do the same work
then differ by a factor of two in time, or by a third in memory.

    trainings `freed_memory_kept`: every step asks for the same sizes, so the pages may as well stay
    times     `keep_freed_memory`, on request: blocks are used again, and after the first round nobody pays for pages
    memory    `map_large_blocks`, `give_back`: every large block comes and goes on its own, so that peaks hold no holes

Elsewhere than on Linux with glibc nothing happens.
"""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4  # names of `mallopt`
_LARGE = 2**20
# What glibc comes to by itself in a process that has freed a large tensor; once one is set it adapts none any more.
_USUAL = {_MMAP_MAX: 2**16, _MMAP_THRESHOLD: 2**25, _TRIM_THRESHOLD: 2**26, _TOP_PAD: 2**17}


def keep_freed_memory() -> None:
    """Take blocks of any size from one heap, and keep it."""
    _allocator("mallopt", _MMAP_MAX, 0)
    _allocator("mallopt", _TRIM_THRESHOLD, -1)  # never
    _allocator("mallopt", _TOP_PAD, 2**26)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """`keep_freed_memory` while this lasts, given back at the end.

    Does nothing where the user has set the allocator up by `MALLOC_*_` or `GLIBC_TUNABLES`.
    """
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
    """Have blocks of 1 MiB and more mapped, each on its own."""
    _allocator("mallopt", _MMAP_THRESHOLD, _LARGE)


def give_back() -> None:
    """Hand freed memory back to the system where its allocator would keep it: reuse would not be seen."""
    gc.collect()
    _allocator("malloc_trim", 0)


def _allocator(name: str, *numbers: int) -> None:
    """Call a function of the C library's allocator where there is one of that name."""
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:
        function(*numbers)
