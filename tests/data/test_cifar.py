"""The three formats of CIFAR contain the same images, verified by checksums; errors name missing or damaged files."""

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
import torch

from attnconv.data import cifar as module
from attnconv.data.cifar import CIFARS, Cifar, Remote, read_archive, read_cifar, unpickle
from attnconv.data.image_set import ImageSet
from attnconv.data.settings import DataSettings
from tests.data.making import pixels, small_cifar, tar_gz, with_archive, write_hub_folder


@pytest.fixture
def facts() -> Cifar:
    return small_cifar()[0]


def settings_for(root: Path, **changes: Any) -> DataSettings:
    return DataSettings(**{"root": str(root), "download": False, **changes})


def put_archive(root: Path, name: str = "cifar10") -> Path:
    facts, files = small_cifar(name)
    root.mkdir(exist_ok=True)
    path = root / facts.archive.name
    path.write_bytes(tar_gz(facts.folder, files))
    return path


def put_folder(folder: Path, name: str = "cifar10") -> None:
    folder.mkdir(parents=True)
    for file, content in small_cifar(name)[1].items():
        (folder / file).write_bytes(content)


def assert_is_small_cifar(sets: dict[str, ImageSet]) -> None:
    images = [torch.from_numpy(pixels(rows, seed)) for seed, rows in enumerate((12, 8, 10))]
    assert torch.equal(sets["train"].images, torch.cat(images[:2]))
    assert torch.equal(sets["test"].images, images[2])
    assert sets["train"].labels.tolist() == [*range(10), 0, 1, *range(8)]
    assert sets["test"].labels.tolist() == list(range(10))


