"""Time and memory of content-based attention with a learned relative bias.

Forward and backward pass of attention with learned row and column vectors that are multiplied by the query, including
the gradients of both tables. All contenders compute the same result from the same tensors:

    materialised    `scaled_dot_product_attention` with the n x n bias as `attn_mask`, the usual implementation
    folded          the same function with the biases as additional channels, without an n x n bias
    linear          `attention_with_relative_bias`

In bfloat16, queries, keys and values have that dtype, and the tables are in float32. Differences from `materialised`
are then mostly due to rounding of its bias. NATTEN is not comparable, as its queries only attend to windows.

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
    """Measure time, peak memory and differences for all sizes."""
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
    return Results("relative-bias", "speedup over the materialised bias", tuple(rows))


def prepare(*, batch: int, side: int, heads: int, channels: int, dtype: str, contender: str) -> Step:
    """Return a step that computes the output and all gradients; all contenders use the same tensors."""
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
    """Return queries / sqrt(e) in their dtype, and the biases in the dtype of scores."""
    scaled = q.to(score_dtype(q.dtype)) * q.shape[-1] ** -0.5
    return scaled.to(q.dtype), [axis_scores(scaled, table, dim, sizes) for dim, table in enumerate(tables)]


_FORMS: Mapping[str, Callable[..., Tensor]] = {
    "materialised": _materialised,
    "folded": _folded,
    "linear": _linear,
}
