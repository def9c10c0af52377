"""Attention among the image's tokens, in a model that has class tokens, registers or windows.

    A[q, k] = p(token k | token q)      for tokens q, k of the image,      padding_mass(q) = 1 - sum_k A[q, k]

Rows are not renormalised: attention to class tokens, registers or the padding of a window is padding mass.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.grid import Grid
from attnconv.inspect.attention_rows import TokenRows
from attnconv.operators.base import AttentionOperator, Images, Outputs, Queries, Weights, all_queries, query_indices
from attnconv.operators.kernels.contractions import contract_rows

BLOCK = 2**25  # probabilities held at once: 128 MiB in float32


@final
@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Positions of the tokens of one call in the image."""

    sizes: tuple[int, ...]  # tokens of the image, (height, width)
    prefix: int = 0  # number of tokens before the image's: class tokens, registers
    suffix: int = 0  # number of tokens after them: those of detectors
    window: tuple[int, int] | None = None  # tokens of a window, (height, width); None if an image is one sequence
    tokens: Int[Tensor, "windows places"] | None = None  # image token at each place, -1 for padding

    @property
    def parts(self) -> int:
        """Number of sequences per image."""
        return 1 if self.tokens is None else len(self.tokens)


def window_layout(
    sizes: tuple[int, int], window: tuple[int, int], *, shift: tuple[int, int], pad_first: bool
) -> TokenLayout:
    """The layout of images that are shifted up and left cyclically and cut into windows, row by row.

    Tokens are padded to whole windows before they move (`pad_first`) or after.
    """
    counts = [math.ceil(size / length) for size, length in zip(sizes, window, strict=True)]
    axes = []  # the token at each place along an axis after shift and padding, -1 for padding
    for size, length, count, step in zip(sizes, window, counts, shift, strict=True):
        places, full = torch.arange(count * length), count * length
        moved = (places + step) % full if pad_first else torch.where(places < size, (places + step) % size, -1)
        axes.append(moved.where(moved < size, -1))
    rows, columns = axes[0][:, None], axes[1]
    tokens = (rows * sizes[1] + columns).masked_fill((rows < 0) | (columns < 0), -1)
    tokens = tokens.reshape(counts[0], window[0], counts[1], window[1]).transpose(1, 2).reshape(math.prod(counts), -1)
    return TokenLayout(sizes, window=window if len(tokens) > 1 else None, tokens=tokens)


@final
class TokenOperator(AttentionOperator):
    """The attention of one call in any model, as `visit_attention` hands it over.

    Rows are computed on demand, in at least float32, from the tensors that the model's kernel was given. For a model
    that runs unfused they are available inside the visit only.

    Args:
        source: The rows of the call.
        layout: Positions of its tokens.

    Attributes:
        prefix, suffix, window: As in the layout.

    Example:
        >>> from attnconv.inspect.attention_rows import product_rows
        >>> from attnconv.inspect.token_operator import TokenLayout
        >>> query = torch.zeros(1, 2, 7, 4)  # 2 heads, a class token and 2 x 3 tokens, uniform attention
        >>> operator = TokenOperator(product_rows(query, query), TokenLayout((2, 3), prefix=1))
        >>> operator.grid.sizes, operator.rows(torch.tensor([5])).shape
        ((2, 3), torch.Size([1, 2, 1, 6]))
        >>> torch.testing.assert_close(operator.padding_mass(torch.tensor([5])), torch.full((1, 2, 1), 1 / 7))
    """

    def __init__(self, source: TokenRows, layout: TokenLayout) -> None:
        self._source, self._layout, self.device = source, layout, source.device
        # What is no token of the image counts as padding; the lattice itself has none.
        self.grid = Grid.make(layout.sizes, border="zero")
        self.heads, self.batch = source.heads, source.batch // layout.parts
        self.prefix, self.suffix, self.window = layout.prefix, layout.suffix, layout.window

    def rows(self, queries: Queries) -> Float[Tensor, "#b h r m"]:
        return self._split(queries)[0]

    def padding_mass(self, queries: Queries) -> Float[Tensor, "#b h r"]:
        return self._split(queries)[1]

    def prefix_rows(self, tokens: Int[Tensor, "p"]) -> Float[Tensor, "b h p m"]:
        """Attention of class tokens and registers over the image's tokens (flat, row-major).

        Args:
            tokens: Indices of tokens before the image's; the class token is 0 in most models.

        Raises:
            ValueError: There is no such token.
        """
        wrong = [token for token in tokens.tolist() if not 0 <= token < self.prefix]
        if wrong:
            requirement = f"must lie below {self.prefix}, the number of tokens before the image's"
            raise ValueError(bad("tokens", requirement, wrong))
        return self._source.rows(tokens)[..., self.prefix : self.prefix + self.grid.key_count]

    def contract(self, x: Images, weight: Weights, groups: int = 1) -> Outputs:
        keys = x.flatten(1, -2)
        parts = [contract_rows(self.rows(some), keys, weight, groups) for some in self._blocks()]
        return torch.cat(parts, 1).unflatten(1, self.grid.query_sizes)

    def apply(self, values: Float[Tensor, "b h *sizes e"]) -> Float[Tensor, "b h *queries e"]:
        keys = values.flatten(2, -2)
        parts = [self.rows(some).to(keys.dtype) @ keys for some in self._blocks()]
        return torch.cat(parts, 2).unflatten(2, self.grid.query_sizes)

    def _blocks(self) -> tuple[Tensor, ...]:
        length = max(1, BLOCK // (self.batch * self.heads * self._source.keys * self._layout.parts))
        return all_queries(self.grid, self.device).split(length)

    def _split(self, queries: Queries) -> tuple[Tensor, Tensor]:
        """Probabilities over the image's tokens, (b, h, r, m), and their sum elsewhere, (b, h, r)."""
        chosen = query_indices(queries, self.grid, self.device)
        if self._layout.tokens is not None:
            return self._split_windows(chosen, self._layout.tokens.to(self.device))
        rows = self._source.rows(chosen + self.prefix)
        stop = self.prefix + self.grid.key_count
        return rows[..., self.prefix : stop], rows[..., : self.prefix].sum(-1) + rows[..., stop:].sum(-1)

    def _split_windows(self, queries: Tensor, tokens: Int[Tensor, "windows places"]) -> tuple[Tensor, Tensor]:
        """The same for windows; only the windows of these queries are computed."""
        length, count = tokens.shape[1], self.grid.key_count
        places = (tokens.flatten() >= 0).nonzero().squeeze(1)
        place_of = torch.empty_like(places)
        place_of[tokens.flatten()[places]] = places
        window, inside = place_of[queries] // length, place_of[queries] % length
        touched, index = torch.unique(window, return_inverse=True)
        first = torch.arange(self.batch, device=queries.device)[:, None] * len(tokens)
        local = self._source.rows(torch.arange(length, device=queries.device), (first + touched).flatten())
        local = local.unflatten(0, (self.batch, len(touched)))
        chosen = local[:, index, :, inside].permute(1, 2, 0, 3)  # (b, h, r, places)
        # Padding goes to one column past the last token, and is taken off again as mass elsewhere.
        columns = tokens[window].where(tokens[window] >= 0, count).expand(chosen.shape)
        out = chosen.new_zeros(*chosen.shape[:3], count + 1).scatter_add_(-1, columns, chosen)
        return out[..., :count], out[..., count]
