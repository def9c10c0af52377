"""What the C library does with freed memory, asked of a process: of this one it would change all further tests."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import numpy
from attnconv.bench import allocator
for name in sys.argv[1:]:
    getattr(allocator, name)()
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
before = resident()
held = [numpy.ones(2**20) for _ in range(8)]
del held
kept = resident() - before
allocator.give_back()
print(kept, resident() - before)
"""


def resident_after(*calls: str) -> tuple[int, int]:
    """Bytes that stay of 64 MiB when they are freed, and when they are given back."""
    result = subprocess.run([sys.executable, "-c", SCRIPT, *calls], capture_output=True, text=True, check=True)
    kept, left = map(int, result.stdout.split())
    return kept, left


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is asked of the C library")
def test_freed_memory_is_kept_or_mapped_on_request() -> None:
    assert resident_after("map_large_blocks")[0] < 2**24
    kept, left = resident_after("keep_freed_memory")
    assert kept > 2**25
    assert left < 2**24
