"""Attention rows of one call, computed when they are asked for from the model's own tensors, held by reference."""

from collections.abc import Callable
from typing import TypeAlias, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.operators.base import AttentionOperator, full_precision, score_dtype

Compute: TypeAlias = Callable[[Tensor, Tensor | None], Tensor]  # the signature of `TokenRows.rows`


class UnreadableError(Exception):
    """Why a call of attention cannot be read; `visit_attention` reports it with the module's name."""


@final
class TokenRows:
    """Attention probabilities among the tokens of one call.

    `shape` is (sequences, heads, queries, keys); windows are sequences. `transient` tensors are as large as the matrix.
    """

    def __init__(
        self, compute: Compute, shape: tuple[int, ...], device: torch.device, *, transient: bool = False
    ) -> None:
        self._compute: Compute | None = compute
        self.batch, self.heads, self.queries, self.keys = shape
        self.device, self.transient = device, transient

    def rows(
        self, queries: Int[Tensor, "r"], sequences: Int[Tensor, "s"] | None = None
    ) -> Float[Tensor, "b h r tokens"]:
        """Probabilities of some queries in some sequences (None for all), at least in float32."""
        if self._compute is None:
            requirement = "the rows of a model that runs unfused must be asked for inside `visit`"
            fix = "Its scores are queries x keys and are not kept. Use visit_attention, or turn its fused attention on."
            raise ValueError(bad("operator", requirement, "a call after the model ran", fix))
        return self._compute(queries, sequences)

    def release(self) -> None:
        """Drop transient tensors."""
        if self.transient:
            self._compute = None


def product_rows(
    query: Float[Tensor, "b h n e"],
    key: Float[Tensor, "b k m e"],
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
) -> TokenRows:
    """Rows softmax_k(scale q_i . k_j + mask_ij), from the arguments of `scaled_dot_product_attention`."""
    every_mask = None if mask is None else mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    dtype, shared = score_dtype(query.dtype), query.shape[1] // key.shape[1]

    def compute(queries: Tensor, sequences: Tensor | None) -> Tensor:
        with full_precision(query.device):
            keys = _take(key, sequences).to(dtype)
            if shared > 1:  # groups of heads share their keys
                keys = keys.repeat_interleave(shared, 1)
            scores = _products(_take(query, sequences).index_select(2, queries).to(dtype) * factor, keys)
            if every_mask is not None:
                some = _take(every_mask, sequences)
                some = some if some.shape[2] == 1 else some.index_select(2, queries)
                scores = scores.masked_fill(~some, -torch.inf) if some.dtype == torch.bool else scores + some
            if is_causal:
                later = torch.arange(key.shape[2], device=query.device) > queries[:, None]
                scores = scores.masked_fill(later, -torch.inf)
            return _softmax(scores)

    return TokenRows(compute, (*query.shape[:3], key.shape[2]), query.device)


def score_rows(scores: Float[Tensor, "b h n m"]) -> TokenRows:
    """Rows softmax_k(s_ij), from the scores s of a model that runs unfused."""

    def compute(queries: Tensor, sequences: Tensor | None) -> Tensor:
        with full_precision(scores.device):
            return _softmax(_take(scores, sequences).index_select(2, queries).to(score_dtype(scores.dtype)))

    return TokenRows(compute, tuple(scores.shape), scores.device, transient=True)


def gated_rows(content: TokenRows, position: TokenRows, gate: Float[Tensor, "h"]) -> TokenRows:
    """(1 - g) A + g P, normalised: ConViT's content A, positions P and gate g (d'Ascoli et al., 2021, equation 6)."""

    def compute(queries: Tensor, sequences: Tensor | None) -> Tensor:
        rows = content.rows(queries, sequences)
        share = gate.to(rows.dtype)[:, None, None]
        mixed = (1 - share) * rows + share * position.rows(queries, sequences)
        return mixed / mixed.sum(-1, keepdim=True)

    shape = (content.batch, content.heads, content.queries, content.keys)
    return TokenRows(compute, shape, content.device, transient=content.transient or position.transient)


def operator_rows(operator: AttentionOperator, batch: int) -> TokenRows:
    """The rows of an operator that all `batch` sequences share."""

    def compute(queries: Tensor, sequences: Tensor | None) -> Tensor:
        return operator.rows(queries).expand(batch if sequences is None else len(sequences), -1, -1, -1)

    count = operator.grid.query_count
    return TokenRows(compute, (batch, operator.heads, count, count), operator.device)


def _take(tensor: Tensor, sequences: Tensor | None) -> Tensor:
    """Some sequences of a tensor, whose first axis is 1 where all sequences share it."""
    return tensor if sequences is None or tensor.shape[0] == 1 else tensor.index_select(0, sequences)


def _products(query: Float[Tensor, "b h r e"], key: Float[Tensor, "b h m e"]) -> Float[Tensor, "b h r m"]:
    """query @ key.mT, image by image where matmul would copy all keys (heads interleaved in memory) for a few rows."""
    some_rows = query.shape[2] < key.shape[3] and key.shape[0] > 1
    if not some_rows or key.is_contiguous():
        return query @ key.mT
    return torch.stack([rows @ keys.mT for rows, keys in zip(query.expand(len(key), -1, -1, -1), key, strict=True)])


def _softmax(scores: Tensor) -> Tensor:
    """Softmax over keys; a query without a key has zeros, as in the fused kernels."""
    return torch.softmax(scores, -1).masked_fill(scores.amax(-1, keepdim=True) == -torch.inf, 0.0)
