"""What does a full covariance cost, which does not factor over the axes?

The generalised quadratic encoding, forward and backward, of heads that look nearby and of heads that look everywhere.
Contenders in the same run, with the same weights on the same images:

    rows         the formula itself: the softmax of all scores, a block of rows at a time, made again for the backward
    rank 3       the score as a product of three numbers per query and key, handed to `scaled_dot_product_attention`
    auto         the layer: all rows at once where they are few, else windows or a spectrum, head by head

The softmax of a quadratic score does not see the terms of the query alone. What is left, -1/2 k P k + k P (q + Delta),
is a product of three numbers per query and key on two axes; they grow with the square of the image, so that float32
loses digits.

    attnconv bench full-covariance
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnconv.encodings.quadratic import GeneralizedQuadratic
from attnconv.layers import SelfAttention2d
from attnconv.operators import Toeplitz
from attnconv.operators.base import all_queries
from attnconv.operators.kernels.contractions import contract_rows
from benchmarks.compare import Case, compare
from benchmarks.measure import exponent
from benchmarks.results import Answer, Row
from benchmarks.settings import FullCovarianceSettings

BASE = "rows"
CONTENDERS = (BASE, "rank 3", "auto")
BLOCK = 2**25  # probabilities of the rows that are held at a time


def answer(settings: FullCovarianceSettings) -> Answer:
    """Times, peak memory and differences over the sizes; beyond `peers_to` the layer alone."""
    rows = []
    for root in settings.roots:
        for batch, side in settings.cases:
            sizes = {"batch": batch, "side": side, "channels": settings.channels, "heads": settings.heads}
            case = Case(
                words=f"{_kind(root)}, {batch} x {settings.channels} x {side} x {side}",
                arguments={**sizes, "root": root},
                pixels=side**2,
                dense_bytes=4 * settings.heads * side**4,
                memory=side >= settings.memory_from,
            )
            names = CONTENDERS if side <= settings.peers_to else ("auto",)
            rows += compare(__name__, prepared, case, names, settings.repeats)
    return Answer("full-covariance", "times as fast as making all rows", tuple(rows), _growth(rows, settings))


def prepared(
    *, batch: int, side: int, channels: int, heads: int, root: float, contender: str
) -> Callable[[], list[Tensor]]:
    """A step that returns the output; every contender draws the same weights and images."""
    torch.manual_seed(0)
    layer = SelfAttention2d(channels, channels, heads, encoding="quadratic-generalized")
    assert isinstance(layer.encoding, GeneralizedQuadratic)
    with torch.no_grad():
        layer.encoding.root_precision.mul_(root)
    images = torch.randn(batch, side, side, channels).movedim(-1, 1).requires_grad_()
    gradient = torch.randn(batch, side, side, channels).movedim(-1, 1)

    def step() -> list[Tensor]:
        layer.zero_grad()
        images.grad = None
        out: Tensor = _FORMS[contender](layer, images)
        out.backward(gradient)
        return [out.detach()]

    return step


def _own(layer: SelfAttention2d, images: Tensor) -> Tensor:
    out: Tensor = layer(images)
    return out


def _by_rows(layer: SelfAttention2d, images: Tensor) -> Tensor:
    operator, pixels = layer.operator(images), images.movedim(1, -1)
    assert isinstance(operator, Toeplitz)
    assert layer.weight is not None
    weight = layer.weight

    def block(queries: Tensor) -> Tensor:
        return contract_rows(operator.rows(queries), pixels.flatten(1, -2), weight, 1)

    grid = operator.grid
    parts = all_queries(grid, images.device).split(max(BLOCK // (layer.heads * grid.lattice_count), 1))
    out = torch.cat([checkpoint(block, part, use_reentrant=False) for part in parts], 1)
    return _finished(layer, out.unflatten(1, grid.query_sizes))


def _by_rank(layer: SelfAttention2d, images: Tensor) -> Tensor:
    assert isinstance(layer.encoding, GeneralizedQuadratic)
    assert layer.weight is not None
    pixels = images.movedim(1, -1)
    sizes = pixels.shape[1:-1]
    middle = torch.tensor([(size - 1) / 2 for size in sizes])  # numbers around 0 lose fewer digits
    places = torch.cartesian_prod(*(torch.arange(size) for size in sizes)) - middle  # (n, 2)
    precision = layer.encoding.precision  # (h, 2, 2)
    turned = places @ precision  # (h, n, 2)
    last = -0.5 * (turned * places).sum(-1, keepdim=True)
    queries = (places + layer.encoding.centres[:, None]) @ precision
    left = torch.cat([queries, torch.ones_like(last)], -1)[None].expand(len(images), -1, -1, -1)
    right = torch.cat([places.expand(layer.heads, -1, -1), last], -1)[None].expand(len(images), -1, -1, -1)
    values = pixels.flatten(1, 2)[:, None].expand(-1, layer.heads, -1, -1)
    left, right = (F.pad(part, (0, values.shape[-1] - 3)) for part in (left, right))
    mixed = F.scaled_dot_product_attention(left, right, values, scale=1.0)  # (b, h, n, c)
    out = mixed.transpose(1, 2).flatten(2) @ layer.weight.flatten(0, 1)
    return _finished(layer, out.unflatten(1, sizes))


def _finished(layer: SelfAttention2d, out: Tensor) -> Tensor:
    assert layer.bias is not None
    return (out + layer.bias).movedim(-1, 1)


_FORMS: dict[str, Callable[[SelfAttention2d, Tensor], Tensor]] = {BASE: _by_rows, "rank 3": _by_rank, "auto": _own}


def _growth(rows: list[Row], settings: FullCovarianceSettings) -> dict[str, float]:
    """How the layer's time per image grows with its pixels."""
    facts: dict[str, float] = {}
    for root in settings.roots:
        own: list[Any] = [
            (float(side**2), row.seconds.median / batch)
            for batch, side in settings.cases
            for row in rows
            if row.contender == "auto"
            and row.case.endswith(f"{side} x {side}")
            and row.case.startswith(f"{_kind(root)},")
        ]
        facts[f"auto, {_kind(root)}: time per image grows as pixels to the power of"] = exponent(
            *zip(*own, strict=True)
        )
    return facts


def _kind(root: float) -> str:
    return f"precision {root**2:g}"
