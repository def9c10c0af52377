"""Calls of attention, seen while a model runs: what PyTorch's own functions are given.

A `TorchFunctionMode` is asked before every call of a torch function. It knows these:

    scaled_dot_product_attention       queries, keys, mask and scale after rotary embeddings and norms
    multi_head_attention_forward       what nn.MultiheadAttention runs, projected here once more
    softmax over the last of 4 axes    the scores of models that run unfused
    softmax over the last of 3 axes    where the last two are alike: scores of a single head

Under such a mode nn.MultiheadAttention and nn.TransformerEncoder leave their inference shortcuts by themselves, for the
same formula in `multi_head_attention_forward`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnconv.inspect.attention_rows import ProductRows, ScoreRows, TokenRows, UnreadableError

SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax)
SHORTCUTS = (torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd)

KERNEL_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@final
class AttentionCalls(TorchFunctionMode):
    """Hands every call of attention to a function, just before it runs.

    Args:
        seen: Called with a function that gives the call's rows, or raises `UnreadableError`.
    """

    def __init__(self, seen: Callable[[Callable[[], TokenRows]], None]) -> None:
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
        reader = _reader(func, args, named)
        if reader is not None:
            self._seen(lambda: reader(*args, **named))
        return func(*args, **named)


def _reader(func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> Callable[..., TokenRows] | None:
    """What reads a call, or None for a call that is no attention."""
    if func is F.scaled_dot_product_attention:
        return _of_kernel
    if func is F.multi_head_attention_forward:
        return _of_multihead
    if func in SHORTCUTS:
        return _of_shortcut
    if func in SOFTMAX:
        scores = args[0] if args else named.get("input")
        dim = args[1] if len(args) > 1 else named.get("dim")
        if isinstance(scores, Tensor) and scores.dim() > 2 and dim in (-1, scores.dim() - 1):
            # With other than 4 axes it may be anything, as probabilities of classes; queries x keys is a square.
            return _of_softmax if scores.dim() == 4 or scores.shape[-1] == scores.shape[-2] else None
    return None


def _of_softmax(*args: Any, **named: Any) -> TokenRows:
    scores = args[0] if args else named["input"]
    if scores.dim() > 4:
        raise UnreadableError(f"its scores have the shape {tuple(scores.shape)}, not (batch, heads, queries, keys)")
    return ScoreRows(scores if scores.dim() == 4 else scores[:, None])


def _of_shortcut(*_: Any, **__: Any) -> TokenRows:
    raise UnreadableError("it calls PyTorch's inference shortcut directly, whose queries and keys are not to be had")


def _of_kernel(*args: Any, **named: Any) -> TokenRows:
    """Queries and keys of the fused kernel; what else it takes (values, dropout) shows in neither."""
    call = {**dict(zip(KERNEL_ARGUMENTS, args, strict=False)), **named}
    query, key = call["query"], call["key"]
    if query.dim() != 4 or key.dim() != 4:
        raise UnreadableError(f"its queries have the shape {tuple(query.shape)}, not (batch, heads, tokens, channels)")
    if query.is_nested or key.is_nested:
        raise UnreadableError("its sequences are nested tensors")
    if query.shape[0] != key.shape[0]:
        raise UnreadableError(f"{query.shape[0]} sequences of queries share {key.shape[0]} of keys")
    mask, is_causal = call.get("attn_mask"), call.get("is_causal", False)
    return ProductRows(query, key, mask=mask, scale=call.get("scale"), is_causal=is_causal)


def _of_multihead(*args: Any, **named: Any) -> TokenRows:
    """Queries and keys of nn.MultiheadAttention: its projections, and its masks added up."""
    given = inspect.signature(F.multi_head_attention_forward).bind(*args, **named)
    given.apply_defaults()
    call = given.arguments
    if call["bias_k"] is not None or call["add_zero_attn"] or call["static_k"] is not None:
        raise UnreadableError("it adds keys of its own (bias_k, add_zero_attn or static_k) that are no tokens")
    query, key = call["query"], call["key"]  # (tokens, b, c), or (tokens, c)
    if query.dim() == 2:
        query, key = query[:, None], key[:, None]
    width = query.shape[-1]
    if call["use_separate_proj_weight"]:
        weights = (call["q_proj_weight"], call["k_proj_weight"])
    else:
        weights = call["in_proj_weight"][: 2 * width].split(width)
    bias = call["in_proj_bias"]
    biases = (None, None) if bias is None else bias[: 2 * width].split(width)
    heads = call["num_heads"]
    parts = [
        F.linear(tokens, weight, offset).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)  # (b, h, tokens, e)
        for tokens, weight, offset in zip((query, key), weights, biases, strict=True)
    ]
    return ProductRows(parts[0], parts[1], mask=_mask(call["attn_mask"], call["key_padding_mask"], heads))


def _mask(mask: Tensor | None, padding: Tensor | None, heads: int) -> Tensor | None:
    """What is added to the scores; True means a key that takes no part in either of the two."""
    total = None
    if mask is not None:
        total = _added(mask.unflatten(0, (-1, heads)) if mask.dim() == 3 else mask)  # (b h, n, m) -> (b, h, n, m)
    if padding is not None:
        keys = _added(padding if padding.dim() == 2 else padding[None])[:, None, None, :]
        total = keys if total is None else total + keys
    return total


def _added(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -torch.inf)
