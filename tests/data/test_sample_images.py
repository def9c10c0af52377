"""Pictures of a folder, for looking at a model."""

import os
from pathlib import Path

import pytest
import torch
from PIL import ExifTags, Image

from attnconv.data import read_pictures


def picture(path: Path, colour: tuple[int, int, int] = (0, 0, 0), size: tuple[int, int] = (6, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def broken(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n no more")


def test_folders_take_turns(tmp_path: Path) -> None:
    for index, name in enumerate(["a/0", "a/1", "a/2", "b/0", "b/1", "c/deep/0"]):
        picture(tmp_path / f"{name}.png", (10 * index, 1, 2))
    picture(tmp_path / ".hidden" / "x.png", (99, 99, 99))
    (tmp_path / "notes.txt").write_text("no image")
    found = read_pictures(tmp_path, (4, 6), count=5)
    assert found.pixels[:, 0, 0, 0].tolist() == [0, 30, 50, 10, 40]
    assert found.names == ("a/0.png", "b/0.png", "c/deep/0.png", "a/1.png", "b/1.png")
    assert found.notes == ()
    assert len(read_pictures(tmp_path, (4, 6), count=100).names) == 6


def test_height_and_width_in_this_order(tmp_path: Path) -> None:
    picture(tmp_path / "wide.png", size=(30, 10))
    images = read_pictures(tmp_path, (5, 9), count=1, channels=1).pixels
    assert images.shape == torch.Size([1, 1, 5, 9])
    assert images.dtype == torch.uint8


def test_broken_files_are_named(tmp_path: Path) -> None:
    picture(tmp_path / "good.png")
    for name in ("bad.png", "worse.png"):
        broken(tmp_path / name)
    with pytest.raises(ValueError, match=r"must hold whole images, got 2 broken ones.*skip_broken=True") as error:
        read_pictures(tmp_path, (4, 4), count=3)
    assert "bad.png: must be a whole image" in str(error.value)
    assert "worse.png: must be a whole image" in str(error.value)


def test_broken_files_are_skipped_on_request(tmp_path: Path) -> None:
    broken(tmp_path / "a.png")
    picture(tmp_path / "b.png")
    found = read_pictures(tmp_path, (4, 4), count=1, skip_broken=True)
    assert len(found.pixels) == 1
    assert found.names == ("b.png",)
    (note,) = found.notes
    assert "a.png: must be a whole image" in note


def test_files_that_are_enlarged_more_than_twice_are_named(tmp_path: Path) -> None:
    for name, size in {"small": (9, 5), "half": (16, 16), "narrow": (8, 64), "large": (100, 50)}.items():
        picture(tmp_path / f"{name}.png", size=size)
    turned = Image.new("RGB", (12, 32))  # stored on its side: 32 wide, 12 high
    turned.getexif()[ExifTags.Base.Orientation] = 6
    turned.save(tmp_path / "turned.jpg", exif=turned.getexif())
    notes = read_pictures(tmp_path, (32, 32), count=10).notes
    assert notes == ("Enlarged to 32 x 32 pixels: narrow.png 4.0 times, small.png 6.4 times, turned.jpg 2.7 times.",)
    assert read_pictures(tmp_path, (12, 32), count=10).notes == (
        "Enlarged to 12 x 32 pixels: narrow.png 4.0 times, small.png 3.6 times.",
    )


def test_names_that_cannot_be_printed_are_escaped(tmp_path: Path) -> None:
    picture(tmp_path / os.fsdecode(b"\xff\x1b[2J.png"))
    found = read_pictures(tmp_path, (32, 32), count=10)
    assert found.names == ("\\udcff\\x1b[2J.png",)
    assert found.notes == ("Enlarged to 32 x 32 pixels: \\udcff\\x1b[2J.png 8.0 times.",)


def test_of_many_enlarged_files_some_are_named(tmp_path: Path) -> None:
    for index in range(12):
        picture(tmp_path / f"{index:02d}.png")
    (note,) = read_pictures(tmp_path, (32, 32), count=20).notes
    assert note.endswith("09.png 8.0 times and 2 more.")


def test_nothing_but_broken_files(tmp_path: Path) -> None:
    broken(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"must hold images .* got only broken ones:\n.*a\.png"):
        read_pictures(tmp_path, (4, 4), count=1, skip_broken=True)


def test_no_folder_and_no_image(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"folder: .*got .*missing"):
        read_pictures(tmp_path / "missing", (4, 4), count=1)
    with pytest.raises(ValueError, match=r"must hold images .* got none"):
        read_pictures(tmp_path, (4, 4), count=1)


@pytest.mark.parametrize(
    ("sizes", "count", "words"), [((0, 4), 1, r"sizes: must be at least 1, got \(0, 4\)"), ((4, 4), 0, r"count")]
)
def test_counts_below_one(tmp_path: Path, sizes: tuple[int, int], count: int, words: str) -> None:
    picture(tmp_path / "a.png")
    with pytest.raises(ValueError, match=words):
        read_pictures(tmp_path, sizes, count=count)
