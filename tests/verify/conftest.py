"""At full scale the measurements are alone on the machine and use all of its cores, as a user's training does."""

import os
import secrets
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def all_cores(verify_scale: float) -> Iterator[None]:
    """Threads for a full measurement; a part of one shares the cores with other tests."""
    before = torch.get_num_threads()
    if verify_scale >= 1:
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def attack_seed() -> int:
    """Seed of what an attack draws: always the same, or a new one each time where HYPOTHESIS_PROFILE=explore."""
    seed = secrets.randbits(32) if os.environ.get("HYPOTHESIS_PROFILE") == "explore" else 0
    print(f"attack_seed: {seed}")
    return seed
