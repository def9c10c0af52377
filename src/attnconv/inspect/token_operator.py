"""Attention among the image's tokens, in a model that has class tokens, registers or windows.

    A[q, k] = p(token k | token q)      for tokens q, k of the image,      padding_mass(q) = 1 - sum_k A[q, k]

The rows are the model's own and are not divided by their sum: what a token spends on the class token, on registers, on
tokens after the image's or on the padding of a window is its padding mass.
"""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.grid import Grid
from attnconv.inspect.attention_rows import TokenRows
from attnconv.inspect.token_layout import TokenLayout
from attnconv.operators.base import AttentionOperator, Queries, all_queries, query_indices
from attnconv.operators.kernels.contractions import apply_rows, contract_rows

BLOCK = 2**25  # probabilities that are held at once: 128 MiB in float32


@final
class TokenOperator(AttentionOperator):
    """The attention of one call in any model, as `visit_attention` hands it over.

    Rows are computed when asked for, in at least float32, from the very tensors that the model's kernel was given, held
    by reference. Of a model that runs unfused, rows can be had inside the visit only.

    Args:
        source: The rows of the call.
        layout: Where its tokens stand.

    Attributes:
        prefix: Number of class tokens and registers before the image's tokens.
        suffix: Number of other tokens after them, as those of detectors.
        window: Height and width of the windows that attention stays inside, in tokens; None where there are none.

    Example:
        >>> from attnconv.inspect.token_layout import Whole
        >>> from attnconv.inspect.attention_rows import ProductRows
        >>> query = torch.zeros(
        ...     1, 2, 7, 4
        ... )  # 2 heads, a class token and 2 x 3 tokens: all look everywhere alike
        >>> operator = TokenOperator(ProductRows(query, query), Whole((2, 3), 1))
        >>> operator.grid.sizes, operator.rows(torch.tensor([5])).shape
        ((2, 3), torch.Size([1, 2, 1, 6]))
        >>> torch.testing.assert_close(operator.padding_mass(torch.tensor([5])), torch.full((1, 2, 1), 1 / 7))
    """

    def __init__(self, source: TokenRows, layout: TokenLayout) -> None:
        self._source, self._layout = source, layout
        # What is no token of the image counts as padding; there is none on the lattice itself.
        self.grid = Grid.make(layout.sizes, border="zero")
        self.heads, self.batch = source.heads, source.batch // layout.parts
        self.prefix, self.suffix, self.window = layout.prefix, layout.suffix, layout.window

    @property
    def device(self) -> torch.device:
        return self._source.device

    def rows(self, queries: Queries) -> Float[Tensor, "#b h r m"]:
        queries = query_indices(queries, self.grid, self.device)
        return self._layout.rows(self._source, queries)[0]

    def padding_mass(self, queries: Queries) -> Float[Tensor, "#b h r"]:
        queries = query_indices(queries, self.grid, self.device)
        return self._layout.rows(self._source, queries)[1]

    def prefix_rows(self, tokens: Int[Tensor, "p"]) -> Float[Tensor, "b h p m"]:
        """What class tokens and registers look at, over the image's tokens (flat, row-major).

        Args:
            tokens: Which of the tokens before the image's, from 0; the class token is the first in most models.

        Raises:
            ValueError: There is no such token.
        """
        wrong = [token for token in tokens.tolist() if not 0 <= token < self.prefix]
        if wrong:
            requirement = f"must lie below {self.prefix}, the number of tokens before the image's"
            raise ValueError(bad("tokens", requirement, wrong))
        return self._source.rows(tokens)[..., self.prefix : self.prefix + self.grid.key_count]

    def contract(
        self, x: Float[Tensor, "b *sizes c"], weight: Float[Tensor, "h i d"], groups: int = 1
    ) -> Float[Tensor, "b *queries d"]:
        keys = x.flatten(1, -2)
        parts = [contract_rows(self.rows(some), keys, weight, groups) for some in self._blocks()]
        return torch.cat(parts, 1).unflatten(1, self.grid.query_sizes)

    def apply(self, values: Float[Tensor, "b h *sizes e"]) -> Float[Tensor, "b h *queries e"]:
        keys = values.flatten(2, -2)
        parts = [apply_rows(self.rows(some), keys) for some in self._blocks()]
        return torch.cat(parts, 2).unflatten(2, self.grid.query_sizes)

    def _blocks(self) -> tuple[Tensor, ...]:
        length = max(1, BLOCK // (self.batch * self.heads * self._source.keys * self._layout.parts))
        return all_queries(self.grid, self.device).split(length)
