"""Attention with axis biases in the fused kernels of a GPU: the biases are folded into longer vectors.

    Q' = [Q, B_1, .., B_a],    K' = [K, one-hot of k_1, .., one-hot of k_a],    Q' K'^T = Q K^T + sum_a B_a[q, k_a]

`scaled_dot_product_attention` of Q' and K' holds no n x n array. It multiplies in the dtype of its inputs and sums in
float32. In half precision each bias is folded as two numbers, its rounded value and the rest: 16 bits in bfloat16, 22
in float16. Flash kernels end at 256 channels, the folded ones included; beyond, torch has its memory-efficient kernel.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from attnconv.operators.base import score_dtype
from attnconv.operators.kernels.contractions import attend_plainly
from attnconv.operators.kernels.recompute_in_backward import twice_differentiable

ALIGNED = 8  # half-precision kernels take multiples of so many channels only


def attend_folded(
    queries: Float[Tensor, "#b h n e"],
    keys: Float[Tensor, "#b h lattice e"],
    values: Float[Tensor, "b #h lattice f"],
    *biases: Float[Tensor, "#b h n _"],
) -> Float[Tensor, "b h n f"]:
    """softmax(Q K^T + sum_a B_a) V by `scaled_dot_product_attention`.

    Exact where the biases have the dtype of the queries. Second derivatives hold all scores at once. On a CPU the
    longer products cost more than the additions that they save (`python -m benchmarks relative-bias`).

    Args:
        queries: Scaled query vectors, (1 or b, h, n, e).
        keys: (1 or b, h, lattice, e).
        values: (b, 1 or h, lattice, f).
        biases: Per axis, (1 or b, h, n, size of the axis), finite numbers.

    Returns:
        (b, h, n, f) in the dtype of the values.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 2, 4, 12, 8).unbind()
        >>> attend_folded(q, k, v, torch.randn(2, 4, 12, 3), torch.randn(2, 4, 12, 4)).shape
        torch.Size([2, 4, 12, 8])
    """
    return _folded_twice(queries, keys, values, *biases)


def _folded(queries: Tensor, keys: Tensor, values: Tensor, *biases: Tensor) -> Tensor:
    batch, heads = values.shape[0], queries.shape[1]
    sizes = [bias.shape[-1] for bias in biases]
    left, right = [queries], [keys]
    for dim, bias in enumerate(biases):
        one_hot = torch.eye(sizes[dim], dtype=keys.dtype, device=keys.device)
        one_hot = one_hot.repeat_interleave(math.prod(sizes[dim + 1 :]), 0).repeat(math.prod(sizes[:dim]), 1)
        parts = _split(bias, queries.dtype)
        left += parts
        right += [one_hot] * len(parts)
    query = torch.cat([part.expand(batch, -1, -1, -1) for part in left], -1)
    key = torch.cat([part.expand(batch, heads, -1, -1) for part in right], -1)
    channels = -(-max(query.shape[-1], values.shape[-1]) // ALIGNED) * ALIGNED
    query, key, value = (F.pad(part, (0, channels - part.shape[-1])) for part in (query, key, values))
    out = F.scaled_dot_product_attention(query, key, value.expand(-1, heads, -1, -1), scale=1.0)
    return out[..., : values.shape[-1]]


def _split(bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The bias as a sum of numbers of the queries' dtype: itself where it has it, else two."""
    if torch.promote_types(bias.dtype, dtype) == dtype:
        return (bias.to(dtype),)
    high = bias.detach().to(dtype)  # both meet the same one-hot channels, so the rest carries the gradient
    return high, (bias - high.to(bias.dtype)).to(dtype)


def _exactly(queries: Tensor, keys: Tensor, values: Tensor, *biases: Tensor) -> Tensor:
    """All scores at once, at least in float32: differentiable any number of times."""
    exact = (part.to(score_dtype(values.dtype)) for part in (queries, keys, values, *biases))
    return attend_plainly(*exact).to(values.dtype)


_folded_twice = twice_differentiable(_exactly, _folded)
