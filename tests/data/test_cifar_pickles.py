"""The official archives, packed and unpacked: read to the byte, recognised by checksum, and refused when not whole."""

import dataclasses
import hashlib
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from attnconv.data.cifar import CIFARS
from attnconv.data.cifar_pickles import Official, check_archive, check_folder, read_archive, read_folder
from attnconv.data.decoded_cache import Tensors
from tests.data.making import pixels, python2_pickle, small_cifar, tar_gz


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
        assert check_archive(archive, official) == hashlib.sha256(archive.read_bytes()).hexdigest()
        assert_is_small_cifar(read_archive(archive, official, "labels"))

    def test_the_folder(self, folder: Path, official: Official) -> None:
        check_folder(folder, official)
        assert_is_small_cifar(read_folder(folder, official, "labels"))

    def test_facts_of_the_real_archives(self) -> None:
        for name, count in (("cifar10", 5), ("cifar100", 1)):
            facts = CIFARS[name]
            assert facts.rows == {"train": 50_000, "test": 10_000}
            assert len(facts.official.train) == count
            assert len(facts.official.remote.sha256) == 64
            assert {len(member.md5) for member in facts.official.members} == {32}
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
            check_archive(archive, official)

    def test_a_longer_archive(self, archive: Path, official: Official) -> None:
        size = archive.stat().st_size
        archive.write_bytes(archive.read_bytes() + b"!")
        with pytest.raises(ValueError, match=rf"must have {size:,} bytes, got {size + 1:,}\. Remove it"):
            check_archive(archive, official)

    def test_a_changed_byte(self, archive: Path, official: Official) -> None:
        content = bytearray(archive.read_bytes())
        content[1000] ^= 1
        archive.write_bytes(content)
        got = hashlib.sha256(content).hexdigest()
        with pytest.raises(ValueError, match=rf"must have the SHA-256 {official.remote.sha256}, got {got}"):
            check_archive(archive, official)

    def test_a_folder_without_a_file(self, folder: Path, official: Official) -> None:
        (folder / "data_batch_2").unlink()
        with pytest.raises(ValueError, match=r"must hold data_batch_1, .*, got a folder without data_batch_2\. Unpack"):
            check_folder(folder, official)

    def test_a_folder_with_a_damaged_file(self, folder: Path, official: Official) -> None:
        file = folder / "test_batch"
        file.write_bytes(file.read_bytes()[:-10])
        got = hashlib.md5(file.read_bytes()).hexdigest()
        with pytest.raises(ValueError, match=rf"test_batch: must have the MD5 {official.test[0].md5}, got {got}"):
            check_folder(folder, official)

    @pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08 and then nothing"])
    def test_no_archive_at_all(self, content: bytes, archive: Path, official: Official) -> None:
        archive.write_bytes(content)
        with pytest.raises(ValueError, match=r"cifar-10-python\.tar\.gz: must be a whole tar\.gz archive, got"):
            read_archive(archive, official, "labels")

    def test_an_archive_that_ends_early(self, archive: Path, official: Official) -> None:
        archive.write_bytes(archive.read_bytes()[:-3000])
        with pytest.raises(ValueError, match=r"must be a whole tar\.gz archive, got"):
            read_archive(archive, official, "labels")

    def test_an_archive_without_a_pickle(self, archive: Path, official: Official) -> None:
        files = small_cifar()[1]
        del files["test_batch"]
        archive.write_bytes(tar_gz(official.folder, files))
        with pytest.raises(ValueError, match=r"must hold cifar-10-batches-py/test_batch, got an archive without it"):
            read_archive(archive, official, "labels")


class TestWhatIsMeantBadly:
    @pytest.mark.parametrize("name", ["../escaped", "/escaped", "cifar-10-batches-py/../../escaped"])
    def test_a_name_outside_the_folder(self, name: str, archive: Path, official: Official) -> None:
        target = io.BytesIO()
        with tarfile.open(fileobj=target, mode="w:gz") as content:
            entry = tarfile.TarInfo(name)
            entry.size = 5
            content.addfile(entry, io.BytesIO(b"hello"))
        archive.write_bytes(target.getvalue())
        before = sorted(archive.parent.parent.rglob("*"))
        with pytest.raises(
            ValueError, match=rf"must hold no name outside its folder, got '{name}'\. Nothing was written"
        ):
            read_archive(archive, official, "labels")
        assert sorted(archive.parent.parent.rglob("*")) == before

    def test_a_link_is_not_followed(self, archive: Path, official: Official) -> None:
        secret = archive.parent / "secret"
        secret.write_bytes(small_cifar()[1]["test_batch"])
        target = io.BytesIO()
        with tarfile.open(fileobj=target, mode="w:gz") as content:
            entry = tarfile.TarInfo("cifar-10-batches-py/test_batch")
            entry.type, entry.linkname = tarfile.SYMTYPE, str(secret)
            content.addfile(entry)
        archive.write_bytes(target.getvalue())
        with pytest.raises(ValueError, match=r"must hold cifar-10-batches-py/data_batch_1, got an archive without it"):
            read_archive(archive, official, "labels")


class TestWhatAPickleMustHold:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (
                lambda: python2_pickle(pixels(10), list(range(10)), "tags"),
                r"must hold 'labels', got a dictionary of data, tags",
            ),
            (
                lambda: python2_pickle(pixels(9), list(range(9))),
                r"must hold pixels of the shape \(10, 3072\).*got \(9, 3072\)",
            ),
            (lambda: python2_pickle(pixels(10), list(range(9))), r"must hold 10 integers in 'labels', got 9 values"),
            (lambda: b"\x80\x02}(U\x04dataK\x01U\x06labels]u.", r"must hold pixels of the shape \(10, 3072\).*got int"),
        ],
    )
    def test_each_part(self, make: Callable[[], bytes], message: str, folder: Path, official: Official) -> None:
        (folder / "test_batch").write_bytes(make())
        with pytest.raises(ValueError, match=rf"test_batch: {message}"):
            read_folder(folder, official, "labels")

    def test_labels_that_are_no_list(self, folder: Path, official: Official) -> None:
        content = python2_pickle(pixels(10), list(range(10)))
        start = content.index(b"](")
        (folder / "test_batch").write_bytes(content[:start] + b"K\x05u.")
        with pytest.raises(ValueError, match=r"test_batch: must hold 10 integers in 'labels', got int"):
            read_folder(folder, official, "labels")


def test_rows_are_counted_over_members() -> None:
    facts = small_cifar()[0]
    assert facts.rows == {"train": 20, "test": 10}
    assert dataclasses.replace(facts, official=CIFARS["cifar10"].official).rows["train"] == 50_000
