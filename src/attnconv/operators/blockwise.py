"""Contraction by operators that produce rows, a block of queries at a time, so that no n x m matrix need exist.

A problem whose probabilities fit in one block runs at once, like `Dense`. A larger one goes block by block and computes
each block's probabilities again in the backward pass: memory stays at one block, and training computes each row twice.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnconv.grid import Grid
from attnconv.operators.products import apply_rows, contract_rows

BLOCK_ELEMENTS = 2**25  # probabilities of one block: 128 MiB in float32

Rows: TypeAlias = Callable[[Tensor], Tensor]  # queries (r,) -> probabilities (1 or b, h, r, m)


def contract_in_blocks(
    grid: Grid,
    rows: Rows,
    x: Float[Tensor, "b *sizes c"],
    weight: Float[Tensor, "h i d"],
    *,
    groups: int,
    row_elements: int,
) -> Float[Tensor, "b *queries d"]:
    """sum_h A_h X W_h from rows of A; `row_elements` is what one query's probabilities take in all."""

    def block(queries: Tensor) -> Tensor:
        return contract_rows(rows(queries), x.flatten(1, -2), weight, groups)

    return _in_blocks(grid, block, x.device, query_dim=1, row_elements=row_elements)


def apply_in_blocks(
    grid: Grid, rows: Rows, values: Float[Tensor, "b h *sizes e"], *, row_elements: int
) -> Float[Tensor, "b h *queries e"]:
    """A_h V_h from rows of A; `row_elements` is what one query's probabilities take in all."""

    def block(queries: Tensor) -> Tensor:
        return apply_rows(rows(queries), values.flatten(2, -2))

    return _in_blocks(grid, block, values.device, query_dim=2, row_elements=row_elements)


def _in_blocks(
    grid: Grid, block: Callable[[Tensor], Tensor], device: torch.device, *, query_dim: int, row_elements: int
) -> Tensor:
    count = grid.query_count
    length = max(1, BLOCK_ELEMENTS // row_elements)
    if torch.compiler.is_compiling() or count <= length:  # a compiler cannot unroll a number of blocks it does not know
        out = block(torch.arange(count, device=device))
    else:
        queries = torch.arange(count, device=device).split(length)
        out = torch.cat([checkpoint(block, part, use_reentrant=False) for part in queries], query_dim)
    return out.unflatten(query_dim, grid.query_sizes)
