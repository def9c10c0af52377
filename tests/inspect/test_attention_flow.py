"""Attention rollout and mean attention distance, against loops written from their descriptions."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnconv import SelfAttention2d, from_conv
from attnconv.inspect import attention_moments, attention_rollout, visit_attention
from experiments.small_vit import PoolingViT, SmallViT
from tests.inspect.sharp_vit import images as some_images, sharp


@torch.no_grad()
def recorded(model: SmallViT, images: Tensor) -> list[Tensor]:
    """Return the softmax of each block, (b, h, tokens, tokens), computed from queries and keys in a forward hook."""
    maps: list[Tensor] = []

    def record(module: Any, args: tuple[Tensor], _: Tensor) -> None:
        query, key, _ = module.qkv(args[0]).unflatten(-1, (3, module.num_heads, module.head_dim)).unbind(2)
        maps.append(torch.einsum("bqhd,bkhd->bhqk", query, key).mul(module.scale).softmax(-1))

    handles = [block.attn.register_forward_hook(record) for block in model.blocks]
    model(images)
    for handle in handles:
        handle.remove()
    return maps


class TestRollout:
    @pytest.mark.parametrize("prefix", [0, 1, 3])
    def test_equal_to_a_loop(self, prefix: int) -> None:
        model, images = sharp(prefix, depth=3).double(), some_images(2).double()
        expected = torch.eye(prefix + 64, dtype=torch.float64).expand(2, -1, -1)
        for attention in recorded(model, images):
            layer = 0.5 * attention.mean(1) + 0.5 * torch.eye(prefix + 64)
            expected = torch.stack([a / a.sum(-1, keepdim=True) for a in layer]) @ expected
        rollout = attention_rollout(model, images)
        torch.testing.assert_close(rollout, expected)
        torch.testing.assert_close(rollout.sum(-1), torch.ones(2, prefix + 64, dtype=torch.float64))
        (first, *_) = recorded(model, images)
        only = attention_rollout(model, images, layers=["blocks.0.attn"])
        torch.testing.assert_close(only, 0.5 * first.mean(1) + 0.5 * torch.eye(prefix + 64))

    def test_a_convolution_with_zero_padding(self) -> None:
        model = nn.Sequential(*(from_conv(nn.Conv2d(1, 1, (1, 3), padding=(0, 1))) for _ in range(2)))
        rollout = attention_rollout(model, torch.randn(3, 1, 1, 3))
        # Mean over three heads plus the identity: [4 1 0], [1 4 1], [0 1 4], before rows are divided by their sum.
        layer = torch.tensor([[4 / 5, 1 / 5, 0], [1 / 6, 4 / 6, 1 / 6], [0, 1 / 5, 4 / 5]])
        torch.testing.assert_close(rollout.float(), (layer @ layer).expand(3, -1, -1))

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            (PoolingViT(), r"attn_pool.*layers"),
            (nn.Sequential(SelfAttention2d(3, 3, 2, stride=2)), r"model\.0: .*got 256 queries and 1024 keys"),
            (
                nn.Sequential(SelfAttention2d(3, 3, 2), nn.AvgPool2d(2), SelfAttention2d(3, 3, 2)),
                r"model\.2: .*same tokens.*\(\(16, 16\), 0, 0\) after \(\(32, 32\), 0, 0\)",
            ),
            (nn.Sequential(SelfAttention2d(1, 3, 2)), "images: .*got"),
        ],
    )
    def test_errors(self, model: nn.Module, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            attention_rollout(model, torch.randn(2, 3, 32, 32))

    def test_windows(self) -> None:
        transformers: Any = pytest.importorskip("transformers")
        settings = transformers.SwinConfig(
            image_size=16, patch_size=2, embed_dim=8, depths=[2], num_heads=[2], window_size=4
        )
        with pytest.raises(ValueError, match=r"model\..*: must attend to the whole image, got windows"):
            attention_rollout(transformers.SwinModel(settings), torch.randn(1, 3, 16, 16))


@pytest.mark.parametrize("prefix", [0, 1])
def test_mean_attention_distance_in_pixels(prefix: int) -> None:
    """As in Raghu et al. (2021): distances between patches in pixels, weighted by attention without class tokens."""
    model, images, patch, side = sharp(prefix, depth=3).double(), some_images(2).double(), 4, 8
    places = [(patch * (index // side), patch * (index % side)) for index in range(side * side)]
    found = []
    visit_attention(
        model, images, lambda _, operator: found.append(patch * attention_moments(operator).distance.mean(0))
    )
    for attention, distances in zip(recorded(model, images), found, strict=True):
        for head in range(4):
            total, as_it_is = 0.0, 0.0
            for image in attention[:, head, prefix:, prefix:].tolist():
                for query, weights in enumerate(image):
                    far = sum(w * math.dist(places[query], place) for w, place in zip(weights, places, strict=True))
                    total, as_it_is = total + far / sum(weights) / (2 * side**2), as_it_is + far / (2 * side**2)
            assert float(distances[head]) == pytest.approx(total, rel=1e-9)
            assert (as_it_is == pytest.approx(total, rel=1e-9)) == (prefix == 0)
