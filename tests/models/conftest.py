"""Fixture with a stand-in for the Hugging Face hub."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.stand_in_hub import Hub, serving


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve a hub without repositories. huggingface_hub uses only it, with an empty cache and the stand-in's token."""
    constants = pytest.importorskip("huggingface_hub.constants")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", "stand-in")
    with serving() as found:
        url = found.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        values = {
            "ENDPOINT": found.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": url,
            "HF_HUB_CACHE": str(tmp_path / "hub-cache"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }
        for name, value in values.items():
            monkeypatch.setattr(constants, name, value)
        yield found
