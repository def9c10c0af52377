"""Pictures of a visitor on their way through a model."""

import io

import pytest
import torch
from PIL import Image

from attnconv import SelfAttention2d
from attnconv.data.augmentation import normalise
from attnconv.data.image_decoding import UnsupportedTypeError
from attnconv.explorer import Session, payload, read_payload
from attnconv.explorer.payload_write import Pictures

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
    with pytest.raises(ValueError, match="images: must have pixels that differ"):
        session(layer).answer(file_of(Image.new("RGB", (9, 9), (1, 2, 3))), "image/png")
    with pytest.raises(UnsupportedTypeError, match=r"image: .*PNG"):
        session(layer).answer(b"words", "image/png")


class Bare(torch.nn.Module):
    """Attention of pixels by likeness, without parameters."""

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
