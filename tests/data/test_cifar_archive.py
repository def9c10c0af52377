"""The official archives, packed and unpacked: read to the byte, recognised by checksum, and refused when not whole."""

import dataclasses
import hashlib
import io
import os
import pickle
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from attnconv.data.cifar import CIFARS, Cifar, read_archive, unpickle
from tests.data.making import pixels, small_cifar, tar_gz, with_archive
from tests.data.test_cifar import assert_is_small_cifar


@pytest.fixture
def facts() -> Cifar:
    return small_cifar()[0]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    facts, files = small_cifar()
    path = tmp_path / "cifar-10-python.tar.gz"
    path.write_bytes(tar_gz(facts.folder, files))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "cifar-10-batches-py"
    path.mkdir()
    for name, content in small_cifar()[1].items():
        (path / name).write_bytes(content)
    return path


class TestReading:
    def test_the_archive(self, archive: Path, facts: Cifar) -> None:
        assert_is_small_cifar(read_archive(archive, facts, "labels"))

    def test_the_folder(self, folder: Path, facts: Cifar) -> None:
        assert_is_small_cifar(read_archive(folder, facts, "labels"))

    def test_facts_of_the_real_archives(self) -> None:
        for name, count in (("cifar10", 5), ("cifar100", 1)):
            facts = CIFARS[name]
            assert facts.rows == {"train": 50_000, "test": 10_000}
            assert len(facts.train) == count
            assert len(facts.archive.sha256) == 64
            assert {len(md5) for md5 in (facts.train | facts.test).values()} == {32}
            assert facts.archive.url.endswith(f"/{facts.archive.name}")
        assert [len(labels.classes) for labels in CIFARS["cifar100"].labels.values()] == [100, 20]
        for labels in CIFARS["cifar100"].labels.values():
            assert sorted(set(labels.classes)) == list(labels.classes)


class TestWhatIsNotWhole:
    def test_half_an_archive(self, archive: Path, facts: Cifar) -> None:
        whole = archive.read_bytes()
        archive.write_bytes(whole[:5000])
        expected = (
            rf"cifar-10-python\.tar\.gz: must have {len(whole):,} bytes, got 5,000\. It is half downloaded\. Remove it"
        )
        with pytest.raises(ValueError, match=expected):
            read_archive(archive, facts, "labels")

    def test_a_longer_archive(self, archive: Path, facts: Cifar) -> None:
        size = archive.stat().st_size
        archive.write_bytes(archive.read_bytes() + b"!")
        with pytest.raises(ValueError, match=rf"must have {size:,} bytes, got {size + 1:,}\. Remove it"):
            read_archive(archive, facts, "labels")

    def test_a_changed_byte(self, archive: Path, facts: Cifar) -> None:
        content = bytearray(archive.read_bytes())
        content[1000] ^= 1
        archive.write_bytes(content)
        got = hashlib.sha256(content).hexdigest()
        with pytest.raises(ValueError, match=rf"must have the SHA-256 {facts.archive.sha256}, got {got}"):
            read_archive(archive, facts, "labels")

    def test_a_folder_without_a_file(self, folder: Path, facts: Cifar) -> None:
        (folder / "data_batch_2").unlink()
        with pytest.raises(ValueError, match=r"must hold data_batch_1, .*, got a folder without data_batch_2\. Unpack"):
            read_archive(folder, facts, "labels")

    def test_a_folder_with_a_damaged_file(self, folder: Path, facts: Cifar) -> None:
        file = folder / "test_batch"
        file.write_bytes(file.read_bytes()[:-10])
        got = hashlib.md5(file.read_bytes()).hexdigest()
        with pytest.raises(ValueError, match=rf"test_batch: .*got {got}"):
            read_archive(folder, facts, "labels")

    @pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08 and then nothing"])
    def test_no_archive_at_all(self, content: bytes, archive: Path, facts: Cifar) -> None:
        archive.write_bytes(content)
        with pytest.raises(ValueError, match=rf"cifar-10-python\.tar\.gz: .*got {len(content)}\."):
            read_archive(archive, facts, "labels")


class TestWhatIsMeantBadly:
    """Only what has the published checksum is opened, and opening it runs nothing."""

    @pytest.mark.parametrize("name", ["../escaped", "/escaped", "cifar-10-batches-py/../../escaped"])
    def test_a_name_outside_the_folder(self, name: str, archive: Path, facts: Cifar) -> None:
        """Even a published archive could write no file: it is read in memory, by the names of its pickles."""
        with tarfile.open(archive) as content:
            files = [(entry, content.extractfile(entry)) for entry in content.getmembers() if entry.isreg()]
            with tarfile.open(archive.with_name("other.tar.gz"), mode="w:gz") as target:
                for entry, file in files:
                    target.addfile(entry, file)
                escaped = tarfile.TarInfo(name)
                escaped.size = 5
                target.addfile(escaped, io.BytesIO(b"hello"))
        other = archive.with_name("other.tar.gz")
        before = sorted(archive.parent.parent.rglob("*"))
        assert_is_small_cifar(read_archive(other, with_archive(facts, other.read_bytes()), "labels"))
        assert sorted(archive.parent.parent.rglob("*")) == before
        with pytest.raises(ValueError, match=r"other\.tar\.gz: must have"):
            read_archive(other, facts, "labels")

    def test_a_link_is_not_followed(self, archive: Path, facts: Cifar) -> None:
        secret = archive.parent / "secret"
        secret.write_bytes(small_cifar()[1]["test_batch"])
        with tarfile.open(archive, mode="w:gz") as content:
            entry = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
            entry.type, entry.linkname = tarfile.SYMTYPE, str(secret)
            content.addfile(entry)
        with pytest.raises(KeyError, match="data_batch_1"):
            read_archive(archive, with_archive(facts, archive.read_bytes()), "labels")

    @pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
    def test_no_name_in_a_pickle_is_called(self, protocol: int, folder: Path, facts: Cifar, tmp_path: Path) -> None:
        witness = tmp_path / "executed"
        for evil in (Evil(os.system, f"touch {witness}"), Evil(os.mkdir, str(witness)), Evil(eval, "1 + 1")):
            content = pickle.dumps({"data": evil, "labels": [1]}, protocol=protocol)
            unpickle(content)
            (folder / "test_batch").write_bytes(content)
            with pytest.raises(ValueError, match=rf"test_batch: must have the MD5 {facts.test['test_batch']}, got"):
                read_archive(folder, facts, "labels")
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
def test_pickles_of_this_numpy_are_read_alike(protocol: int, folder: Path, facts: Cifar) -> None:
    """They are not published, but their arrays have the same parts."""
    images = pixels(10, 2).reshape(10, -1)
    content = pickle.dumps({b"data": images, b"labels": list(range(10))}, protocol=protocol)
    (folder / "test_batch").write_bytes(content)
    facts = dataclasses.replace(facts, test={"test_batch": hashlib.md5(content).hexdigest()})
    assert_is_small_cifar(read_archive(folder, facts, "labels"))
