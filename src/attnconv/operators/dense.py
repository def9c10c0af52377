"""Dense operator: a stored matrix of probabilities, the reference for other operators and fastest on small grids."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.grid import Grid
from attnconv.operators.base import AttentionOperator, Images, Outputs, Queries, Weights, query_indices, score_dtype
from attnconv.operators.kernels.contractions import contract_rows


@final
class Dense(AttentionOperator):
    """Attention operator that stores all probabilities.

    Args:
        grid: Grid of queries and keys.
        probabilities: Probabilities over the image's keys, (1 or b, h, n, m).
        padding_mass: Total attention of each query to zero padding, (1 or b, h, n), or an operator that computes it;
            None if there is no such padding.

    Raises:
        ValueError: If `probabilities` does not have one row per query and one column per key of the grid.

    Example:
        >>> import torch
        >>> from attnconv.grid import Grid
        >>> operator = Dense.from_scores(Grid.make((2,)), torch.zeros(1, 1, 2, 2))
        >>> operator.to_dense().tolist()
        [[[[0.5, 0.5], [0.5, 0.5]]]]
    """

    def __init__(
        self,
        grid: Grid,
        probabilities: Float[Tensor, "#b h n m"],
        padding_mass: Float[Tensor, "#b h n"] | AttentionOperator | None = None,
    ) -> None:
        expected = grid.query_count, grid.key_count
        if not torch.compiler.is_compiling() and tuple(probabilities.shape[2:]) != expected:  # sizes may be symbolic
            requirement = f"must have shape (b, h, {expected[0]}, {expected[1]}), one row per query and column per key"
            raise ValueError(bad("probabilities", requirement, f"shape {tuple(probabilities.shape)}"))
        self.grid = grid
        self.probabilities = probabilities
        self.batch, self.heads = probabilities.shape[:2]
        self._padding_mass = padding_mass
        self.device = probabilities.device

    @staticmethod
    def from_scores(grid: Grid, scores: Float[Tensor, "#b h n lattice"]) -> "Dense":
        """Compute the softmax over the lattice, folded onto the image's keys, as every operator does by definition."""
        lattice = torch.softmax(scores.to(score_dtype(scores.dtype)), -1)
        return Dense(grid, grid.fold(lattice), (lattice * grid.empty(scores.device)).sum(-1))

    @staticmethod
    def of(operator: AttentionOperator) -> "Dense":
        """Create a dense operator from any operator."""
        return Dense(operator.grid, operator.to_dense(), operator)

    def contract(self, x: Images, weight: Weights, groups: int = 1) -> Outputs:
        out = contract_rows(self.probabilities, x.flatten(1, -2), weight, groups)
        return out.unflatten(1, self.grid.query_sizes)

    def apply(self, values: Float[Tensor, "b h *sizes e"]) -> Float[Tensor, "b h *queries e"]:
        return (self.probabilities.to(values.dtype) @ values.flatten(2, -2)).unflatten(2, self.grid.query_sizes)

    def rows(self, queries: Queries) -> Float[Tensor, "#b h r m"]:
        queries = query_indices(queries, self.grid, self.device)
        return self.probabilities.index_select(2, queries)

    def padding_mass(self, queries: Queries) -> Float[Tensor, "#b h r"]:
        queries = query_indices(queries, self.grid, self.device)
        known = self._padding_mass
        if isinstance(known, AttentionOperator):
            return known.padding_mass(queries)
        if known is None:
            return self.probabilities.new_zeros((self.batch, self.heads, len(queries)))
        return known.index_select(2, queries)
