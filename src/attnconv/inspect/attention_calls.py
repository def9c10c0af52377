"""Intercept the attention calls of a running model and compute their rows on demand from the model's own tensors.

PyTorch's attention functions are intercepted and, in models that do not call them (unfused models), the softmax over
keys. Under a function mode, nn.MultiheadAttention and nn.TransformerEncoder do not use their inference fast path.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnconv.operators.base import full_precision, score_dtype

SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax)
KERNEL_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
Compute: TypeAlias = Callable[[Tensor, Tensor | None], Tensor]  # the signature of `TokenRows.rows`


class UnreadableError(Exception):
    """Error for an attention call that cannot be read; `visit_attention` adds the module's name to its message."""


@final
class TokenRows:
    """Attention probabilities between the tokens of one attention call.

    `shape` is (sequences, heads, queries, keys), one sequence per window. If `transient`, `release` frees tensors.
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
        """Return the probabilities of queries in sequences (None for all sequences), in float32 or higher precision."""
        if self._compute is None:
            fix = "Use visit_attention, or enable the model's fused attention."
            raise ValueError(f"operator: must be used inside `visit`, not after it, if attention is not fused. {fix}")
        return self._compute(queries, sequences)

    def release(self) -> None:
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
    """Return the rows softmax_j(scale q_i . k_j + mask_ij), given the arguments of `scaled_dot_product_attention`."""
    every_mask = None if mask is None else mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    dtype, shared = score_dtype(query.dtype), query.shape[1] // key.shape[1]

    def compute(queries: Tensor, sequences: Tensor | None) -> Tensor:
        with full_precision(query.device):
            keys = _take(key, sequences).to(dtype)
            if shared > 1:  # grouped-query attention
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


def score_rows(input: Tensor, *_: Any, **__: Any) -> TokenRows:  # noqa: A002  # torch's name
    """Return the rows softmax_j(s_ij), given the scores s, (b, h, n, m) or (b, n, m), of an unfused model."""
    if input.dim() > 4:
        raise UnreadableError(f"its scores have shape {tuple(input.shape)}, not (batch, heads, queries, keys)")
    scores = input if input.dim() == 4 else input[:, None]

    def compute(queries: Tensor, sequences: Tensor | None) -> Tensor:
        with full_precision(scores.device):
            return _softmax(_take(scores, sequences).index_select(2, queries).to(score_dtype(scores.dtype)))

    return TokenRows(compute, tuple(scores.shape), scores.device, transient=True)


def gated_rows(content: TokenRows, position: TokenRows, gate: Float[Tensor, "h"]) -> TokenRows:
    """Return ConViT's rows, (1 - gate) content + gate position, normalised (d'Ascoli et al., 2021, equation 6)."""

    def compute(queries: Tensor, sequences: Tensor | None) -> Tensor:
        rows = content.rows(queries, sequences)
        share = gate.to(rows.dtype)[:, None, None]
        mixed = (1 - share) * rows + share * position.rows(queries, sequences)
        return mixed / mixed.sum(-1, keepdim=True)

    shape = (content.batch, content.heads, content.queries, content.keys)
    return TokenRows(compute, shape, content.device, transient=content.transient or position.transient)


def _take(tensor: Tensor, sequences: Tensor | None) -> Tensor:
    """Select sequences of a tensor; a first axis of size 1 is shared by all sequences."""
    return tensor if sequences is None or tensor.shape[0] == 1 else tensor.index_select(0, sequences)


def _products(query: Float[Tensor, "b h r e"], key: Float[Tensor, "b h m e"]) -> Float[Tensor, "b h r m"]:
    """Compute query @ key.mT, image by image if matmul would copy all keys for a few rows."""
    some_rows = query.shape[2] < key.shape[3] and key.shape[0] > 1
    if not some_rows or key.is_contiguous():
        return query @ key.mT
    return torch.stack([rows @ keys.mT for rows, keys in zip(query.expand(len(key), -1, -1, -1), key, strict=True)])


def _softmax(scores: Tensor) -> Tensor:
    """Compute the softmax over keys; a query with every key masked gets zeros, as in the fused kernels."""
    return torch.softmax(scores, -1).masked_fill(scores.amax(-1, keepdim=True) == -torch.inf, 0.0)


@final
class AttentionCalls(TorchFunctionMode):
    """PyTorch function mode that calls `seen` before each attention call, with a function that reads its rows.

    If `seen` returns probabilities, (b, h, n, m), they replace those of the call, and dropout is not applied.
    """

    def __init__(self, seen: Callable[[Callable[[], TokenRows]], Tensor | None]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = {} if kwargs is None else kwargs
        reader = score_rows if func in SOFTMAX and _is_over_keys(*args, **named) else READERS.get(func)
        rows = None if reader is None else self._seen(lambda: reader(*args, **named))
        if rows is None:
            return func(*args, **named)
        if func is F.scaled_dot_product_attention:
            return _kernel_output(rows, *args, **named)
        if func is F.multi_head_attention_forward:
            return _multihead_output(rows, *args, **named)
        given = func(*args, **named)
        return rows.reshape(given.shape).to(given.dtype)


def _is_over_keys(input: Any = None, dim: Any = None, *_: Any, **__: Any) -> bool:  # noqa: A002  # torch's names
    """Return whether a softmax may be part of attention: over the last axis and, in 3-d input, of square matrices."""
    if not isinstance(input, Tensor) or input.dim() < 3 or dim not in (-1, input.dim() - 1):
        return False
    return input.dim() == 4 or input.shape[-1] == input.shape[-2]


def _refuse_shortcut(*_: Any, **__: Any) -> TokenRows:
    raise UnreadableError("it calls PyTorch's inference fast path directly, which hides its queries and keys")


def _read_kernel(*args: Any, **named: Any) -> TokenRows:
    call = {**dict(zip(KERNEL_ARGUMENTS, args, strict=False)), **named}
    query, key = call["query"], call["key"]
    if query.dim() != 4 or key.dim() != 4:
        raise UnreadableError(f"its queries have shape {tuple(query.shape)}, not (batch, heads, tokens, channels)")
    if query.is_nested or key.is_nested:
        raise UnreadableError("it uses nested tensors")
    if query.shape[0] != key.shape[0]:
        raise UnreadableError(f"it has {query.shape[0]} sequences of queries but {key.shape[0]} of keys")
    mask, is_causal = call.get("attn_mask"), call.get("is_causal", False)
    return product_rows(query, key, mask=mask, scale=call.get("scale"), is_causal=is_causal)


def _kernel_output(rows: Float[Tensor, "b h n m"], *args: Any, **named: Any) -> Tensor:
    """Return what `scaled_dot_product_attention` returns for given probabilities."""
    value = {**dict(zip(KERNEL_ARGUMENTS, args, strict=False)), **named}["value"]
    return rows.to(value.dtype) @ value.repeat_interleave(rows.shape[1] // value.shape[1], 1)


def _multihead_call(*args: Any, **named: Any) -> dict[str, Any]:
    given = inspect.signature(F.multi_head_attention_forward).bind(*args, **named)
    given.apply_defaults()
    return given.arguments


def _multihead_output(rows: Float[Tensor, "b h n m"], *args: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
    """Return what nn.MultiheadAttention's function returns for given probabilities."""
    call = _multihead_call(*args, **named)
    value, bias = call["value"], call["in_proj_bias"]
    width = call["query"].shape[-1]
    weight = call["v_proj_weight"] if call["use_separate_proj_weight"] else call["in_proj_weight"][2 * width :]
    value = F.linear(value, weight, None if bias is None else bias[2 * width :])
    batched = value.dim() == 3
    value = value if batched else value[:, None]
    mixed = rows.to(value.dtype) @ value.unflatten(-1, (call["num_heads"], -1)).permute(1, 2, 0, 3)
    out = F.linear(mixed.permute(2, 0, 1, 3).flatten(2), call["out_proj_weight"], call["out_proj_bias"])
    weights = (rows.mean(1) if call["average_attn_weights"] else rows) if call["need_weights"] else None
    return (out, weights) if batched else (out[:, 0], None if weights is None else weights[0])


