"""Fixtures of the data tests."""

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture
def unhooked() -> Iterator[None]:
    """Disable the type checks of the test run, so that invalid types and shapes reach the library's own checks."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
