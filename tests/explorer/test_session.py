"""The payload of uploaded images, and untrusted images."""

import io
import json
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from attnconv import SelfAttention2d
from attnconv.data.augmentation import normalise
from attnconv.data.image_files import TooLargeError, UnsupportedTypeError
from attnconv.explorer import Session, payload, read_payload, read_upload
from attnconv.explorer.payload_write import Pictures
from attnconv.explorer.session import LARGEST_UPLOAD
from attnconv.surgery import ablated

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)


def file_of(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def session(layer: SelfAttention2d) -> Session:
    return Session(layer, (6, 8), mean=MEAN, std=STD, options={"title": "visited", "budget": 10**6})


def test_a_picture_is_normalised_and_shown_as_it_is() -> None:
    torch.manual_seed(0)
    layer = SelfAttention2d(3, 4, heads=2, encoding="learned-content")
    pixels = torch.randint(256, (6, 8, 3), dtype=torch.uint8)
    made = session(layer).answer(file_of(Image.fromarray(pixels.numpy())), "image/png")
    images = normalise(pixels.movedim(-1, 0)[None], MEAN, STD)
    pictures = Pictures(pixels[None], ("your image",))
    assert made == payload(layer, images, title="visited", pictures=pictures, budget=10**6)
    assert torch.equal(read_payload(made).images, pixels[None])


def test_grey_models_see_grey() -> None:
    made = Session(SelfAttention2d(1, 2, heads=2), (4, 4), mean=(0.5,), std=(0.5,)).answer(
        file_of(Image.linear_gradient("L").convert("RGB")), "image/png"
    )
    images = read_payload(made).images
    assert images.shape == (1, 4, 4, 3)
    assert torch.equal(images[..., 0], images[..., 2])


def test_pictures_that_tell_nothing_are_refused() -> None:
    layer = SelfAttention2d(3, 4, heads=2)
    with pytest.raises(ValueError, match=r"images: .*got .*in image 0"):
        session(layer).answer(file_of(Image.new("RGB", (9, 9), (1, 2, 3))), "image/png")
    with pytest.raises(UnsupportedTypeError, match=r"image: .*PNG"):
        session(layer).answer(b"words", "image/png")


class Classifier(torch.nn.Module):
    """An attention layer and the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention2d(3, 4, heads=2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = self.attention(images).mean((2, 3))
        return mean


def test_logits_with_changed_heads() -> None:
    torch.manual_seed(0)
    model, pixels = Classifier(), torch.randint(256, (2, 3, 6, 8), dtype=torch.uint8)
    seen = Session(model, (6, 8), mean=MEAN, std=STD, examples=pixels, options={"classes": "abcd"})
    images = normalise(pixels, MEAN, STD)
    with torch.no_grad():
        with ablated(model, {"attention": [1]}):
            expected = model(images)
        told = json.loads(seen.answer(b"", "", '{"attention": {"1": "zero"}}'))
        torch.testing.assert_close(torch.tensor(told), expected)
        picture = file_of(Image.fromarray(pixels[1].movedim(0, -1).numpy()))
        told = json.loads(seen.answer(picture, "image/png", '{"attention": {"0": "convolution", "1": "zero"}}'))
        with ablated(model, {"attention": {0: "convolution", 1: "zero"}}):
            torch.testing.assert_close(torch.tensor(told), model(images[1:]))
    for heads, words in (
        ("[", "heads: must map names"),
        ('{"attention": {"1": "half"}}', "heads: must map names"),
        ('{"attention": {"5": "zero"}}', r"heads\['attention'\]: must be .* from 0 to 1"),
        ('{"other": {"0": "zero"}}', "heads: must contain only names"),
    ):
        with pytest.raises(ValueError, match=words):
            seen.answer(b"", "", heads)
    with pytest.raises(ValueError, match="model: must return finite logits"):
        session(SelfAttention2d(3, 4, heads=2)).answer(picture, "image/png", '{"": {"0": "zero"}}')


class Bare(torch.nn.Module):
    """Attention by the similarity of pixels, without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = torch.nn.Softmax(dim=-1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = images.flatten(2).mT
        mixed: torch.Tensor = self.softmax(tokens @ tokens.mT) @ tokens
        return mixed


def test_a_model_without_parameters() -> None:
    seen = Session(Bare(), (6, 8), mean=MEAN, std=STD, options={"grid": (6, 8)})
    made = seen.answer(file_of(Image.linear_gradient("L").convert("RGB")), "image/png")
    assert read_payload(made).layers[0].sizes == (6, 8)


TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def halves(mode: str = "RGB") -> Image.Image:
    """Return an image whose left half is red and whose right half is blue."""
    image = Image.new("RGB", (60, 40), (255, 0, 0))
    image.paste((0, 0, 255), (30, 0, 60, 40))
    return image.convert(mode)


def chunk(name: bytes, data: bytes) -> bytes:
    """Return one chunk of a PNG file."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_of(width: int, height: int) -> bytes:
    """Return a PNG that declares a size and contains almost no data."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def plain_png(width: int, height: int, *, colour: int = 0) -> bytes:
    """Return a complete black PNG with 8 bits per channel; `colour` is 0 for grey, 2 for RGB, 6 for RGBA."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0))
    packer, left = zlib.compressobj(1), height * (1 + width * {0: 1, 2: 3, 6: 4}[colour])
    parts = [packer.compress(bytes(min(left - start, 1 << 20))) for start in range(0, left, 1 << 20)]
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", b"".join([*parts, packer.flush()])) + chunk(b"IEND", b"")


@pytest.mark.parametrize("form", TYPES)
def test_the_formats_that_are_taken(form: str) -> None:
    pixels = read_upload(saved(halves(), form), TYPES[form], (8, 12))
    assert (pixels.shape, pixels.dtype) == ((3, 8, 12), torch.uint8)
    left, right = pixels[:, 4, 1].int(), pixels[:, 4, 10].int()
    for found, wanted in ((left, [255, 0, 0]), (right, [0, 0, 255])):
        assert (found - torch.tensor(wanted)).abs().max() <= 12  # JPEG and WebP are lossy


def test_grey_and_the_centre_of_what_is_too_wide() -> None:
    pixels = read_upload(saved(halves(), "PNG"), "IMAGE/PNG; charset=x", (8, 8), channels=1)
    assert pixels.shape == (1, 8, 8)
    assert (int(pixels[0, 0, 0]), int(pixels[0, 0, 7])) == (76, 29)  # the luma of red and blue


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "1", "CMYK"])
def test_modes(mode: str) -> None:
    form = "JPEG" if mode == "CMYK" else "PNG"
    assert read_upload(saved(halves(mode), form), TYPES[form], (4, 6)).shape == (3, 4, 6)


def test_the_first_frame() -> None:
    other = Image.new("RGB", (60, 40), (0, 255, 0))
    film = saved(halves(), "GIF", save_all=True, append_images=[other])
    assert read_upload(film, "image/gif", (4, 6))[0, 2, 1] > 200


def test_a_jpeg_with_a_second_picture_is_a_jpeg() -> None:
    """Many phones write such files; Pillow calls the format MPO."""
    content = saved(halves(), "MPO", save_all=True, append_images=[Image.new("RGB", (16, 16))])
    with Image.open(io.BytesIO(content)) as opened:
        assert opened.format == "MPO"
    assert torch.equal(
        read_upload(content, "image/jpeg", (8, 12)), read_upload(saved(halves(), "JPEG"), "image/jpeg", (8, 12))
    )
    with pytest.raises(UnsupportedTypeError, match=r"image: .*got MPO"):
        read_upload(content, "image/png", (4, 4))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_stand_upright(orientation: int) -> None:
    turned = Image.Exif()
    turned[0x0112] = orientation
    image = Image.new("RGB", (60, 30), (255, 0, 0))
    image.paste((0, 0, 255), (0, 0, 20, 10))
    content = saved(image, "PNG", exif=turned)
    with Image.open(io.BytesIO(content)) as opened:
        upright = ImageOps.exif_transpose(opened)
        wanted = np.asarray(ImageOps.fit(upright, (24, 16), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    found = read_upload(content, "image/png", (16, 24)).numpy()
    assert np.abs(found.astype(int) - wanted).max() <= 1  # the order of rounding differs


@pytest.mark.parametrize("exif", [b"MM\0*", b"", b"II*\0\xff\xff\xff\xff", b"no TIFF at all"])
def test_exif_that_cannot_be_read_is_ignored(exif: bytes) -> None:
    plain = saved(halves(), "PNG")
    wanted = read_upload(plain, "image/png", (4, 6))
    after_pixels = plain[:-12] + chunk(b"eXIf", exif) + plain[-12:]
    for content in (plain[:33] + chunk(b"eXIf", exif) + plain[33:], after_pixels):
        assert torch.equal(read_upload(content, "image/png", (4, 6)), wanted)
    for form in ("JPEG", "WEBP"):
        content = saved(halves(), form, exif=b"Exif\0\0" + exif)
        assert torch.equal(
            read_upload(content, TYPES[form], (4, 6)), read_upload(saved(halves(), form), TYPES[form], (4, 6))
        )


@pytest.mark.parametrize("declared", ["", "text/html", "image/svg+xml", "image/tiff", "image", "\udcff"])
def test_other_declared_types(declared: str) -> None:
    with pytest.raises(UnsupportedTypeError, match=r"image: .*image/png, image/jpeg, .* got"):
        read_upload(saved(halves(), "PNG"), declared, (4, 4))


def test_bytes_of_another_type() -> None:
    with pytest.raises(UnsupportedTypeError, match=r"image: .*got GIF"):
        read_upload(saved(halves(), "GIF"), "image/png", (4, 4))
    for content in (b"words in a file named .png", b"", b"<svg/>", saved(halves(), "TIFF"), saved(halves(), "BMP")):
        with pytest.raises(UnsupportedTypeError, match=r"image: .*PNG, JPEG"):
            read_upload(content, "image/png", (4, 4))


@pytest.mark.parametrize(("width", "height"), [(10_000, 10_000), (100_000, 1000), (2**31 - 1, 2**31 - 1)])
def test_a_hundred_megapixels_are_refused_by_their_header(width: int, height: int) -> None:
    with pytest.raises(TooLargeError, match="image: must "):
        read_upload(png_of(width, height), "image/png", (4, 4))


@pytest.mark.parametrize(("width", "height"), [(1, 65_536), (65_536, 1), (1, 50_000_000)])
def test_pictures_of_many_rows_are_refused_by_their_header(width: int, height: int) -> None:
    with pytest.raises(TooLargeError, match=f"image: .* 65,535 .*, got {width} x {height}"):
        read_upload(png_of(width, height), "image/png", (4, 4))


def test_the_longest_side_is_taken() -> None:
    assert read_upload(plain_png(1, 65_535), "image/png", (4, 4)).shape == (3, 4, 4)


def test_webp_takes_less_for_its_decoder_keeps_more() -> None:
    content = saved(Image.new("L", (4001, 3000)), "WEBP", method=0)
    with pytest.raises(TooLargeError, match=r"image: .*got 4001 x 3000"):
        read_upload(content, "image/webp", (4, 4))


def test_a_webp_that_moves_is_refused_in_words() -> None:
    film = saved(halves(), "WEBP", save_all=True, append_images=[halves().transpose(Image.Transpose.ROTATE_180)])
    with pytest.raises(UnsupportedTypeError, match=r"image: .*got 2 frames"):
        read_upload(film, "image/webp", (4, 4))


def test_too_many_bytes() -> None:
    with pytest.raises(TooLargeError, match=r"image: .*got 20,000,001"):
        read_upload(b"\0" * (LARGEST_UPLOAD + 1), "image/png", (4, 4))


@pytest.mark.parametrize("form", TYPES)
def test_every_cut_is_refused_or_whole(form: str) -> None:
    """Truncated files raise no other error; the cuts exclude the last 40 bytes, which a decoder may ignore."""
    content = saved(halves(), form)
    for length in [*range(0, len(content) - 40, 7), len(content) - 41]:
        with pytest.raises(ValueError, match="image: must "):
            read_upload(content[:length], TYPES[form], (4, 4))


def test_flipped_bytes_raise_nothing_else() -> None:
    content = saved(halves(), "PNG")
    for place in range(0, len(content), 5):
        broken = content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :]
        try:
            assert read_upload(broken, "image/png", (4, 4)).shape == (3, 4, 4)
        except ValueError as error:
            assert str(error).startswith("image: must ")  # noqa: PT017 - both outcomes are valid, and no other


def png_of_depth(depth: int, colour: int, channels: int) -> bytes:
    """Return a black PNG of 8 x 8 pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, depth, colour, 0, 0, 0))
    rows = bytes(8 * (1 + depth * channels))  # 8 rows: a filter byte, then 8 pixels
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("colour", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])  # grey, RGB, and both with alpha
def test_sixteen_bits_a_channel_are_refused_and_eight_taken(colour: int, channels: int) -> None:
    words = r"image: .*8 bits.* \w+;16B"
    with pytest.raises(ValueError, match=words):
        read_upload(png_of_depth(16, colour, channels), "image/png", (4, 4))
    assert read_upload(png_of_depth(8, colour, channels), "image/png", (4, 4)).shape == (3, 4, 4)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_fewer_bits_are_taken(depth: int) -> None:
    assert read_upload(png_of_depth(depth, 0, 1), "image/png", (4, 4)).shape == (3, 4, 4)
