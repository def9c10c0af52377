"""What every test of the report shares."""

from collections.abc import Iterator

import pytest

from attnconv.report import figure_style


@pytest.fixture(scope="session", autouse=True)
def coarse() -> Iterator[None]:
    """PNG files of a quarter of the pixels along each side: no test counts them, and SVG files stay as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figure_style, "_DPI", 50)
        yield
