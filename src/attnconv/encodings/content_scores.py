"""What encodings with content share: queries at the pixels under them, keys over the lattice, scores per axis."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import whole
from attnconv.grid import Grid
from attnconv.operators.base import all_queries, full_precision, score_dtype


def pixel_queries(
    linear: nn.Linear, heads: int, grid: Grid, x: Float[Tensor, "b *sizes c"], scale: float
) -> Float[Tensor, "b h n e"]:
    """Scaled query vectors of the pixels under the queries, in the dtype of scores."""
    return split_heads(linear(grid.at_queries(x)), heads) * scale


def lattice_keys(
    linear: nn.Linear, heads: int, grid: Grid, x: Float[Tensor, "b *sizes c"]
) -> Float[Tensor, "b h lattice e"]:
    """Key vectors of every lattice point, in the scores' dtype; a point that holds zeros has a zero pixel's key."""
    return split_heads(linear(grid.extend(x)), heads)


def content_scores(
    query: Float[Tensor, "#b h n e"], key: Float[Tensor, "#b h lattice e"]
) -> Float[Tensor, "b h n lattice"]:
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
        return next_multiple(in_channels, multiple_of)
    channels = whole("head_channels", head_channels, 1)
    if channels % multiple_of:
        raise ValueError(bad("head_channels", f"must be a multiple of {multiple_of}", channels))
    return channels


def next_multiple(number: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `number`."""
    return -(-number // step) * step


def split_heads(flat: Float[Tensor, "b *points he"], heads: int) -> Float[Tensor, "b h flat e"]:
    """Channels of all heads -> one vector per head and point, in the dtype of scores."""
    split = flat.unflatten(-1, (heads, -1)).flatten(1, -3)  # (b, points, h, e)
    return split.transpose(1, 2).to(score_dtype(flat.dtype), memory_format=torch.contiguous_format)
