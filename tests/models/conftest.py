"""Fixture with a stand-in for the Hugging Face hub."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.stand_in_hub import Hub, serving


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve a hub without repositories. huggingface_hub uses only it, with an empty cache and the stand-in's token."""
    client = pytest.importorskip("huggingface_hub.file_download")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", "stand-in")
    with serving() as found:
        url = found.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        for module in (client.constants, client):  # old versions import the name
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", url, raising=False)
        monkeypatch.setattr(client.constants, "ENDPOINT", found.endpoint)
        monkeypatch.setattr(client.constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr(client.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(client.constants, "HF_HUB_DISABLE_XET", True)
        yield found
