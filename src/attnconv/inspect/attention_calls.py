"""Intercept the attention calls of a running model and compute their rows on demand from the model's own tensors.

PyTorch's attention functions are intercepted here. Attention that a model computes itself is found by
`token_positions`. Under a function mode, nn.MultiheadAttention and nn.TransformerEncoder do not use their inference
fast path.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnconv.inspect.position_codes import Positions
from attnconv.inspect.token_positions import TokenPositions
from attnconv.operators.base import AttentionOperator, full_precision, score_dtype

KERNEL_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
Compute: TypeAlias = Callable[[Tensor, Tensor | None], Tensor]  # the signature of `TokenRows.rows`
Places: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]  # of queries and keys, (s, n); of the output


class UnreadableError(Exception):
    """Error for an attention call that cannot be read; `visit_attention` adds the module's name to its message."""


@final
class TokenRows:
    """Attention probabilities between the tokens of one attention call.

    `shape` is (sequences, queries, keys), one sequence for each image, window and head. If `transient`, `release` frees
    tensors.
    """

    def __init__(
        self, compute: Compute, shape: tuple[int, ...], device: torch.device, *, transient: bool = False
    ) -> None:
        self._compute: Compute | None = compute
        self.sequences, self.queries, self.keys = shape
        self.device, self.transient = device, transient

    def rows(
        self, queries: Int[Tensor, "r"], sequences: Int[Tensor, "r"] | None = None
    ) -> Float[Tensor, "s r tokens"] | Float[Tensor, "r tokens"]:
        """Return the probabilities of queries in all sequences, or each in the given sequence, in float32 or better."""
        if self._compute is None:
            fix = "Use visit_attention, or enable the model's fused attention."
            raise ValueError(f"operator: must be used inside `visit`, not after it, if attention is not fused. {fix}")
        return self._compute(queries, sequences)

    def release(self) -> None:
        if self.transient:
            self._compute = None


def product_rows(
    query: Float[Tensor, "*b h n e"],
    key: Float[Tensor, "*b k m e"],
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
) -> TokenRows:
    """Return the rows softmax_j(scale q_i . k_j + mask_ij), given the arguments of `scaled_dot_product_attention`."""
    sizes, factor = query.shape[:-1], query.shape[-1] ** -0.5 if scale is None else scale
    dtype, shared = score_dtype(query.dtype), query.shape[-3] // key.shape[-3]
    mask = None if mask is None else mask[(None,) * (query.dim() - mask.dim())]

    def of(tensor: Tensor, queries: Tensor | None, sequences: Tensor | None) -> Tensor:
        """Select queries and sequences of a tensor, which may be shared by some of them."""
        if sequences is None:
            one = queries is None or tensor.shape[-2] == 1
            return tensor if one else tensor.index_select(-2, queries)  # type: ignore[arg-type]
        places = torch.unravel_index(sequences, sizes[:-1])
        index = [place % size for place, size in zip(places, tensor.shape[:-2], strict=True)]
        rows = slice(None) if queries is None else queries[:, None] % tensor.shape[-2]
        return tensor[(*(each[:, None] for each in index), rows)] if queries is not None else tensor[tuple(index)]

    def compute(queries: Tensor, sequences: Tensor | None) -> Tensor:
        with full_precision(query.device):
            keys = key if shared == 1 else key.repeat_interleave(shared, -3)  # grouped-query attention
            some = of(query, queries, sequences).to(dtype) * factor
            scores = _products(some, of(keys, None, sequences).to(dtype))
            if mask is not None:
                rows = of(mask, queries, sequences)
                scores = scores.masked_fill(~rows, -torch.inf) if rows.dtype == torch.bool else scores + rows
            if is_causal:
                later = torch.arange(key.shape[-2], device=query.device) > queries[:, None]
                scores = scores.masked_fill(later if sequences is None else later[:, None], -torch.inf)
            return _softmax(scores).flatten(0, -3) if sequences is None else _softmax(scores)[:, 0]

    return TokenRows(compute, (math.prod(sizes[:-1]), sizes[-1], key.shape[-2]), query.device)


def map_rows(maps: Float[Tensor, "s n m"]) -> TokenRows:
    """Return the rows of attention maps that a model computes itself."""
    total = maps.sum(-1, dtype=score_dtype(maps.dtype))
    # Sums are rounded in half precision, and are 0 for queries whose keys are all masked.
    if bool((maps.amin() < 0) | (((total - 1).abs() > 0.05) & (total != 0)).any()):
        raise UnreadableError("it changes or mixes its maps after the softmax, so that rows do not sum to 1")

    def compute(queries: Tensor, sequences: Tensor | None) -> Tensor:
        some = maps.index_select(1, queries) if sequences is None else maps[sequences, queries]
        return some.to(score_dtype(maps.dtype))

    return TokenRows(compute, tuple(maps.shape), maps.device, transient=True)


def gated_rows(content: TokenRows, position: AttentionOperator, gate: Float[Tensor, "h"]) -> TokenRows:
    """Return ConViT's rows, (1 - gate) content + gate position, normalised (d'Ascoli et al., 2021, equation 6)."""

    def compute(queries: Tensor, sequences: Tensor | None) -> Tensor:
        rows, places = content.rows(queries, sequences), position.rows(queries)[0]  # (h, r, m)
        heads = torch.arange(content.sequences, device=gate.device) if sequences is None else sequences
        heads = heads % len(gate)
        share = gate.to(rows.dtype)[heads, None]
        if sequences is None:
            share, places = share[..., None], places[heads]
        else:
            places = places[heads, torch.arange(len(queries), device=heads.device)]
        mixed = (1 - share) * rows + share * places
        return mixed / mixed.sum(-1, keepdim=True)

    return TokenRows(compute, (content.sequences, content.queries, content.keys), content.device)


