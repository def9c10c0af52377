"""Fixtures shared by the tests of the report."""

from collections.abc import Iterator

import pytest

from attnconv.report import figure_style


@pytest.fixture(scope="session", autouse=True)
def coarse() -> Iterator[None]:
    """Write PNG files at a quarter of the resolution; no test depends on it, and SVG files are unchanged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figure_style, "_DPI", 50)
        yield
