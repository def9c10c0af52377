"""Layers: self-attention over sequences, images and volumes, with the face of nn.Conv1d/2d/3d."""

from typing import TYPE_CHECKING

from attnconv._lazy import attach

if TYPE_CHECKING:
    from attnconv.layers.gated import GatedPositionalAttention as GatedPositionalAttention
    from attnconv.layers.gated import fuse_convit as fuse_convit
    from attnconv.layers.self_attention import SelfAttention as SelfAttention
    from attnconv.layers.self_attention import SelfAttention1d as SelfAttention1d
    from attnconv.layers.self_attention import SelfAttention2d as SelfAttention2d
    from attnconv.layers.self_attention import SelfAttention3d as SelfAttention3d
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "GatedPositionalAttention": "gated",
            "SelfAttention": "self_attention",
            "SelfAttention1d": "self_attention",
            "SelfAttention2d": "self_attention",
            "SelfAttention3d": "self_attention",
            "fuse_convit": "gated",
        },
    )
