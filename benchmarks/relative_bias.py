"""What does a learned relative bias cost beside content?

Attention with a row table and a column table that meet the query, forward and backward, gradients of both tables
included. All contenders compute the same from the same tensors:

    materialised    `scaled_dot_product_attention` with the n x n bias built and handed over, as is usual
    folded          the same function, the biases folded in as more channels: no n x n bias
    flex            FlexAttention, the biases added inside its kernel; where `attention_with_relative_bias` may take it
    linear          `attention_with_relative_bias`, whichever form it takes

In bfloat16 queries, keys and values have that dtype and the tables stay float32. What differs from the materialised
form is then mostly the rounding of its own bias. NATTEN is no contender: its queries
see windows, not all keys.

    attnconv bench relative-bias
    attnconv bench relative-bias --device cuda --relative-bias.dtypes float32 bfloat16
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from attnconv.operators.base import score_dtype
from attnconv.operators.kernels.contractions import axis_sum
from attnconv.operators.kernels.fused_relative_bias import attend_flex, attend_folded, forget_kernels, form_of
from attnconv.operators.kernels.relative_bias import attention_with_relative_bias, axis_scores
from benchmarks.compare import Case, compare
from benchmarks.measure import device_here
from benchmarks.results import Answer
from benchmarks.settings import DtypeName, RelativeBiasSettings

BASE = "materialised"


def answer(settings: RelativeBiasSettings) -> Answer:
    """Times, peak memory and differences over the sizes."""
    rows = []
    for dtype in settings.dtypes:
        for batch, side in settings.cases:
            words = f"{dtype}, {batch} x {settings.heads} heads of {settings.channels}, {side} x {side}"
            sizes = {"batch": batch, "side": side, "heads": settings.heads, "channels": settings.channels}
            names = contenders(side, settings.channels, dtype)
            case = Case(words, {**sizes, "dtype": dtype}, side**2, memory=side >= settings.memory_from)
            rows += compare(__name__, prepared, case, names, settings.repeats)
            if "flex" in names:
                forget_kernels()  # a few sizes are compiled, and all others folded
    return Answer("relative-bias", "times as fast as with the bias materialised", tuple(rows))


def contenders(side: int, channels: int, dtype: DtypeName) -> tuple[str, ...]:
    """Who runs a case. Not FlexAttention on a CPU: it has no gradients there, and uncompiled it holds all scores."""
    device, narrow = device_here(), getattr(torch, dtype)
    form = form_of(device, narrow, queries=side**2, axes=2, channels=(channels, channels))
    return (BASE, "folded", *(["flex"] if form == "flex" else []), "linear")


def prepared(
    *, batch: int, side: int, heads: int, channels: int, dtype: DtypeName, contender: str
) -> Callable[[], list[Tensor]]:
    """A step that returns the output and the gradients of all five inputs; every contender draws the same tensors."""
    torch.manual_seed(0)
    shape = (batch, heads, side * side, channels)
    q, k, v = (torch.randn(shape).to(getattr(torch, dtype)).requires_grad_() for _ in range(3))
    tables = [torch.randn(2 * side - 1, channels, requires_grad=True) for _ in range(2)]
    weights, inputs = torch.randn_like(v), [q, k, v, *tables]

    def step() -> list[Tensor]:
        out = _FORMS[contender](q, k, v, tables, (side, side))
        return [out.detach(), *torch.autograd.grad(out, inputs, weights)]

    return step


def _materialised(q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor], sizes: tuple[int, int]) -> Tensor:
    _, biases = _scaled(q, tables, sizes)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=axis_sum(biases).to(q.dtype))


def _folded(q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor], sizes: tuple[int, int]) -> Tensor:
    scaled, biases = _scaled(q, tables, sizes)
    return attend_folded(scaled, k, v, *biases)


def _flex(q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor], sizes: tuple[int, int]) -> Tensor:
    scaled, biases = _scaled(q, tables, sizes)
    return attend_flex(scaled, k, v, *biases)


def _linear(q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor], sizes: tuple[int, int]) -> Tensor:
    return attention_with_relative_bias(q, k, v, tables[0], tables[1], sizes=sizes)


def _scaled(q: Tensor, tables: list[Tensor], sizes: tuple[int, int]) -> tuple[Tensor, list[Tensor]]:
    """Queries / sqrt(e) in their own dtype, and the biases in the scores'."""
    scaled = q.to(score_dtype(q.dtype)) * q.shape[-1] ** -0.5
    return scaled.to(q.dtype), [axis_scores(scaled, table, dim, sizes) for dim, table in enumerate(tables)]


_FORMS: Mapping[str, Callable[..., Tensor]] = {
    BASE: _materialised,
    "folded": _folded,
    "flex": _flex,
    "linear": _linear,
}
