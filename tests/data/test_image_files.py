"""Untrusted image files: which are decoded, which are rejected, and how much memory they need."""

import io
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from attnconv.data.image_files import (
    PictureError,
    TooLargeError,
    UnsupportedTypeError,
    _png_bytes,
    fit_picture,
    open_picture,
    read_image,
)
from benchmarks.measure import memory_of
from tests.data.making import pixels, png, png_chunk, png_of

MEBI = 2**20
LIMIT = 800 * 10**6  # bytes for 80,000,000 pixels, as documented in the module


def prepare(path: str) -> Callable[[], str]:
    """Return a step for `memory_of` that reads a file and returns its shape or its error."""

    def step() -> str:
        try:
            return str(read_image(path, 8).shape)
        except ValueError as error:
            return str(error)

    return step


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def decoded(content: bytes) -> torch.Tensor:
    with open_picture(content, "it") as image:
        return fit_picture(image, (image.height, image.width))


@pytest.mark.parametrize("form", ["BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"])
def test_the_formats_that_are_taken(form: str, tmp_path: Path) -> None:
    image = Image.new("RGB", (6, 4), (200, 100, 50))
    content = saved(image, form)
    (tmp_path / "x").write_bytes(content)
    found = decoded(content)
    assert (found.int() - torch.tensor([200, 100, 50]).reshape(3, 1, 1)).abs().max() <= 6  # some formats are lossy
    assert torch.equal(read_image(tmp_path / "x", (4, 6)), found)


