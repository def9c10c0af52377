"""`SmallViT` with the module names of Hugging Face: three projections, pairs from attention, a mapping as output."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.small_vit import Attention, Block, Mlp, SmallViT


class PairAttention(nn.Module):
    """Multi-head self-attention with three projections; returns the output and None."""

    def __init__(self, source: Attention) -> None:
        super().__init__()
        dim = source.qkv.in_features
        self.num_attention_heads, self.head_dim = source.num_heads, source.head_dim
        self.scaling, self.attention_dropout = source.scale, 0.0
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim) for _ in range(3))
        for number, part in enumerate((self.q_proj, self.k_proj, self.v_proj)):
            part.weight.data.copy_(source.qkv.weight[number * dim : (number + 1) * dim])
            part.bias.data.copy_(source.qkv.bias[number * dim : (number + 1) * dim])
        self.o_proj = source.proj

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
        query, key, value = (
            part(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=self.scaling)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


class InnerAttention(nn.Module):
    """`PairAttention` without its output projection."""

    def __init__(self, source: PairAttention) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size = source.num_attention_heads, source.head_dim
        self.scaling, self.dropout_prob = source.scaling, 0.0
        self.query, self.key, self.value = source.q_proj, source.k_proj, source.v_proj

    def forward(self, hidden_states: Tensor) -> Tensor:
        query, key, value = (
            part(hidden_states).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        return F.scaled_dot_product_attention(query, key, value, scale=self.scaling).transpose(1, 2).flatten(2)


class NestedOutput(nn.Module):
    """Output projection."""

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__()
        self.dense, self.dropout = dense, nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.dense(x))
        return out


class NestedAttention(nn.Module):
    """Older layout: a module for attention and one for its output projection; returns a tensor."""

    def __init__(self, source: PairAttention) -> None:
        super().__init__()
        self.attention, self.output = InnerAttention(source), NestedOutput(source.o_proj)

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = self.output(self.attention(hidden_states))
        return out


class LayerScale(nn.Module):
    """A factor per channel."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lambda1 = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.lambda1


class Layer(nn.Module):
    """Pre-norm block of attention and MLP."""

    def __init__(self, source: Block) -> None:
        super().__init__()
        self.layernorm_before, self.attention = source.norm1, PairAttention(source.attn)
        self.layer_scale1 = LayerScale(source.attn.qkv.in_features)
        self.layernorm_after, self.mlp = source.norm2, source.mlp
        assert isinstance(self.mlp, Mlp)

    def forward(self, x: Tensor) -> Tensor:
        out: Any = self.attention(self.layernorm_before(x))
        x = x + self.layer_scale1(out[0] if isinstance(out, tuple) else out)
        made: Tensor = x + self.mlp(self.layernorm_after(x))
        return made


class PatchEmbeddings(nn.Module):
    """Patch embedding."""

    def __init__(self, projection: nn.Conv2d, size: int) -> None:
        super().__init__()
        self.projection, self.image_size = projection, (size, size)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.projection(images).flatten(2).transpose(1, 2)
        return out


class Embeddings(nn.Module):
    """Class token, registers and patches, plus position embeddings."""

    def __init__(self, source: SmallViT, size: int) -> None:
        super().__init__()
        self.patch_embeddings = PatchEmbeddings(source.patch_embed.proj, size)
        self.cls_token, self.register_tokens = source.cls_token, source.reg_token
        self.position_embeddings = source.pos_embed

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embeddings(images)
        tokens = (self.cls_token, self.register_tokens)
        before = [token.expand(len(x), -1, -1) for token in tokens if token is not None]
        return torch.cat([*before, x], 1) + self.position_embeddings


class Base(nn.Module):
    """Embeddings and layers."""

    def __init__(self, source: SmallViT, size: int) -> None:
        super().__init__()
        self.embeddings, self.layernorm = Embeddings(source, size), source.norm
        self.layers: Any = nn.ModuleList(Layer(block) for block in source.blocks)
        registers = {} if source.reg_token is None else {"num_register_tokens": source.reg_token.shape[1]}
        self.config = SimpleNamespace(patch_size=source.patch_embed.patch_size, **registers)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embeddings(images)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.layernorm(x)
        return out


class SmallHfViT(nn.Module):
    """Model with the weights of a `SmallViT` for images of 32 x 32 pixels, and the same outputs."""

    def __init__(self, source: SmallViT, *, size: int = 32, nested: bool = False) -> None:
        super().__init__()
        self.prefix = source.num_prefix_tokens
        self.vit, self.classifier = Base(source, size), source.head
        for layer in self.vit.layers if nested else ():
            layer.attention = NestedAttention(layer.attention)

    def forward(self, images: Tensor) -> dict[str, Tensor | None]:
        x = self.vit(images)
        return {"loss": None, "logits": self.classifier(x[:, 0] if self.prefix > 0 else x.mean(1))}
