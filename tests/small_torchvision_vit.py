"""Small vision transformer with the module names of torchvision (`conv_proj`, `encoder.layers`, ...)."""

from collections import OrderedDict

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Pre-norm block of attention and MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.self_attention = nn.LayerNorm(dim), nn.MultiheadAttention(dim, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.0), nn.Linear(2 * dim, dim), nn.Dropout(0.0)
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.ln_1(x)
        x = x + self.self_attention(normed, normed, normed, need_weights=False)[0]
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class Encoder(nn.Module):
    """Position embeddings, blocks and the last norm."""

    def __init__(self, tokens: int, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(0.02 * torch.randn(1, tokens, dim))
        self.layers = nn.Sequential(OrderedDict((f"encoder_layer_{i}", Block(dim, heads)) for i in range(depth)))
        self.ln = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.ln(self.layers(x + self.pos_embedding))
        return out


class SmallTorchvisionViT(nn.Module):
    """Small version of torchvision's `VisionTransformer`."""

    def __init__(self, *, size: int = 32, patch: int = 4, dim: int = 72, depth: int = 2, num_heads: int = 9) -> None:
        super().__init__()
        self.image_size, self.patch_size = size, patch
        self.conv_proj = nn.Conv2d(3, dim, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.encoder = Encoder((size // patch) ** 2 + 1, dim, depth, num_heads)
        self.heads = nn.Sequential(OrderedDict(head=nn.Linear(dim, 10)))

    def _process_input(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv_proj(x).flatten(2).transpose(1, 2)
        return out

    def forward(self, x: Tensor) -> Tensor:
        tokens = self._process_input(x)
        out: Tensor = self.heads(self.encoder(torch.cat([self.class_token.expand(len(x), -1, -1), tokens], 1))[:, 0])
        return out
