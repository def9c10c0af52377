"""Toeplitz: scores that depend on the shift only but not as a sum over axes, such as those of a full covariance.

    A_h[q, k] = softmax_k s_h(k - q)

Small problems compute all rows at once; larger ones go head by head without them (`kernels.toeplitz_mixing`).
"""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnconv.grid import Grid
from attnconv.operators.base import (
    Images,
    LatticeOperator,
    Outputs,
    Weights,
    all_queries,
    full_precision,
    has_values,
    product_dtype,
)
from attnconv.operators.dense import Dense
from attnconv.operators.kernels import block_sizes
from attnconv.operators.kernels.toeplitz_mixing import contract_by_shift, mix_by_shift, shift_rows


@final
class Toeplitz(LatticeOperator):
    """Attention from a table of scores over shifts.

    Args:
        grid: Positions of queries and keys.
        table: Scores (h, *shifts) in float32 or float64, with the shifts of `Axis.all_shifts` along each axis.
        dtype: Of the probabilities; None for the table's. A float64 table keeps the differences within a row exact
            where scores are large (a sharp head far from a row's keys).
    """

    batch = 1

    def __init__(self, grid: Grid, table: Float[Tensor, "h *shifts"], *, dtype: torch.dtype | None = None) -> None:
        self.grid = grid
        self.table = table
        self.dtype = table.dtype if dtype is None else dtype
        self.heads = table.shape[0]
        self.device = table.device

    def contract(self, x: Images, weight: Weights, groups: int = 1) -> Outputs:
        if (dense := self._all_rows()) is not None:
            return dense.contract(x, weight, groups)
        dtype = product_dtype(x)
        with full_precision(x.device):
            return contract_by_shift(self.grid, self.grid.extend(x.to(dtype)), weight.to(dtype), self.table, groups)

    def apply(self, values: Float[Tensor, "b h *sizes e"]) -> Float[Tensor, "b h *queries e"]:
        if (dense := self._all_rows()) is not None:
            return dense.apply(values)
        shown = self.grid.extend(values)
        return torch.stack([mix_by_shift(self.grid, shown[:, h], self.table[h]) for h in range(self.heads)], 1)

    def lattice_rows(self, queries: Int[Tensor, "r"]) -> Float[Tensor, "1 h r lattice"]:
        return shift_rows(self.grid, self.table, queries, self.dtype)[None]

    def _all_rows(self) -> Dense | None:
        """The whole matrix of a small problem."""
        count = self.heads * self.grid.query_count * self.grid.lattice_count
        if has_values(self.table) and count > block_sizes.ALL_ROWS:
            return None
        return Dense(self.grid, self.grid.fold(self.lattice_rows(all_queries(self.grid, self.device))))