def test_an_eps_starts_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow decodes EPS with Ghostscript, which executes the program in the file."""
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a program was started"))
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", "gs")
    path = tmp_path / "x.png"
    path.write_bytes(saved(Image.new("RGB", (4, 4)), "EPS"))
    with pytest.raises(UnsupportedTypeError, match=r"x\.png: .*PNG.*got other content"):
        read_image(path, 8)


@pytest.mark.parametrize("form", ["ICO", "PCX", "TGA", "PDF", "JPEG2000"])
def test_other_formats_are_refused(form: str) -> None:
    with pytest.raises(UnsupportedTypeError, match=r"it: .*BMP.*, got other content"):
        decoded(saved(Image.new("RGB", (16, 16)), form))


def test_only_the_formats_that_are_asked_for() -> None:
    with (
        pytest.raises(UnsupportedTypeError, match=r"image: .*PNG.*, got other content"),
        open_picture(saved(Image.new("RGB", (4, 4)), "GIF"), formats=("PNG",)),
    ):
        pass


@pytest.mark.parametrize(("width", "height"), [(8001, 10_000), (100_000, 1000), (2**31 - 1, 2**31 - 1)])
def test_too_many_pixels_are_refused_by_the_header(width: int, height: int) -> None:
    with pytest.raises(TooLargeError, match=r"it: .*got "):
        decoded(png_of(width, height, rows=0))


@pytest.mark.parametrize(("width", "height"), [(1, 49_999_999), (65_536, 1)])
def test_too_long_a_side_is_refused_by_the_header(width: int, height: int) -> None:
    with pytest.raises(TooLargeError, match=rf"it: .*got {width} x {height}"):
        decoded(png_of(width, height, rows=0))


def test_webp_takes_less_for_its_decoder_keeps_more() -> None:
    content = saved(Image.new("L", (4001, 3000)), "WEBP", method=0)
    with pytest.raises(TooLargeError, match=r"it: .*got 4001 x 3000"):
        decoded(content)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can reset the peak memory")
@pytest.mark.parametrize(
    ("content", "most"),
    [
        pytest.param(lambda: png_of(1, 49_999_999, rows=3), 20 * MEBI, id="a narrow header"),
        pytest.param(lambda: png_of(305, 65_520, colour=6), LIMIT // 4, id="a quarter, tall, with transparency"),
    ],
)
def test_a_bomb_stays_within_the_stated_memory(content: Callable[[], bytes], most: int, tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(content())
    assert memory_of(__name__, {"path": str(path)}).step <= most


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("colour", [0, 2, 3, 6])
@pytest.mark.parametrize("depth", [1, 8])
def test_a_png_of_which_rows_are_missing(depth: int, colour: int, interlaced: bool) -> None:
    """Pillow leaves missing rows black: its decoder accepts compressed data that ends early."""
    if depth == 1 and colour in (2, 6):
        depth = 8
    whole = png_of(20, 64, depth=depth, colour=colour)
    if not interlaced:
        assert decoded(whole).shape == (3, 64, 20)
    with pytest.raises(PictureError, match=r"it: .*got .*[\d,]+ missing bytes"):
        decoded(png_of(20, 64, depth=depth, colour=colour, rows=10, interlaced=interlaced))


def test_a_png_without_its_palette() -> None:
    whole = png_of(4, 4, depth=8, colour=3)
    place = whole.index(b"PLTE") - 4
    size = 12 + int.from_bytes(whole[place : place + 4], "big")
    with pytest.raises(PictureError, match=r"it: .*got no palette"):
        decoded(whole[:place] + whole[place + size :])


@pytest.mark.parametrize("width", range(1, 10))
@pytest.mark.parametrize("height", [1, 3, 8])
def test_interlaced_pngs_are_whole(width: int, height: int) -> None:
    """`_png_bytes` is exact: Pillow decodes all pixels of that many bytes, but not of one byte fewer."""
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 0, 0, 0, 1])
    for missing in (0, 1):
        data = zlib.compress(b"\0" * (_png_bytes(head) - missing))
        content = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", head) + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")
        if missing:
            with pytest.raises(PictureError, match=" 1 missing bytes"):
                decoded(content)
        else:
            assert decoded(content).shape == (3, height, width)


def test_every_bit_of_a_png_counts() -> None:
    content = png(pixels(1)[0][:, :6, :6])
    wanted = decoded(content)
    for place in range(len(content)):
        for bit in (0, 7):
            broken = content[:place] + bytes([content[place] ^ (1 << bit)]) + content[place + 1 :]
            try:
                assert torch.equal(decoded(broken), wanted)
            except PictureError as error:
                assert str(error).startswith("it: must ")  # noqa: PT017 - both outcomes are valid, and no other


@pytest.mark.parametrize("cut", range(0, 200, 7))
def test_no_cut_png_is_whole(cut: int) -> None:
    content = png(pixels(1)[0][:, :6, :6])
    if cut < len(content):
        with pytest.raises(PictureError, match=r"it: .*got "):
            decoded(content[:cut])


@pytest.mark.parametrize(("colour", "mode"), [(0, "I;16"), (2, "RGB"), (4, "RGBA"), (6, "RGBA")])
def test_sixteen_bits_a_channel(colour: int, mode: str) -> None:
    with pytest.raises(PictureError, match=rf"it: .*got an image of mode {mode}, .*16B"):
        decoded(png_of(8, 8, depth=16, colour=colour))


def test_sixteen_bits_in_other_formats() -> None:
    with pytest.raises(PictureError, match=r"it: .*got .* 65535"):
        decoded(b"P6 2 2 65535\n" + bytes(24))
    with pytest.raises(PictureError, match=r"it: .*got .* 65535"):
        decoded(b"P3 1 1 65535 0 0 32768")
    tiff = saved(Image.new("I;16", (4, 4)), "TIFF")
    with pytest.raises(PictureError, match=r"it: .*got an image of mode I;16"):
        decoded(tiff)


def test_fewer_bits_are_taken() -> None:
    bmp = bytearray(saved(Image.new("RGB", (4, 4)), "BMP"))
    bmp[28] = 16  # 5 bits per channel
    assert decoded(bytes(bmp)).shape == (3, 4, 4)


def test_errors_inside_the_block_carry_the_name() -> None:
    with pytest.raises(PictureError, match=r"it: .*got broken"), open_picture(png_of(2, 2), "it"):
        raise OSError("broken.\nmore")


def test_large_pictures_are_open_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder therefore needs the memory of one image, however many threads decode it."""
    inside, most = 0, []

    def hold(content: bytes) -> None:
        nonlocal inside
        with open_picture(content):
            inside += 1
            most.append(inside)
            time.sleep(0.01)
            inside -= 1

    for limit, together in ((16, 4), (15, 1)):
        monkeypatch.setattr("attnconv.data.image_files.LARGE_PICTURE", limit)
        most.clear()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(hold, [png_of(4, 4)] * 4))
        assert max(most) <= together
    assert len(most) == 4


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_upright_as_pillow_turns(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = saved(Image.fromarray(pixels(1)[0].transpose(1, 2, 0)[:12].copy()), "PNG", exif=exif)
    with Image.open(io.BytesIO(content)) as image:
        turned = ImageOps.exif_transpose(image)
        wanted = torch.from_numpy(np.array(turned).transpose(2, 0, 1).copy())
    with open_picture(content) as image:
        assert torch.equal(fit_picture(image, wanted.shape[1:]), wanted)  # type: ignore[arg-type]
