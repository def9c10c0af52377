"""Time and memory of attention with a full covariance, which is not separable over axes.

Forward and backward pass of the generalised quadratic encoding with local and wide heads. Contenders have the same
weights and images:

    rows         softmax of all scores, one block of rows at a time, recomputed in the backward pass
    rank 3       scores as dot products of 3 channels, passed to `scaled_dot_product_attention`
    auto         the layer, which uses all rows at once for small images, otherwise windows or a spectrum for each head

Terms of a quadratic score that depend only on the query do not change its softmax. On two axes, the remaining terms
-1/2 k P k + k P (q + Delta) are a dot product of 3 channels. They grow with the square of the image size, so float32
loses precision.

    python -m benchmarks full-covariance
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnconv.encodings.quadratic import GeneralizedQuadratic
from attnconv.layers import SelfAttention2d
from attnconv.operators import Toeplitz
from attnconv.operators.base import all_queries
from attnconv.operators.kernels.contractions import contract_rows
from benchmarks.compare import Step, compare
from benchmarks.measure import exponent
from benchmarks.results import Results, Row

CONTENDERS = ("rows", "rank 3", "auto")
BLOCK = 2**25  # maximum number of probabilities in memory at a time
QUICK = {"cases": ((2, 6), (2, 8)), "roots": (1.0,), "channels": 8, "heads": 3, "repeats": 2}


def run(
    *,
    cases: tuple[tuple[int, int], ...] = (
        (32, 16),
        (8, 32),
        (2, 48),
        (1, 64),
        (1, 128),
        (1, 256),
    ),  # batch and side of the images
    roots: tuple[float, ...] = (1.0, 0.1),  # factors on `root_precision`, for local and wide heads
    channels: int = 64,
    heads: int = 9,
    repeats: int = 5,
) -> Results:
    """Measure time, peak memory and differences for all sizes, and the exponent of time per image over positions."""
    rows: list[Row] = []
    facts = {}
    for root in roots:
        kind, seconds = f"precision {root**2:g}", []
        for batch, side in cases:
            rows += compare(
                prepare,
                {"batch": batch, "side": side, "channels": channels, "heads": heads, "root": root},
                CONTENDERS if side <= 64 else CONTENDERS[-1:],
                case=f"{kind}, {batch} x {channels} x {side} x {side}",
                repeats=repeats,
                memory=side > 8,
                dense_bytes=4 * heads * side**4,
            )
            seconds.append(rows[-1].median / batch)
        power = exponent([side**2 for _, side in cases], seconds)
        facts[f"auto, {kind}, exponent of time per image over positions"] = power
    return Results("full-covariance", "speedup over computing all rows", tuple(rows), facts)


def prepare(*, batch: int, side: int, channels: int, heads: int, root: float, contender: str) -> Step:
    """Return a step that computes the output; all contenders use the same weights and images."""
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
    middle = torch.tensor([(size - 1) / 2 for size in sizes])  # coordinates centred on 0 lose less precision
    places = torch.cartesian_prod(*(torch.arange(size) for size in sizes)) - middle  # (n, 2)
    precision = layer.encoding.root_precision @ layer.encoding.root_precision.mT  # (h, 2, 2)
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


_FORMS: dict[str, Callable[[SelfAttention2d, Tensor], Tensor]] = {"rows": _by_rows, "rank 3": _by_rank, "auto": _own}
