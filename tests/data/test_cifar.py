"""CIFAR in its three forms gives the same images; what is missing or damaged is named, with what to do."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from attnconv.data import cifar as module
from attnconv.data.cifar import CIFARS, Cifar, read_cifar
from attnconv.data.download import Remote
from attnconv.data.image_set import ImageSet
from attnconv.data.settings import DataSettings
from tests.data.making import pixels, small_cifar, tar_gz, write_hub_folder


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

    def test_cifar_100_with_both_kinds_of_labels(self, tmp_path: Path) -> None:
        facts = small_cifar("cifar100")[0]
        put_archive(tmp_path / "archive", "cifar100")
        sets, source = read_cifar(facts, settings_for(tmp_path / "archive", name="cifar100"))
        assert_is_small_cifar(sets)
        assert source == "CIFAR-100 from the official archive cifar-100-python.tar.gz"
        write_hub_folder(tmp_path / "hub", column="coarse_label")
        sets, _ = read_cifar(facts, settings_for(tmp_path / "hub", name="cifar100", labels="coarse"))
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
            rf"data\.root: must hold CIFAR-10, got none of cifar-10-python\.tar\.gz, cifar-10-batches-py, "
            rf"train-\*\.parquet in {tmp_path} \(data\.download is off\)\. Put cifar-10-python\.tar\.gz "
            rf"\(170,498,071 bytes, SHA-256 {remote.sha256}, from {remote.url}\) into that folder"
        )
        with pytest.raises(ValueError, match=expected):
            read_cifar(CIFARS["cifar10"], settings_for(tmp_path))

    def test_offline(self, facts: Cifar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def offline(remote: Remote, target: Path, **_: object) -> Path:
            raise ConnectionError("no route to host")

        monkeypatch.setattr(module, "fetch", offline)
        expected = (
            r"data\.root: must hold CIFAR-10, got none of .* \(the download failed: no route to host\)\. Put cifar-10"
        )
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
        with pytest.raises(ValueError, match=r"got a folder without test_batch"):
            read_cifar(facts, settings_for(tmp_path, download=True))

    def test_labels_beyond_the_classes(self, facts: Cifar, tmp_path: Path) -> None:
        few = facts.labels["fine"]._replace(classes=("airplane", "bird"))
        put_archive(tmp_path)
        with pytest.raises(ValueError, match=r"must have labels of 0 to 1 in train, got 0 to 9"):
            read_cifar(dataclasses.replace(facts, labels={"fine": few}), settings_for(tmp_path))
