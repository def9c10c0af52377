"""Content: scores from queries and keys of the image, with or without position: equations (7) and (8) of the paper.

score_h[q, k] = q_h . k_h  +  sum over axes a of  B_a,h[q, k_a]

There is no n x n bias.
"""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnconv.grid import Grid
from attnconv.operators.base import Images, LatticeOperator, Outputs, Weights, full_precision
from attnconv.operators.kernels.contractions import axis_sum, project, project_heads
from attnconv.operators.kernels.relative_bias import attend


@final
class Content(LatticeOperator):
    """Attention by content, with an optional position part that is a sum over axes.

    Args:
        grid: Positions of queries and keys.
        queries: Scaled query vectors, (1 or b, h, n, e).
        keys: (1 or b, h, lattice points, e).
        biases: Per axis a score (1 or b, h, n, lattice_a) that is added, or none.
    """

    def __init__(
        self,
        grid: Grid,
        queries: Float[Tensor, "#b h n e"],
        keys: Float[Tensor, "#b h lattice e"],
        *,
        biases: Sequence[Float[Tensor, "#b h n _"]] = (),
    ) -> None:
        self.grid = grid
        self.queries = queries
        self.keys = keys
        self.biases = tuple(biases)
        self.heads = queries.shape[1]
        self.batch = max(queries.shape[0], keys.shape[0])
        self.device = queries.device

    def contract(self, x: Images, weight: Weights, groups: int = 1) -> Outputs:
        lattice = self.grid.extend(x).flatten(1, -2)  # (b, lattice, c)
        if weight.shape[2] < x.shape[-1]:
            out = self._attend(project_heads(lattice, weight, groups).transpose(1, 2)).sum(1)
        else:
            out = project(self._attend(lattice[:, None]).transpose(1, 2), weight, groups)
        return out.unflatten(1, self.grid.query_sizes)

    def apply(self, values: Float[Tensor, "b h *sizes e"]) -> Float[Tensor, "b h *queries e"]:
        return self._attend(self.grid.extend(values).flatten(2, -2)).unflatten(2, self.grid.query_sizes)

    def _attend(self, values: Float[Tensor, "b #h lattice e"]) -> Float[Tensor, "b h n e"]:
        return attend(self.queries, self.keys, values, self.biases)

    def lattice_rows(self, queries: Int[Tensor, "r"]) -> Float[Tensor, "#b h r lattice"]:
        with full_precision(self.device):
            scores = self.queries.index_select(2, queries) @ self.keys.mT
            if self.biases:
                scores = scores + axis_sum([bias.index_select(2, queries) for bias in self.biases])
            return torch.softmax(scores, -1)
