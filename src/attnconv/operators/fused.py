"""Attention with axis biases in the fused kernels of a GPU: two forms, neither with an n x n array.

    flex      FlexAttention adds B_a[q, k_a] to each score inside the kernel, from float32 tensors: no digit is lost
    folded    `scaled_dot_product_attention` of longer vectors: Q' = [Q, B], K' = [K, one-hot of k_a], Q' K' = Q K + B

The kernels multiply in the dtype of their inputs and sum in float32. What is folded is an input, so that a bias in half
precision would keep 8 (bfloat16) or 11 (float16) bits. It is therefore folded twice, as what half precision holds of it
and as the rest, which leaves 16 or 22 bits.

Limits, by which `form_of` chooses:

    flex      one or two axes, up to 256 channels a head, 128 queries and more, float32 or half precision, Triton and a
              GPU of compute capability 8.0; not while another compiler or a function transform traces
    folded    anything. Flash kernels stop at 256 channels, the folded ones included: heads of 64 at 96 x 96 positions,
              in half precision 48 x 48. Beyond, torch takes its memory-efficient kernel
"""

import functools
import importlib.util
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from attnconv._errors import bad

Form: TypeAlias = Literal["blocks", "plain", "folded", "flex"]

MOST_CHANNELS = 256  # of a head; torch has tuned no tiles beyond
LEAST_CHANNELS = 16  # the shortest product of Triton's kernels; shorter heads are padded
LEAST_QUERIES = 128  # for fewer, torch takes a kernel for decoding, whose work is split over the keys
LEAST_CAPABILITY = (8, 0)  # the first with bfloat16
ALIGNED = 8  # channels: half-precision kernels of `scaled_dot_product_attention` take multiples of it alone
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def form_of(device: torch.device, dtype: torch.dtype, *, queries: int, axes: int, channels: tuple[int, int]) -> Form:
    """The form in which `attnconv.operators.biased.attend` computes.

    Args:
        device: Where.
        dtype: Of the values.
        queries: Their number n.
        axes: Number of biases.
        channels: Of a head's keys, and of its values.

    Returns:
        "flex" or "folded" on CUDA; elsewhere "plain" while a compiler traces, else "blocks".

    Example:
        >>> import torch
        >>> form_of(torch.device("cpu"), torch.float32, queries=196, axes=2, channels=(64, 64))
        'blocks'
    """
    tracing = torch.compiler.is_compiling()
    if device.type != "cuda":
        return "plain" if tracing else "blocks"
    if tracing or _transformed():
        return "folded"
    fits = dtype in _DTYPES and axes in (1, 2) and queries >= LEAST_QUERIES and max(channels) <= MOST_CHANNELS
    return "flex" if fits and can_compile(device) else "folded"


def can_compile(device: torch.device) -> bool:
    """Whether torch's compiler makes kernels for a CUDA device."""
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (
        LEAST_CAPABILITY
    )


def _transformed() -> bool:
    """Inside `torch.func`: FlexAttention has rules for few of its transforms."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def attend_flex(
    queries: Float[Tensor, "#b h n e"],
    keys: Float[Tensor, "#b h lattice e"],
    values: Float[Tensor, "b #h lattice f"],
    *biases: Float[Tensor, "#b h n _"],
) -> Float[Tensor, "b h n f"]:
    """softmax(Q K^T + sum_a B_a) V by FlexAttention, which reads the biases as they are.

        score[q, k] + B_1[q, k // width] + B_2[q, k % width]

    Differentiable in all tensors on CUDA, where it is compiled: once for every combination of shapes, dtypes and wanted
    gradients, which takes seconds. torch compiles 8 of them (`torch._dynamo.config.recompile_limit`), warns, and from
    then on holds all scores at once; raise the limit for images of many sizes. Gradients of the biases are summed by
    atomic additions, in an order that changes between runs. On a CPU it is not compiled, holds all scores at once and
    has no gradients: there it serves comparison.

    Args:
        queries: Scaled query vectors, (1 or b, h, n, e).
        keys: (1 or b, h, lattice, e).
        values: (b, 1 or h, lattice, f).
        biases: One or two, (1 or b, h, n, size of the axis), in float32 where the rest is in half precision.

    Returns:
        (b, h, n, f) in the dtype of the values.

    Raises:
        ValueError: There are no biases, or more than two.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 2, 4, 12, 8).unbind()
        >>> rows, columns = torch.randn(2, 4, 12, 3), torch.randn(2, 4, 12, 4)
        >>> attend_flex(q, k, v, rows, columns).shape
        torch.Size([2, 4, 12, 8])
    """
    if len(biases) not in (1, 2):
        raise ValueError(bad("biases", "must be one or two", len(biases), "Use attend_folded for more axes."))
    shape = (values.shape[0], queries.shape[1])
    # Powers of two are what the kernels' tiles hold; torch 2.6 takes no other numbers.
    left, right = (_padded(part.expand(*shape, -1, -1), _power(part.shape[-1])) for part in (queries, keys))
    wide = _padded(values.expand(*shape, -1, -1), _power(values.shape[-1]))
    flex = _compiled() if values.is_cuda else _uncompiled
    out = flex(left, right, wide, score_mod=_adding([bias.expand(shape[0], -1, -1, -1) for bias in biases]), scale=1.0)
    return out[..., : values.shape[-1]]


def _adding(biases: Sequence[Tensor]) -> Callable[..., Tensor]:
    """What FlexAttention does to a score. Each tensor is read at one place: its gradient is made only then.

    Lambdas, which import hooks that check types leave as they are: torch's compiler cannot trace their checks.
    """
    if len(biases) == 1:
        alone = biases[0]
        return lambda score, image, head, query, key: score + alone[image, head, query, key]
    row, column = biases
    width = column.shape[-1]
    return lambda score, image, head, query, key: (
        score + row[image, head, query, key // width] + column[image, head, query, key % width]
    )


def _uncompiled(*inputs: Tensor, **options: Any) -> Tensor:
    """Without torch's advice to compile, which a CPU's kernels do not follow for gradients."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return _flex_attention()(*inputs, **options)


