"""Store one attention layer for the page, in the most compact of three forms that can represent it.

    positions   score(q, k) = table[k - q]                                        one table of shifts per head, or
                              -1/2 (k - q - c)^T P (k - q - c)                    a centre and a matrix per head
    content     score(q, k) = query_q . key_k + row_scores[q, k_row] + column_scores[q, k_column]
    rows        the probabilities of all or some queries                          any other attention

Adding a constant to a row of scores does not change its softmax. The largest entry is therefore subtracted from each
table, and per query from row and column scores; the mean key is subtracted before keys are truncated.
"""

from typing import Literal

import torch
from jaxtyping import Float, Float16, Float64, Int
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv.encodings.base import Encoding
from attnconv.explorer.payload_format import PayloadLayer
from attnconv.grid import Axis, Grid
from attnconv.inspect.chosen_queries import query_blocks, sample_queries
from attnconv.inspect.token_operator import TokenOperator
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators.base import AttentionOperator
from attnconv.operators.content import Content
from attnconv.operators.kernels.contractions import below_largest

SAMPLE = 256  # queries on which the rounding of scores is measured
COARSEST = 0.01  # largest score error of truncated vectors, which changes a probability by at most 2 %
LOWEST = -60000.0  # the minimum of float16 is -65504; a score this far below the largest has probability 0


@torch.no_grad()
def store_layer(name: str, module: nn.Module, operator: AttentionOperator, *, budget: int) -> PayloadLayer:
    """Store one layer, without an axis for snapshots, in at most `budget` bytes per image (but at least one row).

    Two statistics describe the stored data. `rounding of scores`, r, is half the range of a row's score errors, for
    some queries; probabilities change by at most a factor of exp(2 r). `queries stored` is the number of rows.
    """
    own = module if isinstance(module, SelfAttention) else None
    tokens = operator if isinstance(operator, TokenOperator) else None
    window = None if tokens is None else tokens.window
    if operator.grid.dims > 2:
        got, fix = f"{operator.grid.dims} axes", "Pass the names of other layers as `layers`."
        raise ValueError(bad("model", f"layer {name!r} must have one or two axes", got, fix))
    height, width = (1, *operator.grid.sizes)[-2:]
    plain = (
        own is not None
        and own.dims == 2
        and all(  # every token is a query, and the keys are these tokens only
            (axis.queries, axis.stride, axis.offset, axis.spacing, axis.border) == (axis.size, 1, 0, 1, "renormalise")
            for axis in operator.grid.axes
        )
    )
    content = content_tensors(operator, budget) if plain and isinstance(operator, Content) else None
    kind: Literal["positions", "content", "rows"]
    stored: dict[str, float | None] = {}
    border = "none"
    if own is not None and plain and not own.encoding.reads_content:
        kind, tensors = "positions", position_tensors(own.encoding, (height, width))
    elif content is not None:
        kind, (tensors, stored["rounding of scores"]) = "content", content
    else:
        kind, tensors = "rows", row_tensors(name, operator, budget)
        stored["queries stored"] = float(len(tensors["queries"]))
        rule = operator.grid.axes[0].border if own is not None else "renormalise"
        border = {"renormalise": "none", "zero": "zeros"}.get(rule, rule)
    return PayloadLayer(
        name=name,
        kind=kind,
        heads=operator.heads,
        sizes=(height, width),
        prefix=0 if tokens is None else tokens.prefix,
        border=border,
        encoding=type(module if own is None else own.encoding).__name__,
        statistics={"heads": {}, "layer": stored},
        window=None if window is None else (window[-2] if len(window) > 1 else 1, window[-1]),
        tensors=tensors,
    )


def position_tensors(encoding: Encoding, sizes: tuple[int, int]) -> dict[str, Tensor]:
    """Return the centres and precision matrices of Gaussian heads; for others, compute the scores of all shifts."""
    if (heads := encoding.gaussians()) is not None:
        return gaussian_tensors(heads.centres, heads.precision)
    # A query in the middle of (2 height - 1) x (2 width - 1) tokens has every shift once.
    axes = tuple(Axis(size=2 * size - 1, queries=1, offset=size - 1) for size in sizes)
    some = next(encoding.parameters())
    pixels = some.new_zeros((1, *(axis.size for axis in axes), 1), dtype=torch.float64)
    (scores,) = encoding.terms(Grid(axes), pixels).values()
    table = below_largest(scores[0, :, 0]).unflatten(-1, tuple(axis.size for axis in axes))
    return {"shift_scores": table.float().cpu().contiguous()}


def gaussian_tensors(centres: Float[Tensor, "h 2"], precision: Float64[Tensor, "h 2 2"]) -> dict[str, Tensor]:
    """Return the tensors of Gaussian heads."""
    found = {"centres": centres, "precision": precision}
    return {key: tensor.detach().float().cpu().contiguous() for key, tensor in found.items()}


