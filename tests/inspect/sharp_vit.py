"""`SmallViT` with attention far from uniform, its images, and the inputs of its layer 0."""

from typing import Any

import torch
from torch import Tensor, nn

from attnconv.inspect.module_adapters import attention_parts
from attnconv.inspect.score_modifiers import CallForm, ScoreTerms
from attnconv.surgery.convolved_attention import HeadMixing, Taps, mean_maps
from attnconv.surgery.replaceable_attention import LayerTokens
from experiments.small_vit import SmallViT

NAME = "blocks.0.attn"


def sharp(prefix: int = 1, **more: Any) -> SmallViT:
    """Return a model whose attention is far from uniform."""
    torch.manual_seed(0)
    model = SmallViT(prefix=prefix, **more)
    for block in model.blocks:
        block.attn.qkv.weight.data.mul_(8)
    return model


def images(count: int = 8) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def layer_tokens(
    attention: nn.Module, inputs: Tensor, grid: tuple[int, int], prefix: int = 0, **more: Any
) -> LayerTokens:
    """Return the inputs of an attention module, as `replaceable` records them."""
    given = {"sequences": 1, "terms": ScoreTerms(), "call": CallForm.of(attention), "constancy": torch.zeros(0), **more}
    return LayerTokens(attention, attention_parts(attention), inputs, torch.zeros_like(inputs), grid, prefix, **given)


def mean_mixing(tokens: LayerTokens, kernel_size: int) -> HeadMixing:
    """Return the mean attention per shift and class token, towards which a fit is regularised."""
    profile, weights = mean_maps(tokens, Taps.of_layer(tokens, kernel_size), kernel_size)
    return HeadMixing(weights.to(profile.dtype), profile)


def tokens_of(model: SmallViT, count: int = 3) -> LayerTokens:
    inputs = torch.randn(count, 64 + model.num_prefix_tokens, 64, generator=torch.Generator().manual_seed(2))
    return layer_tokens(model.blocks[0].attn, inputs, (8, 8), model.num_prefix_tokens)
