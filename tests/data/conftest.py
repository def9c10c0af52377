"""Fixtures of the data tests."""

from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest


@pytest.fixture
def unhooked() -> Iterator[None]:
    """Lets a wrong type or shape pass the test run's own check, so that the library's message for it is reached."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or fills the cache of whoever runs it."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "attnconv"
