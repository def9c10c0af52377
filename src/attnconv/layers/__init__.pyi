from .gated_positional import GatedPositionalAttention as GatedPositionalAttention, fuse_convit as fuse_convit
from .self_attention import (
    SelfAttention as SelfAttention,
    SelfAttention1d as SelfAttention1d,
    SelfAttention2d as SelfAttention2d,
    SelfAttention3d as SelfAttention3d,
)
