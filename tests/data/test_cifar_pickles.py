"""The official archives, packed and unpacked: read to the byte, recognised by checksum, and refused when not whole."""

import hashlib
import io
import os
import pickle
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnconv.data.cifar import CIFARS
from attnconv.data.cifar_pickles import Official, check_pickles, read_pickles, unpickle
from attnconv.data.decoded_cache import Tensors
from tests.data.making import pixels, small_cifar, tar_gz


@pytest.fixture
def official() -> Official:
    return small_cifar()[0].official


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    facts, files = small_cifar()
    path = tmp_path / "cifar-10-python.tar.gz"
    path.write_bytes(tar_gz(facts.official.folder, files))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "cifar-10-batches-py"
    path.mkdir()
    for name, content in small_cifar()[1].items():
        (path / name).write_bytes(content)
    return path


def assert_is_small_cifar(tensors: Tensors) -> None:
    train = np.concatenate([pixels(12, 0), pixels(8, 1)])
    assert torch.equal(tensors["train_images"], torch.from_numpy(train))
    assert torch.equal(tensors["test_images"], torch.from_numpy(pixels(10, 2)))
    assert tensors["train_labels"].tolist() == [*range(10), 0, 1, *range(8)]
    assert tensors["test_labels"].tolist() == list(range(10))


class TestReading:
    def test_the_archive(self, archive: Path, official: Official) -> None:
        assert check_pickles(archive, official) == hashlib.sha256(archive.read_bytes()).hexdigest()
        assert_is_small_cifar(read_pickles(archive, official, "labels"))

    def test_the_folder(self, folder: Path, official: Official) -> None:
        check_pickles(folder, official)
        assert_is_small_cifar(read_pickles(folder, official, "labels"))

    def test_facts_of_the_real_archives(self) -> None:
        for name, count in (("cifar10", 5), ("cifar100", 1)):
            facts = CIFARS[name]
            assert facts.rows == {"train": 50_000, "test": 10_000}
            assert len(facts.official.train) == count
            assert len(facts.official.remote.sha256) == 64
            assert {len(md5) for md5 in facts.official.pickles.values()} == {32}
            assert facts.official.remote.url.endswith(f"/{facts.official.archive}")
        assert [len(labels.classes) for labels in CIFARS["cifar100"].labels.values()] == [100, 20]
        for labels in CIFARS["cifar100"].labels.values():
            assert sorted(set(labels.classes)) == list(labels.classes)


class TestWhatIsNotWhole:
    def test_half_an_archive(self, archive: Path, official: Official) -> None:
        whole = archive.read_bytes()
        archive.write_bytes(whole[:5000])
        expected = (
            rf"cifar-10-python\.tar\.gz: must have {len(whole):,} bytes, got 5,000\. It is half downloaded\. Remove it"
        )
        with pytest.raises(ValueError, match=expected):
            check_pickles(archive, official)

    def test_a_longer_archive(self, archive: Path, official: Official) -> None:
        size = archive.stat().st_size
        archive.write_bytes(archive.read_bytes() + b"!")
        with pytest.raises(ValueError, match=rf"must have {size:,} bytes, got {size + 1:,}\. Remove it"):
            check_pickles(archive, official)

    def test_a_changed_byte(self, archive: Path, official: Official) -> None:
        content = bytearray(archive.read_bytes())
        content[1000] ^= 1
        archive.write_bytes(content)
        got = hashlib.sha256(content).hexdigest()
        with pytest.raises(ValueError, match=rf"must have the SHA-256 {official.remote.sha256}, got {got}"):
            check_pickles(archive, official)

    def test_a_folder_without_a_file(self, folder: Path, official: Official) -> None:
        (folder / "data_batch_2").unlink()
        with pytest.raises(ValueError, match=r"must hold data_batch_1, .*, got a folder without data_batch_2\. Unpack"):
            check_pickles(folder, official)

    def test_a_folder_with_a_damaged_file(self, folder: Path, official: Official) -> None:
        file = folder / "test_batch"
        file.write_bytes(file.read_bytes()[:-10])
        got = hashlib.md5(file.read_bytes()).hexdigest()
        with pytest.raises(
            ValueError, match=rf"test_batch: must have the MD5 {official.test['test_batch']}, got {got}"
        ):
            check_pickles(folder, official)

    @pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08 and then nothing"])
    def test_no_archive_at_all(self, content: bytes, archive: Path, official: Official) -> None:
        archive.write_bytes(content)
        with pytest.raises(ValueError, match=rf"cifar-10-python\.tar\.gz: must have .* bytes, got {len(content)}\."):
            check_pickles(archive, official)


class TestWhatIsMeantBadly:
    """Only what has the published checksum is opened, and opening it runs nothing."""

    @pytest.mark.parametrize("name", ["../escaped", "/escaped", "cifar-10-batches-py/../../escaped"])
    def test_a_name_outside_the_folder(self, name: str, archive: Path, official: Official) -> None:
        """Even a published archive could write no file: it is read in memory, by the names of its pickles."""
        with tarfile.open(archive) as content:
            files = [(entry, content.extractfile(entry)) for entry in content.getmembers() if entry.isreg()]
            with tarfile.open(archive.with_name("other.tar.gz"), mode="w:gz") as target:
                for entry, file in files:
                    target.addfile(entry, file)
                escaped = tarfile.TarInfo(name)
                escaped.size = 5
                target.addfile(escaped, io.BytesIO(b"hello"))
        before = sorted(archive.parent.parent.rglob("*"))
        assert_is_small_cifar(read_pickles(archive.with_name("other.tar.gz"), official, "labels"))
        assert sorted(archive.parent.parent.rglob("*")) == before
        with pytest.raises(ValueError, match=r"other\.tar\.gz: must have"):
            check_pickles(archive.with_name("other.tar.gz"), official)

    def test_a_link_is_not_followed(self, archive: Path, official: Official) -> None:
        secret = archive.parent / "secret"
        secret.write_bytes(small_cifar()[1]["test_batch"])
        with tarfile.open(archive, mode="w:gz") as content:
            entry = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
            entry.type, entry.linkname = tarfile.SYMTYPE, str(secret)
            content.addfile(entry)
        with pytest.raises(KeyError, match="cifar-10-batches-py/data_batch_1"):
            read_pickles(archive, official, "labels")

    @pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
    def test_no_name_in_a_pickle_is_called(
        self, protocol: int, folder: Path, official: Official, tmp_path: Path
    ) -> None:
        witness = tmp_path / "executed"
        for evil in (Evil(os.system, f"touch {witness}"), Evil(os.mkdir, str(witness)), Evil(eval, "1 + 1")):
            content = pickle.dumps({"data": evil, "labels": [1]}, protocol=protocol)
            unpickle(content)
            (folder / "test_batch").write_bytes(content)
            with pytest.raises(ValueError, match=rf"test_batch: must have the MD5 {official.test['test_batch']}, got"):
                check_pickles(folder, official)
        assert not witness.exists()

    def test_nothing_is_imported(self) -> None:
        unpickle(b"\x80\x02cantigravity\nfly\n)R.")
        assert "antigravity" not in sys.modules


class Evil:
    """Calls a function when unpickled."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("protocol", [3, 4])
def test_pickles_of_this_numpy_are_read_alike(protocol: int, folder: Path, official: Official) -> None:
    """They are not published, but their arrays have the same parts."""
    images = pixels(10, 2).reshape(10, -1)
    content = pickle.dumps({b"data": images, b"labels": list(range(10))}, protocol=protocol)
    (folder / "test_batch").write_bytes(content)
    assert_is_small_cifar(read_pickles(folder, official, "labels"))
