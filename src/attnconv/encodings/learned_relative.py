"""Learned relative encodings (section 4.3 of the paper): a table of vectors r_a for the shifts along each axis a.

    position only   score_h(delta) = sum_a  r_a[delta_a] . w_h,a
    with content    score_h(q, k)  = ( q_h . k_h  +  sum_a  q_h,a . r_a[delta_a] ) / sqrt(e)

The query vector q_h is split into equal parts q_h,a, one per axis. Shifts beyond the table use its outermost rows.
"""

import math
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnconv._util.value_checks import whole
from attnconv.encodings.base import Encoding, SeparableEncoding
from attnconv.encodings.content import (
    check_head_channels,
    merged,
    merges,
    products,
    scores_at,
    shared_keys,
    split_heads,
)
from attnconv.grid import Grid
from attnconv.operators.base import all_queries, full_precision, score_dtype
from attnconv.operators.content import Content
from attnconv.operators.kernels.contractions import axis_sum


@final
class LearnedRelative(SeparableEncoding):
    """Learned relative encoding without content: attention depends only on the shift and is the same for all images.

    Args:
        heads, dims: Number of heads and number of axes.
        channels: Length of the vectors in the tables.
        max_shift: Largest shift in the tables, in positions; 15 covers the paper's 16 x 16. Larger ones are clamped.

    Attributes:
        tables: One table per axis, (2 * max_shift + 1, channels); row s + max_shift is the vector of shift s.
        projections: One Linear(channels, heads) per axis, without bias, which maps vectors to scores.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If `heads` or `channels` is below 1, `dims` is not 1, 2 or 3, or `max_shift` is negative.
    """

    by_head = ("projections",)

    def __init__(self, heads: int, dims: int = 2, *, channels: int = 400, max_shift: int = 15) -> None:
        super().__init__(heads, dims)
        self.max_shift = whole("max_shift", max_shift, 0)
        channels = whole("channels", channels, 1)
        self.tables = nn.ParameterList(torch.randn(2 * max_shift + 1, channels) for _ in range(dims))
        self.projections = nn.ModuleList(nn.Linear(channels, heads, bias=False) for _ in range(dims))

    def axis_scores(self, axis: int, shifts: Float[Tensor, "n lattice"]) -> Float[Tensor, "h n lattice"]:
        projection = self.projections[axis].weight.to(shifts.dtype)
        scores = self.tables[axis].to(shifts.dtype) @ projection.T  # (2 max_shift + 1, h)
        return scores[table_rows(shifts, self.max_shift)].permute(2, 0, 1)


@final
class LearnedRelativeContent(Encoding):
    """Learned relative encoding with content: scores (q . k + q . r) / sqrt(e), as in section 4.3 of the paper.

    Args:
        in_channels: Number of channels of the image.
        heads: Number of heads.
        dims: Number of axes; must divide head_channels.
        head_channels: Length e of a head's queries and keys; None for in_channels, rounded up to a multiple of dims.
        max_shift: Largest shift in the tables, in positions; shifts beyond it are clamped.

    Attributes:
        query, key: Linear(in_channels, heads * e) with bias.
        tables: One table per axis, (2 * max_shift + 1, e / dims), used by all heads; row s + max_shift is for shift s.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If `heads` is below 1, `dims` is not 1, 2 or 3, `max_shift` is negative,
            or `head_channels` is not a positive multiple of `dims`.
    """

    by_head = ("query", "key")

    def __init__(
        self, in_channels: int, heads: int, dims: int = 2, *, head_channels: int | None = None, max_shift: int = 15
    ) -> None:
        super().__init__(heads, dims)
        self.head_channels = check_head_channels(in_channels, head_channels, multiple_of=dims)
        self.scale = 1 / math.sqrt(self.head_channels)
        self.max_shift = whole("max_shift", max_shift, 0)
        self.query = nn.Linear(in_channels, heads * self.head_channels)
        self.key = nn.Linear(in_channels, heads * self.head_channels)
        rows, part = 2 * max_shift + 1, self.head_channels // dims
        self.tables = nn.ParameterList(torch.randn(rows, part) for _ in range(dims))

    def operator(self, grid: Grid, x: Float[Tensor, "b *sizes c"]) -> Content:
        rows = sum(len(table) for table in self.tables)
        if merges(grid, x, (self.query, self.key), self.head_channels, bias=True, table_rows=rows):
            return self._merged(grid, x)
        query, key, biases = self._parts(grid, x)
        return Content(grid, query, key, biases=biases)

    def terms(self, grid: Grid, x: Float[Tensor, "b *sizes c"]) -> dict[str, Float[Tensor, "b h n lattice"]]:
        query, key, biases = self._parts(grid, x)
        return {"content-content": products(query, key), "content-position": axis_sum(biases)}

    def _parts(self, grid: Grid, x: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        query = split_heads(self.query(grid.at_queries(x)), self.heads) * self.scale
        parts = zip(query.chunk(self.dims, -1), self.tables, self._rows(grid, x.device), strict=True)
        biases = [scores_at(products(part, table.to(query.dtype)), rows) for part, table, rows in parts]
        return query, split_heads(self.key(grid.extend(x)), self.heads), biases

    def _merged(self, grid: Grid, x: Tensor) -> Content:
        """Compute the operator with the image as keys of all heads, see `merged`."""
        at_queries, exact = grid.at_queries(x), score_dtype(x.dtype)
        weight, bias = self.query.weight, self.query.bias
        query = merged(at_queries, weight, bias, self.key.weight.unflatten(0, (self.heads, -1)), self.scale)
        with full_precision(x.device):
            tables = torch.block_diag(*(table.to(exact) for table in self.tables)).expand(self.heads, -1, -1)
            sizes = [len(table) for table in self.tables]
            # Every key has one shift along the first axis, so the bias of the keys can be added to its table.
            first = tables[:, : sizes[0]] + self.key.bias.to(exact).view(self.heads, 1, -1)
            right = torch.cat([first, tables[:, sizes[0] :]], 1).mT
            scores = merged(at_queries.to(exact), weight, bias, right, self.scale).transpose(1, 2).split(sizes, -1)
        along = zip(scores, self._rows(grid, x.device), strict=True)
        biases = [scores_at(each, rows[:, None]).transpose(1, 2) for each, rows in along]
        return Content(grid, query, shared_keys(grid.extend(x)), biases=biases)

    def _rows(self, grid: Grid, device: torch.device) -> list[Int[Tensor, "n _"]]:
        """Return the table rows of the shifts of each query, one tensor per axis."""
        indices = grid.unravel(all_queries(grid, device))
        return [
            table_rows(axis.shifts(device), self.max_shift)[index]
            for axis, index in zip(grid.axes, indices, strict=True)
        ]


def table_rows(shifts: Tensor, max_shift: int) -> Int[Tensor, "n lattice"]:
    """Return the table row of each shift; shifts beyond the table use its outermost rows."""
    return shifts.to(torch.int64).clamp(-max_shift, max_shift) + max_shift
