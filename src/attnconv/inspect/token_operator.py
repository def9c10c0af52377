"""Attention between the tokens of an image, in models with class tokens, registers or windows.

    A[q, k] = p(token k | token q)      for tokens q, k of the image,      padding_mass(q) = 1 - sum_k A[q, k]

Rows are not renormalised: attention to class tokens, registers or the padding of a window counts as padding mass.
"""

from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from attnconv._util.value_checks import indices
from attnconv.inspect.attention_calls import TokenRows
from attnconv.inspect.token_layout import TokenLayout
from attnconv.operators.base import (
    AttentionOperator,
    Images,
    Outputs,
    Queries,
    Weights,
    WindowRows,
    all_queries,
    query_indices,
)
from attnconv.operators.kernels.contractions import contract_rows

BLOCK = 2**25  # maximum number of probabilities per block: 128 MiB in float32


@final
class TokenOperator(AttentionOperator):
    """Operator of one attention call in any model, as passed to `visit` by `visit_attention`.

    Rows are computed on demand, in float32 or higher precision; for unfused attention, this works only during `visit`.

    Args:
        source: Attention between all tokens of the call.
        layout: Positions of these tokens in the image.

    Attributes:
        prefix, suffix, window: Numbers of tokens before and after the image's tokens; window size in tokens, or None.
    """

    def __init__(self, source: TokenRows, layout: TokenLayout) -> None:
        self._source, self._layout, self.device = source, layout, source.device
        self.grid, (self.batch, self.heads, _) = layout.grid, layout.places.shape
        self.prefix, self.suffix = layout.prefix, layout.suffix
        self.window = None if layout.windows is None else layout.windows.sizes
        self._latest: tuple[Tensor, tuple[Tensor, Tensor]] | None = None  # queries and result of `_split`

    def rows(self, queries: Queries) -> Float[Tensor, "#b h r m"]:
        rows, windows = self._split(queries)[0], self._layout.windows
        if windows is None:
            return rows
        keys = windows.keys[self._sequences(query_indices(queries, self.grid, self.device))].expand_as(rows)
        made = rows.new_zeros(*rows.shape[:-1], self.grid.key_count + 1)
        return made.scatter_(-1, keys, rows)[..., :-1]

    def padding_mass(self, queries: Queries) -> Float[Tensor, "#b h r"]:
        return self._split(queries)[1]

    def window_rows(self, queries: Queries) -> WindowRows:
        windows = self._layout.windows
        if windows is None:
            return super().window_rows(queries)
        chosen = query_indices(queries, self.grid, self.device)
        sequences, shifts = self._sequences(chosen), []
        for axis, index, line in zip(self.grid.axes, self.grid.unravel(chosen), windows.lines, strict=True):
            shifts.append(line[sequences] * axis.spacing - axis.query_positions(self.device)[index, None])
        rows, present = self._split(chosen)[0].double(), windows.keys[sequences] < self.grid.key_count
        return WindowRows(rows.unflatten(-1, windows.sizes), tuple(shifts), present.unflatten(-1, windows.sizes))

    def prefix_rows(self, tokens: Int[Tensor, "p"]) -> Float[Tensor, "b h p m"]:
        """Return the attention of class tokens and registers to the image's tokens (flat, row-major).

        `tokens` are indices from 0 (usually the class token) to `prefix` - 1; other indices raise a `ValueError`.
        """
        indices("tokens", tokens.tolist(), self.prefix)
        count = self.grid.key_count
        if self.prefix == 0:
            return torch.zeros(self.batch, self.heads, 0, count, device=self.device)
        rows = self._source.rows(tokens)[..., self.prefix : self.prefix + count]
        return rows.unflatten(0, (self.batch, self.heads))

    def token_rows(self) -> Float[Tensor, "s tokens tokens"]:
        """Return the attention between all tokens of each sequence, including class tokens and padding of windows."""
        return self._source.rows(torch.arange(self._source.queries, device=self.device))

    def sequence_heads(self) -> tuple[Int[Tensor, "s"], Int[Tensor, "s"]]:
        """Return the head of each sequence of `token_rows`, and the sequence of head 0 with the same tokens."""
        sequences = self._layout.places // self._source.queries  # (b, h, q)
        number = torch.arange(self.heads, device=self.device)[None, :, None]
        every = torch.zeros(self._source.sequences, dtype=torch.int64, device=self.device)
        heads, first = (
            every.scatter(0, sequences.flatten(), value.expand_as(sequences).flatten())
            for value in (number, sequences[:, :1])
        )
        return heads, first

    def token_indices(self) -> tuple[Int[Tensor, "s q"], Int[Tensor, "s m"]]:
        """Return the row-major index in the grid of each query and key of `token_rows`; -1 for other tokens."""
        places, windows, count = self._layout.places, self._layout.windows, self.grid.key_count
        queries = places.new_full((self._source.sequences * self._source.queries,), -1)
        queries[places.flatten()] = all_queries(self.grid, self.device).repeat(self.batch * self.heads)
        if windows is None:
            keys = places.new_full((self._source.sequences, self._source.keys), -1)
            keys[:, self.prefix : self.prefix + count] = torch.arange(count, device=self.device)
        else:
            found = windows.keys.where(windows.keys < count, -1)
            keys = F.pad(found, (0, 1), value=-1).gather(1, windows.cells)
        return queries.unflatten(0, (-1, self._source.queries)), keys

    def contract(self, x: Images, weight: Weights, groups: int = 1) -> Outputs:
        keys = x.flatten(1, -2)
        parts = [contract_rows(self.rows(some), keys, weight, groups) for some in self._blocks()]
        return torch.cat(parts, 1).unflatten(1, self.grid.query_sizes)

    def apply(self, values: Float[Tensor, "b h *sizes e"]) -> Float[Tensor, "b h *queries e"]:
        keys = values.flatten(2, -2)
        parts = [self.rows(some).to(keys.dtype) @ keys for some in self._blocks()]
        return torch.cat(parts, 2).unflatten(2, self.grid.query_sizes)

    def _blocks(self) -> tuple[Tensor, ...]:
        length = max(1, BLOCK // (self._source.sequences * self._source.keys))
        return all_queries(self.grid, self.device).split(length)

    def release(self) -> None:
        """Free what is stored only while the layer runs."""
        self._latest = None
        self._source.release()

    def _sequences(self, chosen: Int[Tensor, "r"]) -> Int[Tensor, "r"]:
        """Return the sequence of each query in the first image and head; the others have the same windows."""
        return self._layout.places[0, 0, chosen] // self._source.queries

    def _split(self, queries: Queries) -> tuple[Tensor, Tensor]:
        """Return the probabilities of the keys in the window, (b, h, r, keys), and the sum of all others, (b, h, r).

        Statistics ask for the same queries several times.
        """
        chosen = query_indices(queries, self.grid, self.device)
        if self._latest is None or not torch.equal(self._latest[0], chosen):
            self._latest = chosen, self._computed(chosen)
        return self._latest[1]

    def _computed(self, chosen: Int[Tensor, "r"]) -> tuple[Tensor, Tensor]:
        places, windows = self._layout.places, self._layout.windows
        if windows is None:
            rows = self._source.rows(chosen + int(places[0, 0, 0])).unflatten(0, (self.batch, self.heads))
            stop = self.prefix + self.grid.key_count
            return rows[..., self.prefix : stop], rows[..., : self.prefix].sum(-1) + rows[..., stop:].sum(-1)
        places = places[:, :, chosen]
        rows = self._source.rows((places % self._source.queries).flatten(), (places // self._source.queries).flatten())
        rows = rows.unflatten(0, places.shape)  # (b, h, r, tokens)
        # Attention to other tokens is collected in one extra cell after the last one.
        made = rows.new_zeros(*rows.shape[:-1], windows.keys.shape[1] + 1)
        made.scatter_add_(-1, windows.cells[self._sequences(chosen)].expand_as(rows), rows)
        return made[..., :-1], made[..., -1]
