"""Layers: self-attention over sequences, images and volumes, with the face of nn.Conv1d/2d/3d."""

from typing import TYPE_CHECKING

from attnconv._lazy import attach

if TYPE_CHECKING:
    from attnconv.layers.self_attention import SelfAttention as SelfAttention
    from attnconv.layers.self_attention import SelfAttention1d as SelfAttention1d
    from attnconv.layers.self_attention import SelfAttention2d as SelfAttention2d
    from attnconv.layers.self_attention import SelfAttention3d as SelfAttention3d
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        dict.fromkeys(("SelfAttention", "SelfAttention1d", "SelfAttention2d", "SelfAttention3d"), "self_attention"),
    )