def _read_multihead(*args: Any, **named: Any) -> TokenRows:
    """Read the arguments of nn.MultiheadAttention: project queries and keys again, and add up the masks."""
    call = _multihead_call(*args, **named)
    if call["bias_k"] is not None or call["add_zero_attn"] or call["static_k"] is not None:
        raise UnreadableError("it adds keys that are not tokens (bias_k, add_zero_attn or static_k)")
    query, key = call["query"], call["key"]  # (tokens, b, c), or (tokens, c)
    if query.dim() == 2:
        query, key = query[:, None], key[:, None]
    width, bias, heads = query.shape[-1], call["in_proj_bias"], call["num_heads"]
    if call["use_separate_proj_weight"]:
        weights = (call["q_proj_weight"], call["k_proj_weight"])
    else:
        weights = call["in_proj_weight"][: 2 * width].split(width)
    biases = (None, None) if bias is None else bias[: 2 * width].split(width)
    projected = [
        F.linear(tokens, weight, offset).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)  # (b, h, tokens, e)
        for tokens, weight, offset in zip((query, key), weights, biases, strict=True)
    ]
    mask, padding = call["attn_mask"], call["key_padding_mask"]
    parts = []
    if mask is not None:
        parts.append(_additive(mask.unflatten(0, (-1, heads)) if mask.dim() == 3 else mask))  # (b h, n, m)
    if padding is not None:
        parts.append(_additive(padding if padding.dim() == 2 else padding[None])[:, None, None, :])
    return product_rows(projected[0], projected[1], mask=sum(parts[1:], parts[0]) if parts else None)


def _additive(mask: Tensor) -> Tensor:
    """Convert a mask to a term that is added to the scores; True blocks a key."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -torch.inf)


READERS: dict[Callable[..., Any], Callable[..., TokenRows]] = {
    F.scaled_dot_product_attention: _read_kernel,
    F.multi_head_attention_forward: _read_multihead,
    torch._native_multi_head_attention: _refuse_shortcut,
    torch._transformer_encoder_layer_fwd: _refuse_shortcut,
}
