"""Kronecker: one small factor per axis, for scores that are a sum over axes.

    softmax_{k1, k2} [f(k1 - q1) + g(k2 - q2)]  =  softmax_{k1} f(k1 - q1)  *  softmax_{k2} g(k2 - q2)

This is exact under every border rule, so A_h = F_h,1 (x) F_h,2. Keys with a weight below eps^2 of the row's largest are
left out: that changes less than rounding does, and avoids denormal numbers, which slow a CPU several times.
"""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from attnconv.grid import Grid
from attnconv.operators.base import AttentionOperator, Factor, Images, Outputs, Queries, Weights, query_indices
from attnconv.operators.kernels.contractions import banded_softmax
from attnconv.operators.kernels.kronecker_contraction import contract_factors, mix_values


@final
class Kronecker(AttentionOperator):
    """Attention whose matrix is a Kronecker product of one factor per axis, for each head.

    Args:
        grid: Positions of queries and keys.
        factors: Probabilities over the image's keys, one (h, n_a, m_a) for each axis a.
        padding_masses: Mass of each factor's rows on lattice points that hold zeros, one (h, n_a) for each axis.
    """

    batch = 1

    def __init__(self, grid: Grid, factors: Sequence[Factor], padding_masses: Sequence[Float[Tensor, "h _"]]) -> None:
        self.grid = grid
        self.factors = tuple(factors)
        self.padding_masses = tuple(padding_masses)
        self.heads = self.factors[0].shape[0]
        self.device = self.factors[0].device

    @staticmethod
    def from_scores(grid: Grid, scores: Sequence[Factor]) -> "Kronecker":
        """softmax of one (h, n_a, lattice_a) for each axis, cut to the band and folded onto the image's keys."""
        factors, masses = [], []
        for axis, score in zip(grid.axes, scores, strict=True):
            lattice = banded_softmax(score)
            factors.append(axis.fold(lattice))
            masses.append(axis.empty_mass(lattice))
        return Kronecker(grid, factors, masses)

    def contract(self, x: Images, weight: Weights, groups: int = 1) -> Outputs:
        return contract_factors(x, weight, self.factors)  # which knows the groups from the shapes

    def apply(self, values: Float[Tensor, "b h *sizes e"]) -> Float[Tensor, "b h *queries e"]:
        return mix_values(values, self.factors)

    def rows(self, queries: Queries) -> Float[Tensor, "1 h r m"]:
        queries = query_indices(queries, self.grid, self.device)
        indices = self.grid.unravel(queries)
        rows = self.factors[0].index_select(1, indices[0])  # (h, r, m_1)
        for factor, index in zip(self.factors[1:], indices[1:], strict=True):
            rows = (rows[..., None] * factor.index_select(1, index)[..., None, :]).flatten(2)
        return _without_denormals(rows, len(self.factors))[None]

    def to_dense(self) -> Float[Tensor, "1 h n m"]:
        matrix = self.factors[0]  # (h, queries so far, keys so far)
        for factor in self.factors[1:]:
            matrix = (matrix[:, :, None, :, None] * factor[:, None, :, None, :]).flatten(3).flatten(1, 2)
        return _without_denormals(matrix, len(self.factors))[None]

    def padding_mass(self, queries: Queries) -> Float[Tensor, "1 h r"]:
        queries = query_indices(queries, self.grid, self.device)
        indices = self.grid.unravel(queries)
        mass = self.padding_masses[0].index_select(1, indices[0])
        for factor, index in zip(self.padding_masses[1:], indices[1:], strict=True):
            mass = mass + (1 - mass) * factor.index_select(1, index)
        return mass[None]


def _without_denormals(rows: Tensor, axes: int) -> Tensor:
    """Products of three weights may be denormal: eps^6 is, in float32."""
    return rows.masked_fill(rows < torch.finfo(rows.dtype).tiny, 0) if axes > 2 else rows
