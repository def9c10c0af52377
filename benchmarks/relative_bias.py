"""What does a learned relative bias cost beside content?

Attention with a table of rows and a table of columns that are multiplied with the query, forward and backward,
gradients of both tables included. All contenders compute the same from the same tensors:

    materialised    `scaled_dot_product_attention` with the n x n bias as its mask, as is usual
    folded          the same function, the biases folded in as more channels: no n x n bias
    linear          `attention_with_relative_bias`, whichever form it uses

In bfloat16 queries, keys and values have that dtype and the tables stay float32. The difference from the materialised
form is then mostly the rounding of its own bias. NATTEN is no contender: its queries see windows, not all keys.

    python -m benchmarks relative-bias
    python -m benchmarks relative-bias --device cuda
"""

import itertools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from attnconv.operators.base import score_dtype
from attnconv.operators.content import attend_folded, attention_with_relative_bias, axis_scores
from attnconv.operators.kernels.contractions import axis_sum
from benchmarks.compare import Step, compare
from benchmarks.results import Results, Row

QUICK = {"cases": ((1, 6), (2, 8)), "heads": 2, "channels": 8, "dtypes": ("float32",), "repeats": 2}


def run(
    *,
    cases: tuple[tuple[int, int], ...] = ((16, 14), (4, 24), (4, 32), (2, 48), (1, 64)),  # batch and side of the images
    heads: int = 4,
    channels: int = 32,
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    repeats: int = 7,
) -> Results:
    """Times, peak memory and differences over the sizes."""
    rows: list[Row] = []
    for dtype, (batch, side) in itertools.product(dtypes, cases):
        rows += compare(
            prepare,
            {"batch": batch, "side": side, "heads": heads, "channels": channels, "dtype": dtype},
            tuple(_FORMS),
            case=f"{dtype}, {batch} x {heads} heads of {channels}, {side} x {side}",
            repeats=repeats,
            memory=side > 8,
        )
    return Results("relative-bias", "times as fast as with the bias materialised", tuple(rows))


def prepare(*, batch: int, side: int, heads: int, channels: int, dtype: str, contender: str) -> Step:
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


def _linear(q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor], sizes: tuple[int, int]) -> Tensor:
    return attention_with_relative_bias(q, k, v, tables[0], tables[1], sizes=sizes)


def _scaled(q: Tensor, tables: list[Tensor], sizes: tuple[int, int]) -> tuple[Tensor, list[Tensor]]:
    """Queries / sqrt(e) in their own dtype, and the biases in the scores'."""
    scaled = q.to(score_dtype(q.dtype)) * q.shape[-1] ** -0.5
    return scaled.to(q.dtype), [axis_scores(scaled, table, dim, sizes) for dim, table in enumerate(tables)]


_FORMS: Mapping[str, Callable[..., Tensor]] = {
    "materialised": _materialised,
    "folded": _folded,
    "linear": _linear,
}
