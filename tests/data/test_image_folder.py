"""Folders of images: layouts, resizing, files with misleading names or content, and images for auditing a model."""

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from attnconv.data import image_files as module, read_pictures
from attnconv.data.image_files import read_folders, read_image
from attnconv.data.settings import DataSettings
from tests.data.making import pixels

RED, GREEN = (250, 10, 10), (10, 250, 10)


def settings_for(root: Path, **changes: Any) -> DataSettings:
    return DataSettings(**{"name": "folder", "root": str(root), **changes})


def put(path: Path, colour: tuple[int, int, int] = RED, size: tuple[int, int] = (12, 10)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def two_classes(root: Path, count: int = 5) -> None:
    for number in range(count):
        put(root / "green" / f"{number}.png", GREEN)
        put(root / "red" / f"{number}.png", RED)


def sizes(root: Path) -> dict[str, int]:
    return {name: len(images) for name, images in read_folders(settings_for(root), 8)[0].items()}


class TestLayouts:
    def test_train_and_test(self, tmp_path: Path) -> None:
        two_classes(tmp_path / "train", 4)
        two_classes(tmp_path / "test", 2)
        sets, classes = read_folders(settings_for(tmp_path), 8)
        assert classes == ("green", "red")
        assert set(sets) == {"train", "test"}
        assert sets["train"].labels.tolist() == [0] * 4 + [1] * 4
        assert sets["test"].images.shape == (4, 3, 8, 8)
        assert sets["test"].images[:, :, 3, 3].tolist() == [list(GREEN)] * 2 + [list(RED)] * 2

    @pytest.mark.parametrize("name", ["val", "valid", "validation"])
    def test_without_test_images_val_is_the_test_set(self, name: str, tmp_path: Path) -> None:
        two_classes(tmp_path / "train", 4)
        two_classes(tmp_path / name, 3)
        assert sizes(tmp_path) == {"train": 8, "test": 6}

    def test_with_both_val_is_the_validation_set(self, tmp_path: Path) -> None:
        for split, count in (("train", 4), ("val", 3), ("test", 2)):
            two_classes(tmp_path / split, count)
        assert sizes(tmp_path) == {"train": 8, "validation": 6, "test": 4}

    @pytest.mark.parametrize("where", ["", "train"])
    def test_without_either_a_fifth_is_held_out(self, where: str, tmp_path: Path) -> None:
        two_classes(tmp_path / where, 10)
        sets, _ = read_folders(settings_for(tmp_path), 8)
        assert sizes(tmp_path) == {"train": 16, "test": 4}
        assert torch.bincount(sets["test"].labels).tolist() == [2, 2]

    def test_what_is_no_image_is_passed_over(self, tmp_path: Path) -> None:
        two_classes(tmp_path, 5)
        (tmp_path / "red" / "notes.txt").write_text("not an image")
        (tmp_path / "red" / ".hidden.png").write_bytes(b"not an image either")
        (tmp_path / ".git").mkdir()
        (tmp_path / "readme.md").write_text("")
        assert sizes(tmp_path) == {"train": 8, "test": 2}

    def test_subfolders_of_a_class_are_read(self, tmp_path: Path) -> None:
        two_classes(tmp_path, 5)
        for number in range(5):
            put(tmp_path / "red" / "more" / f"{number}.png")
        assert sizes(tmp_path) == {"train": 12, "test": 3}


class TestNames:
    """Names that are not UTF-8, or that would move the cursor of a terminal."""

    def test_files_and_classes_of_any_name(self, tmp_path: Path) -> None:
        two_classes(tmp_path / "train")
        two_classes(tmp_path / "test", 1)
        for split in ("train", "test"):
            odd = put(tmp_path / split / os.fsdecode(b"\xff\x1b[2J") / os.fsdecode(b"\xe9\n.png"), (1, 2, 3))
        sets, classes = read_folders(settings_for(tmp_path), 8)
        assert classes == ("green", "red", "\\udcff\\x1b[2J")
        assert sets["test"].images[-1, :, 0, 0].tolist() == [1, 2, 3]
        odd.write_bytes(b"broken")
        with pytest.raises(ValueError, match=r"\\udcff\\x1b\[2J/\\udce9\n\.png: .*image"):
            read_folders(settings_for(tmp_path), 8)


class TestOneImage:
    def test_scaled_to_cover_and_cropped_about_the_centre(self, tmp_path: Path) -> None:
        """An image of three stripes: the square keeps the middle stripe and half the width of each outer stripe."""
        stripes = np.zeros((32, 64, 3), np.uint8)
        stripes[:, :16, 0], stripes[:, 16:48, 1], stripes[:, 48:, 2] = 255, 255, 255
        Image.fromarray(stripes).save(tmp_path / "stripes.png")
        image = read_image(tmp_path / "stripes.png", 16)
        assert image.shape == (3, 16, 16)
        assert image[:, 8, 2:-2].unique(dim=1).tolist() == [[0], [255], [0]]

    def test_an_image_of_the_right_size_is_left_alone(self, tmp_path: Path) -> None:
        original = pixels(1)[0]
        Image.fromarray(original.transpose(1, 2, 0).copy()).save(tmp_path / "one.png")
        assert torch.equal(read_image(tmp_path / "one.png", 32), torch.from_numpy(original))

    @pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1"])
    def test_modes(self, mode: str, tmp_path: Path) -> None:
        suffix = "png" if mode in ("L", "LA", "P", "RGBA", "1") else "tif"
        Image.new("RGB", (9, 9), (255, 255, 255)).convert(mode).save(tmp_path / f"image.{suffix}")
        assert read_image(tmp_path / f"image.{suffix}", 8).unique().tolist() == [255]
        assert read_image(tmp_path / f"image.{suffix}", 8, channels=1).shape == (1, 8, 8)

    def test_a_palette_with_transparency(self, tmp_path: Path) -> None:
        image = Image.new("P", (9, 9), 1)
        image.putpalette([*RED, *GREEN])
        image.save(tmp_path / "image.png", transparency=b"\x00\x80")
        assert read_image(tmp_path / "image.png", 8)[:, 3, 3].tolist() == list(GREEN)

    def test_it_is_turned_upright(self, tmp_path: Path) -> None:
        image = Image.new("RGB", (16, 16), RED)
        image.paste(GREEN, (0, 0, 16, 8))  # green at the top
        exif = Image.Exif()
        exif[0x0112] = 3  # taken with the camera upside down
        image.save(tmp_path / "turned.png", exif=exif)
        assert read_image(tmp_path / "turned.png", 16)[:, 15, 8].tolist() == list(GREEN)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"absent\.png: .*got no such file"):
            read_image(tmp_path / "absent.png", 8)

    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.png")
        with pytest.raises(ValueError, match=r"pipe\.png: must be an image file"):
            read_image(tmp_path / "pipe.png", 8)

    @pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n then nothing"])
    def test_no_image(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "broken.png").write_bytes(content)
        with pytest.raises(ValueError, match=r"broken\.png: .*image, got"):
            read_image(tmp_path / "broken.png", 8)

    @pytest.mark.parametrize("kind", ["PNG", "JPEG"])
    def test_half_an_image(self, kind: str, tmp_path: Path) -> None:
        file = io.BytesIO()
        Image.fromarray(pixels(1)[0].transpose(1, 2, 0).copy()).save(file, kind)
        (tmp_path / "half.img").write_bytes(file.getvalue()[:600])
        with pytest.raises(ValueError, match=r"half\.img: .*got .*([Tt]runcated|cut off)"):
            read_image(tmp_path / "half.img", 8)

    def test_more_than_8_bits(self, tmp_path: Path) -> None:
        Image.new("I;16", (9, 9)).save(tmp_path / "deep.png")
        with pytest.raises(ValueError, match=r"deep\.png: .*got an image of mode I;16"):
            read_image(tmp_path / "deep.png", 8)

    @pytest.mark.filterwarnings("error::PIL.Image.DecompressionBombWarning")
    def test_a_bomb(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        put(tmp_path / "bomb.png")
        for limit in (100, 30):  # Pillow warns above its limit, and raises above twice the limit
            monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
            with pytest.raises(ValueError, match=r"bomb\.png: .*got Image size \(120 pixels\)"):
                read_image(tmp_path / "bomb.png", 8)

    def test_arguments(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"size: .*got 0"):
            read_image(tmp_path, 0)
        with pytest.raises(ValueError, match=r"channels: .*got 4"):
            read_image(tmp_path, 8, channels=4)


class TestBadFolders:
    def test_no_classes(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=rf"two folders, .* got no folder in {tmp_path}"):
            read_folders(settings_for(tmp_path), 8)
        put(tmp_path / "only" / "0.png")
        with pytest.raises(ValueError, match=r"two folders, .* got only in"):
            read_folders(settings_for(tmp_path), 8)

    def test_an_empty_class(self, tmp_path: Path) -> None:
        two_classes(tmp_path)
        (tmp_path / "blue").mkdir()
        with pytest.raises(ValueError, match=r"blue: .*got none"):
            read_folders(settings_for(tmp_path), 8)

    def test_test_images_of_another_class(self, tmp_path: Path) -> None:
        two_classes(tmp_path / "train")
        two_classes(tmp_path / "test")
        put(tmp_path / "test" / "blue" / "0.png")
        with pytest.raises(ValueError, match=r"training images.*got blue in .*test"):
            read_folders(settings_for(tmp_path), 8)

    def test_broken_files_are_all_named(self, tmp_path: Path) -> None:
        two_classes(tmp_path, 15)
        for number in range(12):
            (tmp_path / "red" / f"{number}.png").write_bytes(b"broken")
        with pytest.raises(ValueError, match=r"data.root: .*images, got broken files \(12\)") as raised:
            read_folders(settings_for(tmp_path), 8)
        named = [line for line in str(raised.value).splitlines() if ".png: must be" in line]
        assert len(named) == 10
        assert str(raised.value).endswith("... and 2 more")

    def test_more_than_fits(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        two_classes(tmp_path)
        monkeypatch.setattr(module, "LARGEST_SET", 1000)
        with pytest.raises(ValueError, match=r"image_size: .*got 8, "):
            read_folders(settings_for(tmp_path), 8)


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
    with pytest.raises(ValueError, match=r"images, got broken files \(2\).*skip_broken=True") as error:
        read_pictures(tmp_path, (4, 4), count=3)
    assert "bad.png: must be" in str(error.value)
    assert "worse.png: must be" in str(error.value)


def test_broken_files_are_skipped_on_request(tmp_path: Path) -> None:
    broken(tmp_path / "a.png")
    picture(tmp_path / "b.png")
    found = read_pictures(tmp_path, (4, 4), count=1, skip_broken=True)
    assert len(found.pixels) == 1
    assert found.names == ("b.png",)
    (note,) = found.notes
    assert "a.png: must be" in note


def test_files_that_are_enlarged_more_than_twice_are_named(tmp_path: Path) -> None:
    for name, size in {"small": (9, 5), "half": (16, 16), "narrow": (8, 64), "large": (100, 50)}.items():
        picture(tmp_path / f"{name}.png", size=size)
    turned = Image.new("RGB", (12, 32))  # displayed rotated: 32 wide, 12 high
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
    with pytest.raises(ValueError, match=r"images .* got only broken.*:\n.*a\.png.*[^.]\.$"):
        read_pictures(tmp_path, (4, 4), count=1, skip_broken=True)


def test_no_folder_and_no_image(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"folder: .*got .*missing"):
        read_pictures(tmp_path / "missing", (4, 4), count=1)
    with pytest.raises(ValueError, match=r"images .* got none"):
        read_pictures(tmp_path, (4, 4), count=1)


@pytest.mark.parametrize(
    ("sizes", "count", "words"), [((0, 4), 1, r"sizes: must be at least 1, got \(0, 4\)"), ((4, 4), 0, r"count")]
)
def test_counts_below_one(tmp_path: Path, sizes: tuple[int, int], count: int, words: str) -> None:
    picture(tmp_path / "a.png")
    with pytest.raises(ValueError, match=words):
        read_pictures(tmp_path, sizes, count=count)
