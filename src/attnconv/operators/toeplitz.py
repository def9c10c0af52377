"""Toeplitz: scores that depend on the shift alone but not as a sum over axes, such as those of a full covariance.

    A_h[q, k] = softmax_k s_h(k - q)

The scores of all shifts are a table with one entry per shift that occurs, (n - 1) * stride + lattice of them along each
axis; a row of the matrix is a window of the table, normalised. Rows are made a block of queries at a time.
"""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnconv.grid import Grid
from attnconv.operators.blockwise import BlockwiseOperator
from attnconv.operators.products import below_largest


@final
class Toeplitz(BlockwiseOperator):
    """Attention from a table of scores over shifts.

    Args:
        grid: Where the queries stand over the keys.
        table: Scores (h, *shifts) in float32 or float64, with the shifts of `Axis.all_shifts` along each axis.
        dtype: Of the probabilities; None for the table's. A table in float64 keeps the differences within a row right
            where the scores themselves are large (a sharp head far from a row's keys), whatever the rows are cast to.
    """

    batch = 1

    def __init__(self, grid: Grid, table: Float[Tensor, "h *shifts"], *, dtype: torch.dtype | None = None) -> None:
        self.grid = grid
        self.table = table
        self.dtype = table.dtype if dtype is None else dtype
        self.heads = table.shape[0]

    @property
    def device(self) -> torch.device:
        return self.table.device

    def lattice_rows(self, queries: Int[Tensor, "r"]) -> Float[Tensor, "1 h r lattice"]:
        """Probabilities of chosen queries over the lattice, (1, h, r, lattice points)."""
        windows = torch.zeros((queries.shape[0], 1), dtype=torch.int64, device=self.device)
        for axis, index in zip(self.grid.axes, self.grid.unravel(queries), strict=True):
            start = axis.stride * (axis.queries - 1 - index)  # where this query's window of the table begins
            window = start[:, None] + torch.arange(axis.lattice_size, device=self.device)
            windows = (windows[:, :, None] * axis.shift_count + window[:, None, :]).flatten(1)  # (r, points so far)
        scores = self.table.flatten(1)[:, windows]  # (h, r, lattice points)
        return torch.softmax(below_largest(scores).to(self.dtype), -1)[None]
