"""Parquet files in the Hugging Face layout: exact images, and errors for incomplete or damaged files."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from attnconv.data.hub_parquet import read_parquet
from attnconv.data.image_set import ImageSet
from tests.data.making import pixels, png, write_hub_folder, write_parquet
from tests.data.test_cifar import assert_is_small_cifar

ROWS = {"train": 20, "test": 10}
TEST = "test-00000-of-00001.parquet"


def read(folder: Path, labels: str = "label") -> dict[str, ImageSet]:
    sets = read_parquet(folder, labels, ROWS)
    assert sets is not None
    return sets


class TestReading:
    @pytest.mark.parametrize("column", ["label", "fine_label"])
    def test_images_and_labels(self, column: str, tmp_path: Path) -> None:
        write_hub_folder(tmp_path, column=column)
        sets = read(tmp_path, column)
        assert_is_small_cifar(sets)
        assert sets["train"].images.is_contiguous()

    def test_several_row_groups(self, tmp_path: Path) -> None:
        write_hub_folder(tmp_path)
        table = pq.read_table(tmp_path / TEST)
        pq.write_table(table, tmp_path / TEST, row_group_size=3)
        assert torch.equal(read(tmp_path)["test"].images, torch.from_numpy(pixels(10, 2)))

    def test_a_folder_without_parquet_is_something_else(self, tmp_path: Path) -> None:
        assert read_parquet(tmp_path, "label", ROWS) is None
        assert read_parquet(tmp_path / "absent", "label", ROWS) is None


class TestIncomplete:
    def test_a_missing_shard(self, tmp_path: Path) -> None:
        write_hub_folder(tmp_path)
        (tmp_path / "train-00001-of-00002.parquet").unlink()
        with pytest.raises(ValueError, match=r"20 rows of train, got 12 in train-00000-of-00002\.parquet"):
            read(tmp_path)

    def test_a_missing_split(self, tmp_path: Path) -> None:
        write_hub_folder(tmp_path)
        (tmp_path / TEST).unlink()
        with pytest.raises(ValueError, match=r"10 rows of test, got 0 in no file\."):
            read(tmp_path)

    def test_a_wrong_number_of_rows(self, tmp_path: Path) -> None:
        write_hub_folder(tmp_path)
        write_parquet(tmp_path / TEST, [png(image) for image in pixels(7)], list(range(7)))
        with pytest.raises(ValueError, match=rf": .*10 rows of test, got 7 in {TEST}"):
            read(tmp_path)


class TestDamaged:
    @pytest.mark.parametrize(
        "harm",
        [
            lambda content: content[: len(content) // 2],
            lambda content: b"",
            lambda content: b"<html>404</html>",
            lambda content: content[:200] + bytes(len(content) - 400) + content[-200:],
        ],
        ids=["half", "empty", "another file", "zeros inside"],
    )
    def test_a_file(self, harm: Callable[[bytes], bytes], tmp_path: Path) -> None:
        write_hub_folder(tmp_path)
        (tmp_path / TEST).write_bytes(harm((tmp_path / TEST).read_bytes()))
        with pytest.raises(ValueError, match=rf"{TEST}: .*parquet.*got "):
            read(tmp_path)

    def test_a_broken_image(self, tmp_path: Path) -> None:
        write_hub_folder(tmp_path)
        good = png(pixels(1)[0])
        for bad in (good[:100], good[:-40] + bytes(40), b"no image", b""):
            write_parquet(tmp_path / TEST, [good] * 3 + [bad] + [good] * 6, [0] * 10)
            with pytest.raises(ValueError, match=rf"row 3 of .*{TEST}: .*image, got "):
                read(tmp_path)

    @pytest.mark.parametrize(("mode", "size"), [("L", (32, 32)), ("RGB", (32, 31)), ("RGB", (31, 32))])
    def test_an_image_of_another_kind(self, mode: str, size: tuple[int, int], tmp_path: Path) -> None:
        write_hub_folder(tmp_path)
        good, file = png(pixels(1)[0]), io.BytesIO()
        Image.new(mode, size).save(file, "PNG")
        write_parquet(tmp_path / TEST, [file.getvalue()] + [good] * 9, [0] * 10)
        expected = rf"row 0 of .*: .*32 x 32 pixels, got {mode} of {size[0]} x {size[1]}"
        with pytest.raises(ValueError, match=expected):
            read(tmp_path)

    def test_a_missing_image_and_a_missing_label(self, tmp_path: Path) -> None:
        write_hub_folder(tmp_path)
        good = png(pixels(1)[0])
        write_parquet(tmp_path / TEST, [good] * 9 + [None], [0] * 10)
        with pytest.raises(ValueError, match=r"row 9 of .*: .*image, got"):
            read(tmp_path)
        write_parquet(tmp_path / TEST, [good] * 10, [0] * 8 + [None, None])
        with pytest.raises(ValueError, match=r"'label', got 2 "):
            read(tmp_path)


class TestColumns:
    def test_a_missing_column(self, tmp_path: Path) -> None:
        write_hub_folder(tmp_path)
        write_parquet(tmp_path / TEST, [png(image) for image in pixels(10)], [0] * 10, image="image")
        with pytest.raises(ValueError, match=rf"{TEST}: .*'img'.*got .*img"):
            read(tmp_path)
        with pytest.raises(ValueError, match=r"train-.*: .*'fine_label'.*got .*fine_label"):
            read(tmp_path, "fine_label")

    @pytest.mark.parametrize(
        "columns",
        [
            {"img": pa.array([b"x"] * 10), "label": pa.array([0] * 10)},
            {"img": pa.array([{"bytes": 7}] * 10), "label": pa.array([0] * 10)},
            {"img": pa.array([{"bytes": b"x"}] * 10), "label": pa.array(["cat"] * 10)},
        ],
        ids=["bytes", "numbers", "words"],
    )
    def test_a_column_of_another_type(self, columns: dict[str, pa.Array], tmp_path: Path) -> None:
        write_hub_folder(tmp_path)
        pq.write_table(pa.table(columns), tmp_path / TEST)
        with pytest.raises(ValueError, match=rf"{TEST}: .*parquet file .*'img'.*'label'"):
            read(tmp_path)


class TestBombs:
    """Files of a few kilobytes that decompress to much more."""

    def test_rows_are_counted_before_they_are_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_hub_folder(tmp_path)
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        nothing = pa.table({"img": pa.nulls(3_000_000, kind), "label": pa.nulls(3_000_000, pa.int64())})
        pq.write_table(nothing, tmp_path / TEST)
        del nothing
        monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_, **__: pytest.fail("rows were read"))
        with pytest.raises(ValueError, match=rf": .*10 rows of test, got 3,000,000 in {TEST}"):
            read_parquet(tmp_path, "label", {"test": 10})

    def test_bytes_are_counted_before_they_are_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_hub_folder(tmp_path)
        write_parquet(tmp_path / TEST, [bytes(81_920)] + [b""] * 9, [0] * 10)
        monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_, **__: pytest.fail("rows were read"))
        with pytest.raises(ValueError, match=r"10 rows .*81,920 .*bytes.*got 8\d,\d+ in"):
            read_parquet(tmp_path, "label", {"test": 10})

    def test_one_value_of_many_rows_is_not_unpacked_for_all_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """400 rows of 100 kB are 40 MB decoded; Parquet stores their common value once, in 100 kB."""
        write_parquet(tmp_path / TEST, [bytes(100_000)] * 400, [0] * 400)
        assert (tmp_path / TEST).stat().st_size < 20_000
        monkeypatch.setattr("attnconv.data.hub_parquet._AT_ONCE", 4_000_000)
        taken: list[int] = []

        def decode(*_: object) -> npt.NDArray[np.uint8]:
            taken.append(pa.total_allocated_bytes())
            return np.zeros((1, 1, 3), np.uint8)

        monkeypatch.setattr("attnconv.data.hub_parquet._decode", decode)
        before = pa.total_allocated_bytes()
        read_parquet(tmp_path, "label", {"test": 400})
        assert len(taken) == 400
        assert max(taken) - before < 10_000_000
