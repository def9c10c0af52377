"""Operators that make rows on demand: contraction a block of queries at a time, so that no n x m matrix need exist.

A problem whose probabilities fit in one block runs at once, like `Dense`. A larger one goes block by block and computes
each block's probabilities again in the backward pass: memory stays at one block, and training computes each row twice.
"""

import abc
from collections.abc import Callable
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnconv.operators.base import AttentionOperator, all_queries, check_queries
from attnconv.operators.products import apply_rows, contract_rows

BLOCK_ELEMENTS = 2**25  # probabilities of one block: 128 MiB in float32


class LatticeOperator(AttentionOperator):
    """An operator that is defined by its rows over the lattice. Abstract: implement `lattice_rows`."""

    @abc.abstractmethod
    def lattice_rows(self, queries: Int[Tensor, "r"]) -> Float[Tensor, "#b h r lattice"]:
        """Probabilities of chosen queries over all lattice points, those that hold zeros included."""

    @final
    def rows(self, queries: Int[Tensor, "r"]) -> Float[Tensor, "#b h r m"]:
        check_queries(queries, self.grid)
        return self._rows(queries)

    @final
    def padding_mass(self, queries: Int[Tensor, "r"]) -> Float[Tensor, "#b h r"]:
        check_queries(queries, self.grid)
        return (self.lattice_rows(queries) * self.grid.empty(self.device)).sum(-1)

    def _rows(self, queries: Tensor) -> Tensor:
        return self.grid.fold(self.lattice_rows(queries))


class BlockwiseOperator(LatticeOperator):
    """One that contracts the rows that it makes, a block of queries at a time."""

    @final
    def contract(
        self, x: Float[Tensor, "b *sizes c"], weight: Float[Tensor, "h i d"], groups: int = 1
    ) -> Float[Tensor, "b *queries d"]:
        def block(queries: Tensor) -> Tensor:
            return contract_rows(self._rows(queries), x.flatten(1, -2), weight, groups)

        return self._in_blocks(block, query_dim=1)

    @final
    def apply(self, values: Float[Tensor, "b h *sizes e"]) -> Float[Tensor, "b h *queries e"]:
        def block(queries: Tensor) -> Tensor:
            return apply_rows(self._rows(queries), values.flatten(2, -2))

        return self._in_blocks(block, query_dim=2)

    def _in_blocks(self, block: Callable[[Tensor], Tensor], *, query_dim: int) -> Tensor:
        length = max(1, BLOCK_ELEMENTS // (self.batch * self.heads * self.grid.lattice_count))
        queries = all_queries(self.grid, self.device)
        # A compiler cannot unroll a number of blocks that it does not know.
        if torch.compiler.is_compiling() or self.grid.query_count <= length:
            out = block(queries)
        else:
            parts = [checkpoint(block, part, use_reentrant=False) for part in queries.split(length)]
            out = torch.cat(parts, query_dim)
        return out.unflatten(query_dim, self.grid.query_sizes)
