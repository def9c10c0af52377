"""Attention with axis biases in the fused kernels of a GPU: two forms, neither with an n x n array.

    flex      FlexAttention adds B_a[q, k_a] to each score inside the kernel, from float32 tensors: no digit is lost
    folded    `scaled_dot_product_attention` of longer vectors: Q' = [Q, B], K' = [K, one-hot of k_a], Q' K' = Q K + B

The kernels multiply in the dtype of their inputs and sum in float32. What is folded is an input, so that a bias in half
precision would keep 8 (bfloat16) or 11 (float16) bits. It is therefore folded twice, as what half precision holds of it
and as the rest, which leaves 16 or 22 bits.

Limits, by which `form_of` chooses:

    flex      one or two axes, up to 256 channels a head, 128 queries and more, float32 or half precision, Triton and a
              GPU of compute capability 8.0; not while another compiler traces. What it cannot compile, and shapes
              beyond those that torch compiles, are folded
    folded    anything. Flash kernels stop at 256 channels, the folded ones included: heads of 64 at 96 x 96 positions,
              in half precision 48 x 48. Beyond, torch takes its memory-efficient kernel
    plain     all scores at once, for function transforms and second derivatives: the kernels have neither
"""

import functools
import importlib.util
import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, TypeAlias, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.operators.base import score_dtype
from attnconv.operators.kernels.autograd import is_transformed, twice_differentiable
from attnconv.operators.kernels.contractions import attend_plainly

Form: TypeAlias = Literal["blocks", "plain", "folded", "flex"]

MOST_CHANNELS = 256  # of a head; torch has tuned no tiles beyond
LEAST_CHANNELS = 16  # the shortest product of Triton's kernels; shorter heads are padded
LEAST_QUERIES = 128  # for fewer, torch takes a kernel for decoding, whose work is split over the keys
LEAST_CAPABILITY = (8, 0)  # the first with bfloat16
ALIGNED = 8  # channels: half-precision kernels of `scaled_dot_product_attention` take multiples of it alone
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def form_of(device: torch.device, dtype: torch.dtype, *, queries: int, axes: int, channels: tuple[int, int]) -> Form:
    """The form in which `attnconv.operators.kernels.relative_bias.attend` computes.

    Args:
        device: Where.
        dtype: Of the values.
        queries: Their number n.
        axes: Number of biases.
        channels: Of a head's keys, and of its values.

    Returns:
        On CUDA "flex" or "folded", "plain" inside `torch.func`; elsewhere "plain" while a compiler traces, else
        "blocks".

    Example:
        >>> import torch
        >>> form_of(torch.device("cpu"), torch.float32, queries=196, axes=2, channels=(64, 64))
        'blocks'
    """
    tracing = torch.compiler.is_compiling()
    if device.type != "cuda":
        return "plain" if tracing else "blocks"
    if tracing:
        return "folded"
    if is_transformed():
        return "plain"
    fits = dtype in _DTYPES and axes in (1, 2) and queries >= LEAST_QUERIES and max(channels) <= MOST_CHANNELS
    return "flex" if fits and can_compile(device) else "folded"


def can_compile(device: torch.device) -> bool:
    """Whether torch's compiler makes kernels for a CUDA device."""
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (
        LEAST_CAPABILITY
    )


