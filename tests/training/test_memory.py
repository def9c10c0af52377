"""Memory of a training: freed pages are used again, and given back at the end."""

import platform
import resource
from pathlib import Path

import pytest
import torch

from attnconv.training.memory import freed_memory_kept

NUMBERS = 2**24  # 64 MiB, more than glibc ever keeps by itself
PAGES = 4 * NUMBERS // resource.getpagesize()
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)


def fetched() -> float:
    """How often a tensor's pages are fetched from the system while eight such tensors come and go, after four others.

    Blocks are aligned: a freed one serves the next only with some room beside it, which takes a few rounds to gather.
    """
    for _ in range(4):
        torch.ones(NUMBERS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(NUMBERS)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / PAGES


def resident() -> int:
    """Pages that the process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1])


@glibc
def test_pages_are_used_again_and_given_back_at_the_end() -> None:
    before = resident()
    with freed_memory_kept():
        assert fetched() < 2
        assert resident() > before + 0.9 * PAGES
    assert resident() < before + 0.1 * PAGES


@glibc
def test_the_users_own_settings_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    with freed_memory_kept():
        assert fetched() > 7


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnconv.training.memory._glibc", lambda: None)
    with freed_memory_kept():
        assert torch.ones(3).sum() == 3
