"""At full scale, tests run one at a time and use all cores, as training does for a user."""

import os
import secrets
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def all_cores(verify_scale: float) -> Iterator[None]:
    """Use all threads for a full measurement; smaller ones share the cores with other tests."""
    before = torch.get_num_threads()
    if verify_scale >= 1:
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def attack_seed() -> int:
    """Return the seed of the random cases: fixed, or new for each run if HYPOTHESIS_PROFILE=explore."""
    seed = secrets.randbits(32) if os.environ.get("HYPOTHESIS_PROFILE") == "explore" else 0
    print(f"attack_seed: {seed}")
    return seed