def _products(query: Float[Tensor, "*b r e"], key: Float[Tensor, "*b m e"]) -> Float[Tensor, "*b r m"]:
    """Compute query @ key.mT, image by image if matmul would copy all keys for a few rows."""
    some_rows = query.shape[-2] < key.shape[-2] and key.shape[0] > 1
    if not some_rows or key.is_contiguous():
        return query @ key.mT
    return torch.stack([rows @ keys.mT for rows, keys in zip(query, key, strict=True)])


def _softmax(scores: Tensor) -> Tensor:
    """Compute the softmax over keys; a query with every key masked gets zeros, as in the fused kernels."""
    return torch.softmax(scores, -1).masked_fill(scores.amax(-1, keepdim=True) == -torch.inf, 0.0)


@final
class AttentionCalls(TorchFunctionMode):
    """PyTorch function mode that calls `seen` before each call of PyTorch's attention functions.

    Its arguments are a function that reads the rows, and the positions of queries and keys (`TokenPositions`). If it
    returns probabilities, (sequences, n, m), they replace those of the call, and dropout is not applied.
    """

    def __init__(self, positions: TokenPositions, seen: Callable[..., Tensor | None]) -> None:
        super().__init__()
        self._positions, self._seen = positions, seen

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = {} if kwargs is None else kwargs
        if func not in READERS or self._positions.paused:
            return func(*args, **named)
        read, places, finish = READERS[func]
        with self._positions.pause():
            found = places(self._positions, *args, **named)
            rows = self._seen(lambda: read(*args, **named), *found[:2])
            out = func(*args, **named) if rows is None or finish is None else finish(rows, *args, **named)
            if found[2] is not None:
                self._positions.put(out[0] if isinstance(out, tuple) else out, Positions(found[2]))
        return out


def _refuse_shortcut(*_: Any, **__: Any) -> TokenRows:
    raise UnreadableError("it calls PyTorch's inference fast path directly, which hides its queries and keys")


def _no_places(*_: Any, **__: Any) -> Places:
    return None, None, None


def _kernel_call(*args: Any, **named: Any) -> dict[str, Any]:
    return {**dict(zip(KERNEL_ARGUMENTS, args, strict=False)), **named}


def _read_kernel(*args: Any, **named: Any) -> TokenRows:
    call = _kernel_call(*args, **named)
    query, key, mask = call["query"], call["key"], call.get("attn_mask")
    if query.is_nested or key.is_nested:
        raise UnreadableError("it uses nested tensors")
    if query.dim() == 3:  # without an axis for heads
        query, key = query[:, None], key[:, None]
        mask = mask[:, None] if mask is not None and mask.dim() == 3 else mask
    if query.dim() < 3 or query.shape[:-3] != key.shape[:-3]:
        raise UnreadableError(f"its queries have shape {tuple(query.shape)}, and its keys {tuple(key.shape)}")
    return product_rows(query, key, mask=mask, scale=call.get("scale"), is_causal=call.get("is_causal", False))


def _kernel_places(positions: TokenPositions, *args: Any, **named: Any) -> Places:
    call = _kernel_call(*args, **named)
    query, key = (positions.of_rows(call[name]) for name in ("query", "key"))
    if key is not None and key.dim() > 2 and key.shape[-2] != call["query"].shape[-3]:
        key = key.repeat_interleave(call["query"].shape[-3] // key.shape[-2], -2)
    return _flat(query), _flat(key), None if query is None else query[..., None]


def _flat(codes: Tensor | None) -> Tensor | None:
    return None if codes is None else codes.flatten(0, -2)


def _kernel_output(rows: Float[Tensor, "s n m"], *args: Any, **named: Any) -> Tensor:
    """Return what `scaled_dot_product_attention` returns for given probabilities."""
    call = _kernel_call(*args, **named)
    query, value = call["query"], call["value"]
    if value.dim() > 3:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    return rows.to(value.dtype).reshape(*query.shape[:-1], -1) @ value


def _multihead_call(*args: Any, **named: Any) -> dict[str, Any]:
    given = inspect.signature(F.multi_head_attention_forward).bind(*args, **named)
    given.apply_defaults()
    return given.arguments


def _multihead_places(positions: TokenPositions, *args: Any, **named: Any) -> Places:
    call = _multihead_call(*args, **named)
    query, key = (positions.of_rows(call[name]) for name in ("query", "key"))  # (tokens, b), or (tokens,)
    heads = call["num_heads"]
    both = [
        None if each is None else each.reshape(len(each), -1).T.repeat_interleave(heads, 0) for each in (query, key)
    ]
    return both[0], both[1], None if query is None else query[..., None]


def _multihead_output(rows: Float[Tensor, "s n m"], *args: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
    """Return what nn.MultiheadAttention's function returns for given probabilities."""
    call = _multihead_call(*args, **named)
    value, bias = call["value"], call["in_proj_bias"]
    width = call["query"].shape[-1]
    weight = call["v_proj_weight"] if call["use_separate_proj_weight"] else call["in_proj_weight"][2 * width :]
    value = F.linear(value, weight, None if bias is None else bias[2 * width :])
    batched = value.dim() == 3
    value = value if batched else value[:, None]
    rows = rows.unflatten(0, (-1, call["num_heads"]))
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


READERS: dict[Callable[..., Any], tuple[Callable[..., TokenRows], Callable[..., Places], Any]] = {
    F.scaled_dot_product_attention: (_read_kernel, _kernel_places, _kernel_output),
    F.multi_head_attention_forward: (_read_multihead, _multihead_places, _multihead_output),
    torch._native_multi_head_attention: (_refuse_shortcut, _no_places, None),
    torch._transformer_encoder_layer_fwd: (_refuse_shortcut, _no_places, None),
}
