"""Absolute encodings: a vector per position is added to the pixel before queries and keys. Equations (3) and (7).

    score_h(q, k) = (x_q + p_q) W_qry . (x_k + p_k) W_key / sqrt(e)

Values stay x. The vectors are sinusoids of any real position, or a learned table over an image's positions.
"""

import math
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv.encodings import content_scores
from attnconv.encodings.base import Encoding
from attnconv.grid import Grid
from attnconv.operators.base import score_dtype
from attnconv.operators.content import Content

_INTERPOLATION = {1: "linear", 2: "bilinear", 3: "trilinear"}


@final
class SinusoidalPositions(nn.Module):
    """Fixed sinusoids: one equal part of the channels for each axis."""

    def __init__(self, channels: int, dims: int) -> None:
        super().__init__()
        self.channels = content_scores.check_sinusoidal("in_channels", channels, dims)

    def forward(self, grid: Grid, points: list[Tensor], dtype: torch.dtype) -> Float[Tensor, "*points channels"]:
        """The vectors at the product of one list of positions per axis (int64, any position of the lattice)."""
        parts = []
        for dim, positions in enumerate(points):
            part = content_scores.sinusoids(positions.to(dtype), self.channels // grid.dims)  # (points_a, part)
            shape = (*(1,) * dim, positions.shape[0], *(1,) * (grid.dims - 1 - dim), part.shape[-1])
            parts.append(part.reshape(shape).expand(*(p.shape[0] for p in points), -1))
        return torch.cat(parts, -1)


@final
class LearnedPositions(nn.Module):
    """A learned vector for each position of an image of `sizes`, resampled linearly to other image sizes.

    A position outside the image has the vector of the nearest pixel.
    """

    def __init__(self, channels: int, sizes: tuple[int, ...], *, std: float = 0.02) -> None:
        super().__init__()
        if not sizes or any(size < 1 for size in sizes):
            raise ValueError(bad("sizes", "must be at least 1 for every axis", sizes))
        self.table = nn.Parameter(torch.randn(1, channels, *sizes) * std)

    def forward(self, grid: Grid, points: list[Tensor], dtype: torch.dtype) -> Float[Tensor, "*points channels"]:
        mode = _INTERPOLATION[grid.dims]
        table = F.interpolate(self.table.to(dtype), size=grid.sizes, mode=mode, align_corners=False)[0].movedim(0, -1)
        for dim, (axis, positions) in enumerate(zip(grid.axes, points, strict=True)):
            table = table.index_select(dim, positions.clamp(0, axis.size - 1))
        return table


@final
class Absolute(Encoding):
    """Attention by content with absolute positions.

    Args:
        in_channels: Channels of the image and of the position vectors.
        heads: Number of heads.
        dims: Number of axes.
        positions: The vectors: `SinusoidalPositions` or `LearnedPositions`, with in_channels channels.
        head_channels: Length e of a head's query and key; None for in_channels.

    Attributes:
        query, key: W_qry and W_key, Linear(in_channels, heads * e) without bias.
        positions: The module that gives the vectors.
    """

    by_head = ("query", "key")

    def __init__(
        self,
        in_channels: int,
        heads: int,
        dims: int = 2,
        *,
        positions: SinusoidalPositions | LearnedPositions,
        head_channels: int | None = None,
    ) -> None:
        super().__init__(heads, dims)
        self.head_channels = content_scores.check_head_channels(in_channels, head_channels)
        self.scale = 1 / math.sqrt(self.head_channels)
        self.query = nn.Linear(in_channels, heads * self.head_channels, bias=False)
        self.key = nn.Linear(in_channels, heads * self.head_channels, bias=False)
        self.positions = positions

    def operator(self, grid: Grid, x: Float[Tensor, "b *sizes c"]) -> Content:
        at_queries, at_lattice = self._positions(grid, x)
        query = content_scores.split_heads(self.query(grid.at_queries(x) + at_queries), self.heads) * self.scale
        key = content_scores.split_heads(self.key(grid.extend(x) + at_lattice), self.heads)
        return Content(grid, query, key)

    def terms(self, grid: Grid, x: Float[Tensor, "b *sizes c"]) -> dict[str, Float[Tensor, "#b h n lattice"]]:
        at_queries, at_lattice = self._positions(grid, x)
        queries = {"content": grid.at_queries(x), "position": at_queries[None]}
        keys = {"content": grid.extend(x), "position": at_lattice[None]}
        return {
            f"{left}-{right}": content_scores.products(
                content_scores.split_heads(self.query(query), self.heads) * self.scale,
                content_scores.split_heads(self.key(key), self.heads),
            )
            for left, query in queries.items()
            for right, key in keys.items()
        }

    def _positions(self, grid: Grid, x: Tensor) -> tuple[Tensor, Tensor]:
        dtype = score_dtype(x.dtype)
        at_queries = self.positions(grid, [axis.query_positions(x.device) for axis in grid.axes], dtype)
        at_lattice = self.positions(grid, [axis.lattice_positions(x.device) for axis in grid.axes], dtype)
        return at_queries.to(x.dtype), at_lattice.to(x.dtype)
