"""Fixtures of the data tests."""

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture
def unhooked() -> Iterator[None]:
    """Lets a wrong type or shape pass the test run's own check, so that the library's message for it is reached."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
