"""Absolute encodings: a vector per position is added to the pixel before queries and keys. Equations (3) and (7).

    score_h(q, k) = (x_q + p_q) W_qry . (x_k + p_k) W_key / sqrt(e)

Values stay x.
"""

import math
from typing import final

from jaxtyping import Float
from torch import Tensor, nn

from attnconv.encodings.base import Encoding
from attnconv.encodings.content_scores import check_head_channels, content_scores, split_heads
from attnconv.encodings.sinusoidal_and_learned_positions import Positions
from attnconv.grid import Grid
from attnconv.operators.base import score_dtype
from attnconv.operators.content import Content


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
        self, in_channels: int, heads: int, dims: int = 2, *, positions: Positions, head_channels: int | None = None
    ) -> None:
        super().__init__(heads, dims)
        self.head_channels = check_head_channels(in_channels, head_channels)
        self.query = nn.Linear(in_channels, heads * self.head_channels, bias=False)
        self.key = nn.Linear(in_channels, heads * self.head_channels, bias=False)
        self.positions = positions

    def operator(self, grid: Grid, x: Float[Tensor, "b *sizes c"]) -> Content:
        at_queries, at_lattice = self._positions(grid, x)
        query = split_heads(self.query(grid.at_queries(x) + at_queries), self.heads) * self._scale
        key = split_heads(self.key(grid.extend(x) + at_lattice), self.heads)
        return Content(grid, query, key)

    def terms(self, grid: Grid, x: Float[Tensor, "b *sizes c"]) -> dict[str, Float[Tensor, "#b h n lattice"]]:
        at_queries, at_lattice = self._positions(grid, x)
        queries = {"content": grid.at_queries(x), "position": at_queries[None]}
        keys = {"content": grid.extend(x), "position": at_lattice[None]}
        return {
            f"{left}-{right}": content_scores(
                split_heads(self.query(query), self.heads) * self._scale, split_heads(self.key(key), self.heads)
            )
            for left, query in queries.items()
            for right, key in keys.items()
        }

    @property
    def _scale(self) -> float:
        return 1 / math.sqrt(self.head_channels)

    def _positions(self, grid: Grid, x: Tensor) -> tuple[Tensor, Tensor]:
        dtype = score_dtype(x.dtype)
        at_queries = self.positions(grid, [axis.query_positions(x.device) for axis in grid.axes], dtype)
        at_lattice = self.positions(grid, [axis.lattice_positions(x.device) for axis in grid.axes], dtype)
        return at_queries.to(x.dtype), at_lattice.to(x.dtype)
