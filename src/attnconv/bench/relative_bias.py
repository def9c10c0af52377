"""What does a learned relative bias cost beside content?

Attention with a row table and a column table that meet the query, forward and backward, gradients of both tables
included. All contenders compute the same from the same tensors:

    materialised    `scaled_dot_product_attention` with the n x n bias built and handed over, as is usual
    folded          the same function, the biases folded in as more channels: no n x n bias
    linear          `attention_with_relative_bias`

    attnconv bench relative-bias
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from attnconv.bench.answer import Answer
from attnconv.bench.contenders import Case, compare
from attnconv.bench.settings import RelativeBiasSettings
from attnconv.operators.biased import attention_with_relative_bias, axis_scores
from attnconv.operators.fused import attend_folded
from attnconv.operators.products import axis_sum

BASE = "materialised"
CONTENDERS = (BASE, "folded", "linear")


def answer(settings: RelativeBiasSettings) -> Answer:
    """Times, peak memory and differences over the sizes."""
    rows = []
    for batch, side in settings.cases:
        words = f"{batch} x {settings.heads} heads of {settings.channels}, {side} x {side}"
        sizes = {"batch": batch, "side": side, "heads": settings.heads, "channels": settings.channels}
        rows += compare(__name__, prepared, Case(words, sizes, side**2), CONTENDERS, settings.repeats)
    return Answer("relative-bias", "times as fast as with the bias materialised", tuple(rows))


def prepared(*, batch: int, side: int, heads: int, channels: int, contender: str) -> Callable[[], list[Tensor]]:
    """A step that returns the output and the gradients of all five inputs; every contender draws the same tensors."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, side * side, channels, requires_grad=True) for _ in range(3))
    tables = [torch.randn(2 * side - 1, channels, requires_grad=True) for _ in range(2)]
    weights, inputs = torch.randn_like(v), [q, k, v, *tables]

    def step() -> list[Tensor]:
        out = _FORMS[contender](q, k, v, tables, (side, side))
        return [out.detach(), *torch.autograd.grad(out, inputs, weights)]

    return step


def _materialised(q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor], sizes: tuple[int, int]) -> Tensor:
    scaled = q * q.shape[-1] ** -0.5
    bias = axis_sum([axis_scores(scaled, table, dim, sizes) for dim, table in enumerate(tables)])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _folded(q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor], sizes: tuple[int, int]) -> Tensor:
    scaled = q * q.shape[-1] ** -0.5
    return attend_folded(scaled, k, v, *(axis_scores(scaled, table, dim, sizes) for dim, table in enumerate(tables)))


def _linear(q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor], sizes: tuple[int, int]) -> Tensor:
    return attention_with_relative_bias(q, k, v, tables[0], tables[1], sizes=sizes)


_FORMS: Mapping[str, Callable[..., Tensor]] = {BASE: _materialised, "folded": _folded, "linear": _linear}
