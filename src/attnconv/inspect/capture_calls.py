"""Calls of attention, intercepted while a model runs: PyTorch's kernels, and softmax over keys in unfused models.

Under a `TorchFunctionMode` nn.MultiheadAttention and nn.TransformerEncoder leave their inference shortcuts for the same
formula in `multi_head_attention_forward`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attnconv.inspect.attention_calls import TokenRows, UnreadableError, product_rows, score_rows

SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax)
KERNEL_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@final
class AttentionCalls(TorchFunctionMode):
    """Passes to `seen`, before each call of attention, a function that returns its rows or raises `UnreadableError`."""

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
        reader = _read_softmax if func in SOFTMAX and _is_over_keys(*args, **named) else READERS.get(func)
        if reader is not None:
            self._seen(lambda: reader(*args, **named))
        return func(*args, **named)


def _is_over_keys(input: Any = None, dim: Any = None, *_: Any, **__: Any) -> bool:  # noqa: A002  # torch's names
    """Whether a softmax may be one of attention: without 4 axes only if queries x keys is a square."""
    if not isinstance(input, Tensor) or input.dim() < 3 or dim not in (-1, input.dim() - 1):
        return False
    return input.dim() == 4 or input.shape[-1] == input.shape[-2]


def _read_softmax(input: Tensor, *_: Any, **__: Any) -> TokenRows:  # noqa: A002
    if input.dim() > 4:
        raise UnreadableError(f"its scores have the shape {tuple(input.shape)}, not (batch, heads, queries, keys)")
    return score_rows(input if input.dim() == 4 else input[:, None])


def _refuse_shortcut(*_: Any, **__: Any) -> TokenRows:
    raise UnreadableError("it calls PyTorch's inference shortcut directly, which hides its queries and keys")


def _read_kernel(*args: Any, **named: Any) -> TokenRows:
    """Queries and keys of the fused kernel."""
    call = {**dict(zip(KERNEL_ARGUMENTS, args, strict=False)), **named}
    query, key = call["query"], call["key"]
    if query.dim() != 4 or key.dim() != 4:
        raise UnreadableError(f"its queries have the shape {tuple(query.shape)}, not (batch, heads, tokens, channels)")
    if query.is_nested or key.is_nested:
        raise UnreadableError("its sequences are nested tensors")
    if query.shape[0] != key.shape[0]:
        raise UnreadableError(f"{query.shape[0]} sequences of queries share {key.shape[0]} of keys")
    mask, is_causal = call.get("attn_mask"), call.get("is_causal", False)
    return product_rows(query, key, mask=mask, scale=call.get("scale"), is_causal=is_causal)


def _read_multihead(*args: Any, **named: Any) -> TokenRows:
    """Queries and keys of nn.MultiheadAttention, projected once more, with the sum of its masks."""
    given = inspect.signature(F.multi_head_attention_forward).bind(*args, **named)
    given.apply_defaults()
    call = given.arguments
    if call["bias_k"] is not None or call["add_zero_attn"] or call["static_k"] is not None:
        raise UnreadableError("it adds keys of its own (bias_k, add_zero_attn or static_k) that are no tokens")
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
    """A mask as a term of the scores; True blocks a key."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -torch.inf)


READERS: dict[Callable[..., Any], Callable[..., TokenRows]] = {
    F.scaled_dot_product_attention: _read_kernel,
    F.multi_head_attention_forward: _read_multihead,
    torch._native_multi_head_attention: _refuse_shortcut,
    torch._transformer_encoder_layer_fwd: _refuse_shortcut,
}
