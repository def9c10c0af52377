"""The cache of decoded images: made once, never believed when damaged, never in the way."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from attnconv.data import decoded_cache
from attnconv.data.decoded_cache import Tensors, cache_folder, cached, file_digest, key_of


class Source:
    """Counts how often it is decoded."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Tensors:
        self.calls += 1
        return {"images": torch.arange(60, dtype=torch.uint8).view(5, 3, 2, 2), "labels": torch.arange(5)}


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_second_time_nothing_is_decoded(tmp_path: Path) -> None:
    source = Source()
    first = cached("some", "key", source, folder=tmp_path / "deep" / "cache")
    second = cached("some", "key", source, folder=tmp_path / "deep" / "cache")
    assert source.calls == 1
    assert same(first, second)
    assert [path.name for path in (tmp_path / "deep" / "cache").iterdir()] == ["some-key.safetensors"]


def test_another_key_is_another_entry(tmp_path: Path) -> None:
    source = Source()
    for key in (key_of("a", "bc"), key_of("ab", "c")):
        cached("some", key, source, folder=tmp_path)
    assert source.calls == 2


@pytest.mark.parametrize("harm", ["truncated", "empty", "one bit", "renamed", "foreign"])
def test_a_damaged_entry_is_made_again(harm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = Source()
    first = cached("some", "key", source, folder=tmp_path)
    path = tmp_path / "some-key.safetensors"
    content = path.read_bytes()
    if harm == "renamed":
        other = cached("some", "other", source, folder=tmp_path)
        assert same(first, other)
        (tmp_path / "some-other.safetensors").replace(path)
    else:
        damaged = {
            "truncated": content[:-7],
            "empty": b"",
            "one bit": content[:-1] + bytes([content[-1] ^ 1]),
            "foreign": b"not a safetensors file at all",
        }
        path.write_bytes(damaged[harm])
    before = source.calls
    with caplog.at_level(logging.WARNING):
        assert same(cached("some", "key", source, folder=tmp_path), first)
    assert "is damaged and will be made again" in caplog.text
    assert source.calls == before + 1
    cached("some", "key", source, folder=tmp_path)
    assert source.calls == before + 1


def test_a_folder_that_cannot_be_written_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = Source()
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert same(cached("some", "key", source, folder=tmp_path / "file"), source())
    assert "decoded images are not kept" in caplog.text


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(decoded_cache, "save_file", full)
    source = Source()
    assert same(cached("some", "key", source, folder=tmp_path), source())
    assert list(tmp_path.iterdir()) == []


def test_off_keeps_nothing() -> None:
    source = Source()
    for _ in range(2):
        cached("some", "key", source, folder=None)
    assert source.calls == 2


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder("off") is None
    assert cache_folder(str(tmp_path)) == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("auto") == tmp_path / "attnconv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder("auto") == Path.home() / ".cache" / "attnconv"


def test_digest_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert file_digest(tmp_path / "abc", "md5") == "900150983cd24fb0d6963f7d28e17f72"
    assert file_digest(tmp_path / "abc").startswith("ba7816bf8f01cfea")
