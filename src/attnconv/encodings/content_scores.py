"""What encodings with content share: vectors of heads, sinusoids, scores over the lattice."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnconv._util.errors import bad
from attnconv._util.value_checks import whole
from attnconv.grid import Grid
from attnconv.operators.base import all_queries, full_precision, score_dtype

WAVELENGTH = 10_000.0  # of the slowest sinusoid, in units of 2 pi pixels


def products(query: Float[Tensor, "#b h n e"], key: Float[Tensor, "#b h lattice e"]) -> Float[Tensor, "b h n lattice"]:
    """q . k for every scaled query and lattice point."""
    with full_precision(query.device):
        return query @ key.mT


def position_scores(
    query: Float[Tensor, "#b h n e"],
    vectors: Float[Tensor, "t e"],
    rows: Int[Tensor, "axis_n lattice"],
    dim: int,
    grid: Grid,
) -> Float[Tensor, "#b h n lattice"]:
    """q . vectors[row] for every (query, lattice point), with their `rows` along axis `dim`."""
    with full_precision(query.device):
        products = query @ vectors.mT  # (b, h, n, t)
        picked = rows[grid.unravel(all_queries(grid, rows.device))[dim]]  # (n, lattice)
        return products.gather(-1, picked.expand(*products.shape[:2], -1, -1))


def check_head_channels(in_channels: int, head_channels: int | None, *, multiple_of: int = 1) -> int:
    """The length of a head's query and key, by default in_channels or the next multiple above."""
    in_channels = whole("in_channels", in_channels, 1)
    if head_channels is None:
        return -(-in_channels // multiple_of) * multiple_of
    channels = whole("head_channels", head_channels, 1)
    if channels % multiple_of:
        raise ValueError(bad("head_channels", f"must be a multiple of {multiple_of}", channels))
    return channels


def split_heads(flat: Float[Tensor, "b *points he"], heads: int) -> Float[Tensor, "b h flat e"]:
    """Channels of all heads -> one vector per head and point, in the dtype of scores."""
    split = flat.unflatten(-1, (heads, -1)).flatten(1, -3)  # (b, points, h, e)
    return split.transpose(1, 2).to(score_dtype(flat.dtype), memory_format=torch.contiguous_format)


def sinusoids(positions: Float[Tensor, "*positions"], channels: int) -> Float[Tensor, "*positions channels"]:
    """[sin(p w_i), cos(p w_i)] with w_i = WAVELENGTH^(-2 i / channels), i = 0 .. channels / 2 - 1."""
    exponents = torch.arange(channels // 2, device=positions.device, dtype=positions.dtype) * (2 / channels)
    angles = positions[..., None] * WAVELENGTH**-exponents
    return torch.cat((angles.sin(), angles.cos()), -1)


def check_sinusoidal(name: str, channels: int, dims: int) -> int:
    """Sinusoids need a sine and a cosine for each axis."""
    if channels < 1 or channels % (2 * dims):
        requirement = f"must be a positive multiple of {2 * dims} for sinusoids over {dims} axes"
        raise ValueError(bad(name, requirement, channels))
    return channels