def content_tensors(operator: Content, budget: int) -> tuple[dict[str, Tensor], float] | None:
    """Return queries, keys and position scores in float16, and the largest error of the scores.

    Queries and keys are truncated to fit the budget, in bytes. Return None, so that exact rows are stored instead, if
    no channel fits, if the scores of truncated vectors would have errors above `COARSEST`, or if float16 overflows.
    """
    count = operator.grid.key_count
    queries, keys = (
        part.float().expand(operator.batch, operator.heads, -1, -1) for part in (operator.queries, operator.keys)
    )
    biases = [below_largest(bias.float()).clamp_min(LOWEST) for bias in operator.biases]
    channels = (budget // (2 * operator.heads * count) - sum(bias.shape[-1] for bias in biases)) // 2
    shortened = queries.shape[-1] > channels
    if shortened and channels < 1:
        return None
    left, right = shorten(queries, keys, channels) if shortened else balance(queries, keys)
    found = {"query": left.half(), "key": right.half()}
    some = sample_queries(operator.grid, SAMPLE, device=queries.device)
    off = found["query"][:, :, some].float() @ found["key"].float().mT - queries[:, :, some] @ keys.mT
    span = off.amax(-1) - off.amin(-1)
    for name, bias in zip(("row_scores", "column_scores"), biases, strict=False):
        found[name] = bias.expand(operator.batch, -1, -1, -1).half()
        off = (found[name].float() - bias)[:, :, some]
        span = span + off.amax(-1) - off.amin(-1)
    rounding = float(span.max() / 2)
    if (shortened and not rounding <= COARSEST) or not all(bool(tensor.isfinite().all()) for tensor in found.values()):
        return None
    return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}, rounding


def balance(
    queries: Float[Tensor, "b h n e"], keys: Float[Tensor, "b h n e"]
) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "b h n e"]]:
    """Rescale queries and keys to similar magnitudes without changing their products, by an exact power of two."""
    if queries.shape[-1] == 0:
        return queries, keys
    ratio = keys.abs().amax((-1, -2), keepdim=True) / queries.abs().amax((-1, -2), keepdim=True)
    usable = torch.isfinite(ratio) & (ratio > 0)
    factor = torch.exp2(torch.log2(ratio.where(usable, 1.0)).div(2).round())
    return queries * factor, keys / factor


def shorten(
    queries: Float[Tensor, "b h n e"], keys: Float[Tensor, "b h n e"], channels: int
) -> tuple[Float[Tensor, "b h n f"], Float[Tensor, "b h n f"]]:
    """Reduce the number of channels such that the products Q K^T change least, up to a constant per query.

    With the QR decompositions Q = Q1 R1 and K = Q2 R2, and the SVD R1 R2^T = U S V^T, the products are Q1 U S (Q2 V)^T.
    The terms with the `channels` largest singular values are their best approximation of this rank.
    """
    left, up = torch.linalg.qr(queries.double())
    right, down = torch.linalg.qr((keys - keys.mean(2, keepdim=True)).double())
    u, values, vh = torch.linalg.svd(up @ down.mT)
    root = values[..., None, :channels].sqrt()
    return (left @ u[..., :channels] * root).float(), (right @ vh.mT[..., :channels] * root).float()


def row_tensors(name: str, operator: AttentionOperator, budget: int) -> dict[str, Tensor]:
    """Return rows over the image's tokens, normalised to 1, and the mass elsewhere, for as many queries as fit.

    The rows of class tokens and registers come first in the budget.
    """
    grid, heads = operator.grid, operator.heads
    bytes_of_row = 2 * heads * (grid.key_count + 1)  # float16 values
    found = {}
    if isinstance(operator, TokenOperator) and operator.prefix > 0:
        before = operator.prefix_rows(torch.arange(operator.prefix, device=operator.device))
        found["class_rows"], found["class_mass"] = _normalised(before)
        budget -= operator.prefix * bytes_of_row
    # Each query needs a row and an int32 index.
    queries = sample_queries(grid, max(1, budget // (bytes_of_row + 4)), seed=None, device=operator.device)
    rows, elsewhere = [], []
    for some in query_blocks(operator, queries):
        rows.append(_normalised(operator.rows(some))[0])
        elsewhere.append(operator.padding_mass(some).half().cpu())
    return {
        "queries": _tokens(name, grid, queries.cpu()).to(torch.int32),
        "probabilities": torch.cat(rows, 2),
        "prefix_mass": torch.cat(elsewhere, 2),
        **found,
    }


def _normalised(rows: Float[Tensor, "b h r m"]) -> tuple[Float16[Tensor, "b h r m"], Float16[Tensor, "b h r"]]:
    """Return rows with sum 1, and the missing mass of the given rows; a row without mass stays zero."""
    total = rows.float().sum(-1, keepdim=True)
    normalised = (rows.float() / total.where(total > 0, 1)).half().cpu()
    return normalised, (1 - total[..., 0]).clamp(0, 1).half().cpu()


def _tokens(name: str, grid: Grid, queries: Int[Tensor, "m"]) -> Int[Tensor, "m"]:
    flat = torch.zeros_like(queries)
    for axis, index in zip(grid.axes, grid.unravel(queries), strict=True):
        place = axis.query_positions(index.device)[index]
        if axis.spacing > 1 or bool((place < 0).any() or (place >= axis.size).any()):
            got = f"queries from position {axis.offset} on {axis.size} tokens with spacing {axis.spacing}"
            fix = "Pass the names of other layers as `layers`."
            raise ValueError(bad("model", f"queries of layer {name!r} must be at positions of tokens", got, fix))
        flat = flat * axis.size + place
    return flat
