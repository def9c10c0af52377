"""Rows of attention probabilities among the tokens of one call, made when they are asked for.

    ProductRows    softmax_k(scale q_i . k_j + mask_ij)                       what a fused kernel was given
    ScoreRows      softmax_k(s_ij)                                            what an unfused model passes to softmax
    GatedRows      (1 - g) A_ij + g P_ij, divided by its sum over j           ConViT: content A, positions P, gate g
    PlacedRows     an operator's own rows, the same for every sequence        positions of this library's layers

All tensors are the model's own, held by reference: nothing is copied, and no matrix of tokens x tokens is made. Where
the model has made one itself (`ScoreRows`), it is let go of when the visit ends.
"""

import abc
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.operators.base import AttentionOperator, full_precision, score_dtype


class UnreadableError(Exception):
    """Why a call of attention cannot be read; `visit_attention` says it with the module's name."""


class TokenRows(abc.ABC):
    """Attention among tokens. Abstract: implement `rows`.

    Attributes:
        batch: Number of sequences; windows count as sequences.
        heads: Number of heads.
        queries: Number of tokens that ask.
        keys: Number of tokens that are looked at.
        device: Where the tensors live.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    device: torch.device

    @abc.abstractmethod
    def rows(
        self, queries: Int[Tensor, "r"], sequences: Int[Tensor, "s"] | None = None
    ) -> Float[Tensor, "b h r tokens"]:
        """Probabilities of chosen queries, of some sequences or (None) of all, in at least float32."""

    def release(self) -> None:  # noqa: B027  # most kinds hold nothing that grows as tokens x tokens
        """Let go of what is as large as tokens x tokens."""


@final
class ProductRows(TokenRows):
    """From queries and keys, as `scaled_dot_product_attention` takes them.

    Args:
        query: (b, h, n, e).
        key: (b, h or a divisor of it, m, e).
        mask: Added to the scores, or True where a key takes part; broadcasts to (b, h, n, m).
        scale: Factor of the products; None for 1 / sqrt(e).
        is_causal: Whether query i sees keys up to i only.
    """

    def __init__(
        self,
        query: Float[Tensor, "b h n e"],
        key: Float[Tensor, "b k m e"],
        *,
        mask: Tensor | None = None,
        scale: float | None = None,
        is_causal: bool = False,
    ) -> None:
        self._query, self._key, self._is_causal = query, key, is_causal
        self._mask = None if mask is None else mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
        self._scale = query.shape[-1] ** -0.5 if scale is None else scale
        self.batch, self.heads, self.queries = query.shape[:3]
        self.keys, self.device = key.shape[2], query.device

    def rows(
        self, queries: Int[Tensor, "r"], sequences: Int[Tensor, "s"] | None = None
    ) -> Float[Tensor, "b h r tokens"]:
        query, key, mask = (_some(tensor, sequences) for tensor in (self._query, self._key, self._mask))
        assert query is not None
        assert key is not None
        dtype = score_dtype(query.dtype)
        with full_precision(self.device):
            key, shared = key.to(dtype), self.heads // key.shape[1]
            if shared > 1:  # groups of heads share their keys
                key = key.repeat_interleave(shared, 1)
            scores = _products(query.index_select(2, queries).to(dtype) * self._scale, key)
            if mask is not None:
                some = mask if mask.shape[2] == 1 else mask.index_select(2, queries)
                scores = scores.masked_fill(~some, -torch.inf) if some.dtype == torch.bool else scores + some
            if self._is_causal:
                later = torch.arange(self.keys, device=self.device) > queries[:, None]
                scores = scores.masked_fill(later, -torch.inf)
            return _softmax(scores)


@final
class ScoreRows(TokenRows):
    """From scores that the model has made.

    Args:
        scores: (b, h, n, m).
    """

    def __init__(self, scores: Float[Tensor, "b h n m"]) -> None:
        self._scores: Tensor | None = scores
        self.batch, self.heads, self.queries, self.keys = scores.shape
        self.device = scores.device

    def rows(
        self, queries: Int[Tensor, "r"], sequences: Int[Tensor, "s"] | None = None
    ) -> Float[Tensor, "b h r tokens"]:
        if self._scores is None:
            requirement = "the rows of a model that runs unfused must be asked for inside `visit`"
            fix = "Its scores are queries x keys and are not kept. Use visit_attention, or turn its fused attention on."
            raise ValueError(bad("operator", requirement, "a call after the model ran", fix))
        scores = _some(self._scores, sequences)
        assert scores is not None
        with full_precision(self.device):
            return _softmax(scores.index_select(2, queries).to(score_dtype(scores.dtype)))

    def release(self) -> None:
        self._scores = None


@final
class GatedRows(TokenRows):
    """Two attentions mixed by a gate: gated positional self-attention of ConViT (d'Ascoli et al., 2021, equation 6).

    Args:
        content: The attention by content.
        position: The attention by position.
        gate: The share of positions, from 0 to 1, (h,).
    """

    def __init__(self, content: TokenRows, position: TokenRows, gate: Float[Tensor, "h"]) -> None:
        self._content, self._position, self._gate = content, position, gate
        self.batch, self.heads, self.device = content.batch, content.heads, content.device
        self.queries, self.keys = content.queries, content.keys

    def rows(
        self, queries: Int[Tensor, "r"], sequences: Int[Tensor, "s"] | None = None
    ) -> Float[Tensor, "b h r tokens"]:
        content = self._content.rows(queries, sequences)
        gate = self._gate.to(content.dtype)[:, None, None]
        mixed = (1 - gate) * content + gate * self._position.rows(queries, sequences)
        return mixed / mixed.sum(-1, keepdim=True)

    def release(self) -> None:
        self._content.release()
        self._position.release()


@final
class PlacedRows(TokenRows):
    """The rows of an operator that all sequences share.

    Args:
        operator: Of batch 1, as many keys as queries.
        batch: Number of sequences.
    """

    def __init__(self, operator: AttentionOperator, batch: int) -> None:
        self._operator, self.batch, self.heads, self.device = operator, batch, operator.heads, operator.device
        self.queries = self.keys = operator.grid.query_count

    def rows(
        self, queries: Int[Tensor, "r"], sequences: Int[Tensor, "s"] | None = None
    ) -> Float[Tensor, "b h r tokens"]:
        batch = self.batch if sequences is None else len(sequences)
        return self._operator.rows(queries).expand(batch, -1, -1, -1)


def _some(tensor: Tensor | None, sequences: Tensor | None) -> Tensor | None:
    """Chosen sequences of a tensor whose first dimension is the batch, or 1 where all share it."""
    if tensor is None or sequences is None or tensor.shape[0] == 1:
        return tensor
    return tensor.index_select(0, sequences)


def _products(query: Float[Tensor, "b h r e"], key: Float[Tensor, "b h m e"]) -> Float[Tensor, "b h r m"]:
    """query @ key.mT. Of keys whose heads lie beside each other in memory, matmul would copy all for every few rows."""
    some_rows = query.shape[2] < key.shape[3] and key.shape[0] > 1
    if not some_rows or key.is_contiguous():
        return query @ key.mT
    return torch.stack([rows @ keys.mT for rows, keys in zip(query.expand(len(key), -1, -1, -1), key, strict=True)])


def _softmax(scores: Tensor) -> Tensor:
    """Softmax over keys; a query that sees no key has zeros, as the fused kernels give it."""
    return torch.softmax(scores, -1).masked_fill(scores.amax(-1, keepdim=True) == -torch.inf, 0.0)
