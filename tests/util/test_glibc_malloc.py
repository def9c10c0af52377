"""Memory kept by glibc's allocator; tested in new processes, because settings that stay would affect other tests."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from attnconv._util.glibc_malloc import freed_memory_kept

SCRIPT = """
import sys
import numpy
from attnconv._util import glibc_malloc as allocator
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
    """Return how many bytes of 64 MiB the process keeps after freeing them, and after returning them to the system."""
    result = subprocess.run([sys.executable, "-c", SCRIPT, *calls], capture_output=True, text=True, check=True)
    kept, left = map(int, result.stdout.split())
    return kept, left


@pytest.mark.skipif(sys.platform != "linux", reason="malloc settings are only changed on Linux")
def test_freed_memory_is_kept_or_mapped_on_request() -> None:
    assert resident_after("map_large_blocks")[0] < 2**24
    kept, left = resident_after("keep_freed_memory")
    assert kept > 2**25
    assert left < 2**24


WHILE = """
import resource, torch
from attnconv._util.glibc_malloc import freed_memory_kept
NUMBERS = 2**24  # 64 MiB, more than glibc keeps by default
PAGES = 4 * NUMBERS // resource.getpagesize()
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) / PAGES
def fetched():
    for _ in range(40):  # reusing aligned blocks needs spare memory, which takes a few rounds to collect
        torch.ones(NUMBERS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(NUMBERS)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / PAGES
torch.ones(NUMBERS)  # loads the code that the measurements need
before = resident()
with freed_memory_kept():
    print(fetched(), resident() - before)
print(resident() - before)
"""


def while_kept(**environment: str) -> tuple[float, ...]:
    """Return, in units of one tensor: memory fetched while eight are created and freed, kept, and left."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    result = subprocess.run(
        [sys.executable, "-c", WHILE], capture_output=True, text=True, check=True, env={**plain, **environment}
    )
    return tuple(map(float, result.stdout.split()))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_pages_are_used_again_and_given_back_at_the_end() -> None:
    fetched, held, left = while_kept()
    assert fetched < 2
    assert held > 0.9
    assert left < 0.1
    assert while_kept(MALLOC_ARENA_MAX="2")[0] > 7  # the user's settings have priority


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    with freed_memory_kept():
        assert torch.ones(3).sum() == 3