class TestForms:
    def test_the_archive(self, facts: Cifar, tmp_path: Path) -> None:
        put_archive(tmp_path)
        sets, source = read_cifar(facts, settings_for(tmp_path))
        assert_is_small_cifar(sets)
        assert source == "CIFAR-10 from the official archive cifar-10-python.tar.gz"

    @pytest.mark.parametrize("inside", [True, False])
    def test_the_unpacked_archive_as_a_child_or_as_the_root(self, inside: bool, facts: Cifar, tmp_path: Path) -> None:
        folder = tmp_path / "cifar-10-batches-py" if inside else tmp_path / "anything"
        put_folder(folder)
        sets, source = read_cifar(facts, settings_for(tmp_path if inside else folder))
        assert_is_small_cifar(sets)
        assert source == f"CIFAR-10 from the unpacked official archive {folder.name}"

    @pytest.mark.parametrize("place", ["", "data", "plain_text", "cifar10"])
    def test_parquet(self, place: str, facts: Cifar, tmp_path: Path) -> None:
        write_hub_folder(tmp_path / place)
        sets, source = read_cifar(facts, settings_for(tmp_path))
        assert_is_small_cifar(sets)
        assert source == "CIFAR-10 from parquet files"

    def test_cifar_100(self, tmp_path: Path) -> None:
        facts = small_cifar("cifar100")[0]
        put_archive(tmp_path / "archive", "cifar100")
        sets, source = read_cifar(facts, settings_for(tmp_path / "archive", name="cifar100"))
        assert_is_small_cifar(sets)
        assert source == "CIFAR-100 from the official archive cifar-100-python.tar.gz"
        write_hub_folder(tmp_path / "hub", column="fine_label")
        sets, _ = read_cifar(facts, settings_for(tmp_path / "hub", name="cifar100"))
        assert_is_small_cifar(sets)

    def test_a_home_folder(self, facts: Cifar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        put_archive(tmp_path / "images")
        assert_is_small_cifar(read_cifar(facts, settings_for(Path("~/images")))[0])


def test_nothing_is_written_beside_the_data(facts: Cifar, tmp_path: Path) -> None:
    write_hub_folder(tmp_path)
    before = sorted(tmp_path.iterdir())
    read_cifar(facts, settings_for(tmp_path))
    assert sorted(tmp_path.iterdir()) == before


class TestMissing:
    def test_an_empty_folder_says_what_to_put_where(self, tmp_path: Path) -> None:
        remote = CIFARS["cifar10"].archive
        expected = (
            rf"data\.root: .* CIFAR-10, got none of cifar-10-python\.tar\.gz, cifar-10-batches-py, "
            rf"train-\*\.parquet in {tmp_path} \(data\.download is False\)\. Download {remote.url} "
            rf"\(170,498,071 bytes, SHA-256 {remote.sha256}\)"
        )
        with pytest.raises(ValueError, match=expected):
            read_cifar(CIFARS["cifar10"], settings_for(tmp_path))

    def test_offline(self, facts: Cifar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def offline(remote: Remote, target: Path, **_: object) -> Path:
            raise ConnectionError("no route to host")

        monkeypatch.setattr(module, "fetch", offline)
        expected = r"data\.root: .* CIFAR-10, got none of .* \(the download failed: no route to host\)\. .*cifar-10"
        with pytest.raises(ValueError, match=expected):
            read_cifar(facts, settings_for(tmp_path, download=True))

    def test_a_folder_that_cannot_take_the_download(
        self, facts: Cifar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(remote: Remote, target: Path, **_: object) -> Path:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(module, "fetch", full)
        with pytest.raises(ValueError, match=r"\(the download could not be stored: .*No space left on device\)"):
            read_cifar(facts, settings_for(tmp_path, download=True))

    def test_what_is_downloaded_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        facts, files = small_cifar()
        content = tar_gz(facts.folder, files)

        def fetched(remote: Remote, target: Path, **_: object) -> None:
            target.parent.mkdir(parents=True)
            target.write_bytes(content)

        monkeypatch.setattr(module, "fetch", fetched)
        sets, _ = read_cifar(facts, settings_for(tmp_path / "new", download=True))
        assert_is_small_cifar(sets)

    def test_a_half_unpacked_archive_is_not_replaced_silently(self, facts: Cifar, tmp_path: Path) -> None:
        put_folder(tmp_path / "cifar-10-batches-py")
        (tmp_path / "cifar-10-batches-py" / "test_batch").unlink()
        with pytest.raises(ValueError, match=r"got .*test_batch"):
            read_cifar(facts, settings_for(tmp_path, download=True))

    def test_labels_beyond_the_classes(self, facts: Cifar, tmp_path: Path) -> None:
        put_archive(tmp_path)
        with pytest.raises(ValueError, match=r"labels .*0 to 1 .*train, got 0 to 9"):
            read_cifar(dataclasses.replace(facts, classes=("airplane", "bird")), settings_for(tmp_path))


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
        assert_is_small_cifar(read_archive(archive, facts))

    def test_the_folder(self, folder: Path, facts: Cifar) -> None:
        assert_is_small_cifar(read_archive(folder, facts))

    def test_facts_of_the_real_archives(self) -> None:
        for name, count in (("cifar10", 5), ("cifar100", 1)):
            facts = CIFARS[name]
            assert facts.rows == {"train": 50_000, "test": 10_000}
            assert len(facts.train) == count
            assert len(facts.archive.sha256) == 64
            assert {len(md5) for md5 in (facts.train | facts.test).values()} == {32}
            assert facts.archive.url.endswith(f"/{facts.archive.name}")
        classes = CIFARS["cifar100"].classes
        assert sorted(set(classes)) == list(classes)
        assert len(classes) == 100


class TestWhatIsNotWhole:
    def test_half_an_archive(self, archive: Path, facts: Cifar) -> None:
        whole = archive.read_bytes()
        archive.write_bytes(whole[:5000])
        got = hashlib.sha256(whole[:5000]).hexdigest()
        with pytest.raises(ValueError, match=rf"cifar-10-python\.tar\.gz: .*SHA-256 .*, got {got}\..*Remove"):
            read_archive(archive, facts)

    def test_a_longer_archive(self, archive: Path, facts: Cifar) -> None:
        archive.write_bytes(archive.read_bytes() + b"!")
        got = hashlib.sha256(archive.read_bytes()).hexdigest()
        with pytest.raises(ValueError, match=rf"must have the SHA-256 {facts.archive.sha256}, got {got}"):
            read_archive(archive, facts)

    def test_a_changed_byte(self, archive: Path, facts: Cifar) -> None:
        content = bytearray(archive.read_bytes())
        content[1000] ^= 1
        archive.write_bytes(content)
        got = hashlib.sha256(content).hexdigest()
        with pytest.raises(ValueError, match=rf"must have the SHA-256 {facts.archive.sha256}, got {got}"):
            read_archive(archive, facts)

    def test_a_folder_without_a_file(self, folder: Path, facts: Cifar) -> None:
        (folder / "data_batch_2").unlink()
        with pytest.raises(ValueError, match=r"data_batch_1, .*, got .*data_batch_2\. Unpack"):
            read_archive(folder, facts)

    def test_a_folder_with_a_damaged_file(self, folder: Path, facts: Cifar) -> None:
        file = folder / "test_batch"
        file.write_bytes(file.read_bytes()[:-10])
        got = hashlib.md5(file.read_bytes()).hexdigest()
        with pytest.raises(ValueError, match=rf"test_batch: .*got {got}"):
            read_archive(folder, facts)

    @pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08 and then nothing"])
    def test_no_archive_at_all(self, content: bytes, archive: Path, facts: Cifar) -> None:
        archive.write_bytes(content)
        with pytest.raises(
            ValueError, match=rf"cifar-10-python\.tar\.gz: .*got {hashlib.sha256(content).hexdigest()}\."
        ):
            read_archive(archive, facts)


class TestWhatIsMeantBadly:
    """Only files with the published checksum are opened, and opening them executes no code."""

    @pytest.mark.parametrize("name", ["../escaped", "/escaped", "cifar-10-batches-py/../../escaped"])
    def test_a_name_outside_the_folder(self, name: str, archive: Path, facts: Cifar) -> None:
        """Not even a published archive could write a file: it is read in memory, by the names of its pickles."""
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
        assert_is_small_cifar(read_archive(other, with_archive(facts, other.read_bytes())))
        assert sorted(archive.parent.parent.rglob("*")) == before
        with pytest.raises(ValueError, match=r"other\.tar\.gz: must have"):
            read_archive(other, facts)

    def test_a_link_is_not_followed(self, archive: Path, facts: Cifar) -> None:
        secret = archive.parent / "secret"
        secret.write_bytes(small_cifar()[1]["test_batch"])
        with tarfile.open(archive, mode="w:gz") as content:
            entry = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
            entry.type, entry.linkname = tarfile.SYMTYPE, str(secret)
            content.addfile(entry)
        with pytest.raises(KeyError, match="data_batch_1"):
            read_archive(archive, with_archive(facts, archive.read_bytes()))

    @pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
    def test_no_name_in_a_pickle_is_called(self, protocol: int, folder: Path, facts: Cifar, tmp_path: Path) -> None:
        witness = tmp_path / "executed"
        for evil in (Evil(os.system, f"touch {witness}"), Evil(os.mkdir, str(witness)), Evil(eval, "1 + 1")):
            content = pickle.dumps({"data": evil, "labels": [1]}, protocol=protocol)
            unpickle(content)
            (folder / "test_batch").write_bytes(content)
            with pytest.raises(ValueError, match=rf"test_batch: must have the MD5 {facts.test['test_batch']}, got"):
                read_archive(folder, facts)
        assert not witness.exists()

    def test_nothing_is_imported(self) -> None:
        unpickle(b"\x80\x02cantigravity\nfly\n)R.")
        assert "antigravity" not in sys.modules


class Evil:
    """Object that calls a function when unpickled."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("protocol", [3, 4])
def test_pickles_of_this_numpy_are_read_alike(protocol: int, folder: Path, facts: Cifar) -> None:
    """No archive contains pickles of this NumPy, but their arrays have the same parts."""
    images = pixels(10, 2).reshape(10, -1)
    content = pickle.dumps({b"data": images, b"labels": list(range(10))}, protocol=protocol)
    (folder / "test_batch").write_bytes(content)
    facts = dataclasses.replace(facts, test={"test_batch": hashlib.md5(content).hexdigest()})
    assert_is_small_cifar(read_archive(folder, facts))
