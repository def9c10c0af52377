"""Small vision transformer with class tokens and the module names of timm (`patch_embed`, `blocks.N.attn.qkv`, ...)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head self-attention with one projection for queries, keys and values."""

    def __init__(self, dim: int, num_heads: int, *, qk_norm: bool = False) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale = self.head_dim**-0.5
        self.fused_attn = True
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(0.0)
        self.norm = nn.Identity()
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        query, key = self.q_norm(query), self.k_norm(key)
        if self.fused_attn:
            out = F.scaled_dot_product_attention(query, key, value)
        else:
            out = self.attn_drop(torch.softmax(self.scale * query @ key.mT, -1)) @ value
        projected: Tensor = self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))
        return projected


class Mlp(nn.Module):
    """MLP with one hidden layer."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class Block(nn.Module):
    """Pre-norm block of attention and MLP."""

    def __init__(self, dim: int, num_heads: int, *, qk_norm: bool = False) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, num_heads, qk_norm=qk_norm)
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class PatchEmbed(nn.Module):
    """Patch embedding."""

    def __init__(self, patch: int, inputs: int, dim: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid_size, self.patch_size, self.num_patches = grid, (patch, patch), grid[0] * grid[1]
        self.proj = nn.Conv2d(inputs, dim, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(x).flatten(2).transpose(1, 2)
        return out


class AttentionPool(nn.Module):
    """Attention pooling with one learned query, like the head of SigLIP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, 1, dim))

    def forward(self, x: Tensor) -> Tensor:
        keys = x[:, None]
        return F.scaled_dot_product_attention(self.query.expand(len(x), -1, -1, -1), keys, keys)[:, 0, 0]


class SmallViT(nn.Module):
    """Small version of timm's `VisionTransformer`, with its initialisation (weights with std 0.02, biases 0)."""

    def __init__(
        self,
        *,
        size: int = 32,
        patch: int = 4,
        dim: int = 64,
        depth: int = 2,
        num_heads: int = 4,
        prefix: int = 1,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(patch, 3, dim, (size // patch, size // patch))
        self.num_prefix_tokens, self.no_embed_class = prefix, False
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 1e-6) if prefix > 0 else None
        self.reg_token = nn.Parameter(torch.randn(1, prefix - 1, dim) * 1e-6) if prefix > 1 else None
        self.pos_embed = nn.Parameter(torch.randn(1, prefix + self.patch_embed.num_patches, dim) * 0.02)
        self.blocks: Any = nn.Sequential(*(Block(dim, num_heads, qk_norm=qk_norm) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images)
        before = [token.expand(len(x), -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        x = self.norm(self.blocks(torch.cat([*before, x], 1) + self.pos_embed))
        out: Tensor = self.head(x[:, 0] if self.num_prefix_tokens > 0 else x.mean(1))
        return out


class PoolingViT(nn.Module):
    """`SmallViT` without class tokens, with attention pooling."""

    def __init__(self) -> None:
        super().__init__()
        source = SmallViT(prefix=0)
        self.patch_embed, self.pos_embed, self.blocks = source.patch_embed, source.pos_embed, source.blocks
        self.attn_pool = AttentionPool(64)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.attn_pool(self.blocks(self.patch_embed(images) + self.pos_embed))
        return out
