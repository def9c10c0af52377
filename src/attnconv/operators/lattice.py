"""Operators that are defined by their rows over the lattice."""

import abc
from typing import final

from jaxtyping import Float, Int
from torch import Tensor

from attnconv.operators.base import AttentionOperator, Queries, query_indices


class LatticeOperator(AttentionOperator):
    """Abstract: implement `lattice_rows`, and how to contract without them."""

    @abc.abstractmethod
    def lattice_rows(self, queries: Int[Tensor, "r"]) -> Float[Tensor, "#b h r lattice"]:
        """Probabilities of chosen queries over all lattice points, those that hold zeros included."""

    @final
    def rows(self, queries: Queries) -> Float[Tensor, "#b h r m"]:
        queries = query_indices(queries, self.grid, self.device)
        return self.grid.fold(self.lattice_rows(queries))

    @final
    def padding_mass(self, queries: Queries) -> Float[Tensor, "#b h r"]:
        queries = query_indices(queries, self.grid, self.device)
        return (self.lattice_rows(queries) * self.grid.empty(self.device)).sum(-1)