def attend_flex(
    queries: Float[Tensor, "#b h n e"],
    keys: Float[Tensor, "#b h lattice e"],
    values: Float[Tensor, "b #h lattice f"],
    *biases: Float[Tensor, "#b h n _"],
) -> Float[Tensor, "b h n f"]:
    """softmax(Q K^T + sum_a B_a) V by FlexAttention, which reads the biases as they are.

        score[q, k] + B_1[q, k // width] + B_2[q, k % width]

    Differentiable in all tensors on CUDA, where it is compiled: once for every combination of shapes, dtypes and wanted
    gradients, which takes seconds. torch compiles 8 of them (`torch._dynamo.config.recompile_limit`) and would hold all
    scores at once from then on: further ones are folded, as are those that it fails to compile, both with a warning.
    Gradients of the biases are summed by atomic additions, in an order that changes between runs. Second derivatives
    hold all scores at once. On a CPU it is not compiled, holds all scores at once and has no gradients: there it serves
    comparison.

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
    return _flex_twice(queries, keys, values, *biases)


def _flex_or_folded(queries: Tensor, keys: Tensor, values: Tensor, *biases: Tensor) -> Tensor:
    """FlexAttention, or the folded form where torch has no kernel of it."""
    inputs = (queries, keys, values, *biases)
    if not values.is_cuda:
        return _flex(_uncompiled, *inputs)
    if _KERNELS.has_room(inputs):
        try:
            return _flex(_compiled(), *inputs)
        except Exception as error:
            if not _given_up(error, inputs):
                raise
    return _folded(*inputs)


def _flex(kernel: Callable[..., Tensor], queries: Tensor, keys: Tensor, values: Tensor, *biases: Tensor) -> Tensor:
    shape = (values.shape[0], queries.shape[1])
    # Powers of two are what the kernels' tiles hold; torch 2.6 takes no other numbers.
    left, right = (_padded(part.expand(*shape, -1, -1), _power(part.shape[-1])) for part in (queries, keys))
    wide = _padded(values.expand(*shape, -1, -1), _power(values.shape[-1]))
    adding = _adding([bias.expand(shape[0], -1, -1, -1) for bias in biases])
    return kernel(left, right, wide, score_mod=adding, scale=1.0)[..., : values.shape[-1]]


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
    flex = _flex_attention()
    # A function of our own: torch counts per function what it compiled, and others compile `flex_attention` as well.
    own = lambda *inputs, **options: flex(*inputs, **options)  # noqa: E731, PLW0108 - see `_adding`
    compiled: Callable[..., Tensor] = torch.compile(own, dynamic=False)
    return compiled


@final
class _Kernels:
    """What torch was asked to compile, by all that makes it compile anew, and what it failed at."""

    def __init__(self) -> None:
        self.asked: set[Hashable] = set()
        self.failed: set[Hashable] = set()

    def has_room(self, inputs: Sequence[Tensor]) -> bool:
        """Whether a kernel for such inputs is there, or may be compiled. Counts it."""
        kind = self._kind(inputs)
        if kind in self.failed:
            return False
        if kind not in self.asked:
            most = _recompile_limit()
            if len(self.asked) >= most:
                _say_once(f"torch compiles FlexAttention for {most} shapes (torch._dynamo.config.recompile_limit)")
                return False
            self.asked.add(kind)
        return True

    def fails_at(self, inputs: Sequence[Tensor]) -> None:
        """From now on these are not asked for."""
        self.failed.add(self._kind(inputs))

    def forget(self) -> None:
        """After `torch.compiler.reset`."""
        self.asked.clear()
        self.failed.clear()

    @staticmethod
    def _kind(inputs: Sequence[Tensor]) -> Hashable:
        return tuple((one.shape, one.stride(), one.dtype, one.requires_grad, one.device) for one in inputs)


_KERNELS = _Kernels()


def forget_kernels() -> None:
    """Let torch compile as many shapes anew: it forgets all that it compiled, whoever asked for it."""
    torch.compiler.reset()
    _KERNELS.forget()


def _recompile_limit() -> int:
    config = importlib.import_module("torch._dynamo.config")
    # torch 2.6 has the older name, which later ones keep as a second one.
    return int(config.cache_size_limit)


def _given_up(error: Exception, inputs: Sequence[Tensor]) -> bool:
    """Whether an error is the compiler's: no kernel, or none that fits into the GPU's shared memory."""
    kinds = [kind.__module__ for kind in type(error).__mro__]
    compilers = any(name.startswith(("torch._dynamo", "torch._inductor", "triton")) for name in kinds)
    if not (compilers or str(error).startswith("No valid triton configs")):
        return False  # too little memory, say, or inputs that do not fit
    _KERNELS.fails_at(inputs)
    _say_once(f"FlexAttention does not compile ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})")
    return True


@functools.lru_cache
def _say_once(reason: str) -> None:
    warnings.warn(f"{reason}; the biases are folded into scaled_dot_product_attention instead.", stacklevel=2)


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
    (`python -m benchmarks relative-bias`). Second derivatives hold all scores at once.

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


def _exactly(queries: Tensor, keys: Tensor, values: Tensor, *biases: Tensor) -> Tensor:
    """All scores at once, at least in float32: the form that can be differentiated any number of times."""
    exact = (part.to(score_dtype(values.dtype)) for part in (queries, keys, values, *biases))
    return attend_plainly(*exact).to(values.dtype)


_folded_twice = twice_differentiable(_exactly, _folded)
_flex_twice = twice_differentiable(_exactly, _flex_or_folded, _given_up)