def _flex_attention() -> Callable[..., Tensor]:
    """Imported when it is needed: it brings torch's compiler with it."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@functools.lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor]:
    """For sizes that are constants: the width of an image divides every index of a key."""
    compiled: Callable[..., Tensor] = torch.compile(_flex_attention(), dynamic=False)
    return compiled


def _power(channels: int) -> int:
    """The next power of two that the kernels take."""
    return max(LEAST_CHANNELS, 1 << (channels - 1).bit_length())


def _padded(part: Tensor, channels: int) -> Tensor:
    """Zeros behind the channels, which change no product. A copy in any case: gradients do not fit expanded strides."""
    return F.pad(part, (0, channels - part.shape[-1])).contiguous()


def attend_folded(
    queries: Float[Tensor, "#b h n e"],
    keys: Float[Tensor, "#b h lattice e"],
    values: Float[Tensor, "b #h lattice f"],
    *biases: Float[Tensor, "#b h n _"],
) -> Float[Tensor, "b h n f"]:
    """softmax(Q K^T + sum_a B_a) V by `scaled_dot_product_attention`, the biases folded in as channels.

        [Q, B_1, .., B_a] [K, one-hot of k_1, .., one-hot of k_a]^T = Q K^T + sum_a B_a[q, k_a]

    One product then adds the biases in the fused kernels that a GPU has, exactly where they have the dtype of the
    queries. Wider biases are folded as two numbers each: B rounded to the narrow dtype, and the rest rounded likewise,
    whose sum has twice the bits. On a CPU the longer products cost more than the additions that they save
    (`attnconv bench relative-bias`).

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
    batch, heads = values.shape[0], queries.shape[1]
    sizes = [bias.shape[-1] for bias in biases]
    hot = [
        torch.eye(size, dtype=keys.dtype, device=keys.device)
        .repeat_interleave(math.prod(sizes[dim + 1 :]), 0)
        .repeat(math.prod(sizes[:dim]), 1)
        for dim, size in enumerate(sizes)
    ]
    folded = [_split(bias, queries.dtype) for bias in biases]
    left = torch.cat([part.expand(batch, -1, -1, -1) for part in (queries, *(p for pair in folded for p in pair))], -1)
    twice = [part for pair, one in zip(folded, hot, strict=True) for part in [one] * len(pair)]
    right = torch.cat([part.expand(batch, heads, -1, -1) for part in (keys, *twice)], -1)
    most = -(-max(left.shape[-1], values.shape[-1]) // ALIGNED) * ALIGNED
    left, right, wide = (F.pad(part, (0, most - part.shape[-1])) for part in (left, right, values))
    out = F.scaled_dot_product_attention(left, right, wide.expand(-1, heads, -1, -1), scale=1.0)
    return out[..., : values.shape[-1]]


def _split(bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The bias as a sum of numbers of the queries' dtype: itself where it has it, else two.

    The rest alone carries the gradient: both meet the same one-hot channels, so that theirs are equal.
    """
    if torch.promote_types(bias.dtype, dtype) == dtype:
        return (bias.to(dtype),)
    high = bias.detach().to(dtype)
    return high, (bias - high.to(bias.dtype)).to(dtype)
