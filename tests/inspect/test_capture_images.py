"""Errors for arguments that are not images and for images that cannot be used name the argument."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from attnconv.inspect import audit
from attnconv.surgery import initialize, replace_heads
from experiments.small_vit import SmallViT
from tests.model_state import model_state

IMAGES = torch.randn(2, 3, 16, 16)
REFUSED: dict[str, tuple[Any, str]] = {
    "a number": (5, "got int"),
    "a string": ("cat.png", "got str"),
    "an array": (IMAGES.numpy(), "got ndarray"),
    "a sparse tensor": (IMAGES.to_sparse(), "got torch.sparse_coo"),
    "bytes": (IMAGES.byte(), "got torch.uint8"),
    "eight bits": (IMAGES.to(torch.float8_e4m3fn), "got torch.float8_e4m3fn"),
    "the meta device": (IMAGES.to("meta"), "got .*meta"),
    "no image": (IMAGES[:0], "got 0"),
    "no pixel": (IMAGES[..., :0], r"got shape \(2, 3, 16, 0\)"),
    "no axes": (torch.tensor(1.0), r"got shape \(\)"),
}


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_batch_of_images_is_refused_by_name(case: str) -> None:
    images, got = REFUSED[case]
    model: nn.Module = SmallViT(size=16, dim=24, num_heads=2, depth=1)
    before = model_state(model)
    calls: tuple[Any, ...] = (audit, partial(replace_heads, count=1), lambda m, x: initialize(m, images=x))
    for call in calls:
        with pytest.raises((TypeError, ValueError), match=f"^images: must .*{got}"):
            call(model, images)
    assert model_state(model) == before


@pytest.mark.usefixtures("unhooked")
def test_none_stands_for_noise_where_it_is_allowed_only() -> None:
    calls: tuple[Any, ...] = (audit, partial(replace_heads, count=1))
    for call in calls:
        with pytest.raises(TypeError, match=r"^images: .*got NoneType"):
            call(SmallViT(depth=1), None)
