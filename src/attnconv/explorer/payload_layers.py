"""What the page needs of one attention layer, as few numbers as say it exactly: see `docs/explorer.md` for the format.

    positions   score(q, k) = table[k - q]                                        one table of shifts per head
    content     score(q, k) = query_q . key_k + row_scores[q, k_row] + column_scores[q, k_column]
    rows        probabilities themselves, of all queries or of some               attention of any other kind

A softmax sees no constant that a whole row shares. Tables are therefore stored less their largest entry, row and column
scores less their largest entry per query, and keys that were compressed less their mean.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv.encodings.base import Encoding
from attnconv.grid import Axis, Grid
from attnconv.inspect.query_sampling import lattice_queries, sample_queries
from attnconv.inspect.token_operator import TokenOperator
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators.base import AttentionOperator
from attnconv.operators.content import Content

SAMPLE = 256  # queries on which rounding is looked at
ROWS_AT_ONCE = 2**24  # probabilities
COARSEST = 0.01  # rounding of scores that shorter queries and keys may cost: probabilities are then right to 2 %
LOWEST = -60000.0  # float16 ends at -65504; a score this far below the largest has the probability 0


@final
@dataclass(frozen=True, eq=False)
class LayerTensors:
    """One layer's part of a payload.

    Attributes:
        kind: `positions`, `content` or `rows`.
        heads: Number of heads.
        sizes: Height and width of the grid of tokens.
        prefix: Number of tokens before the image's.
        border: `none` where keys are the image's tokens and nothing else; otherwise the layer's border rule.
        encoding: Class of the encoding, or of the module where it is another library's.
        tensors: By their names without the layer's number; those of positions without the axis of time.
        rounding: How far any two stored scores of a row may be from the exact ones, as half the range of the difference
            on some queries; None where scores are exact or not stored. A probability is off by the factor
            exp(2 rounding) at most.
        window: Height and width of the windows that attention stays inside, in tokens; None where there are none.
    """

    kind: str
    heads: int
    sizes: tuple[int, int]
    prefix: int
    border: str
    encoding: str
    tensors: Mapping[str, Tensor]
    rounding: float | None = None
    window: tuple[int, int] | None = None


@torch.no_grad()
def layer_tensors(name: str, module: nn.Module, operator: AttentionOperator, *, budget: int) -> LayerTensors:
    """The numbers of one layer on the images that its operator holds.

    Args:
        name: Of the layer, for messages.
        module: The layer.
        operator: Its attention, as `visit_attention` hands it over.
        budget: Bytes for each image that content or rows may take. One row is stored even where it takes more.

    Raises:
        ValueError: The layer has more than two axes, or queries that stand on no token.
    """
    sizes = _plane(name, operator.grid)
    own = module if isinstance(module, SelfAttention) else None
    plain = own is not None and own.dims == 2 and _is_plain(operator.grid)
    about = (operator.heads, sizes, operator.prefix if isinstance(operator, TokenOperator) else 0)
    encoding = type(module if own is None else own.encoding).__name__
    if own is not None and plain and is_table(own.encoding):
        return LayerTensors("positions", *about, "none", encoding, position_tensors(own.encoding, sizes))
    if plain and isinstance(operator, Content):
        found = content_tensors(operator, budget)
        if found is not None and all(bool(tensor.isfinite().all()) for tensor in found[0].values()):
            return LayerTensors("content", *about, "none", encoding, *found)
    rule = operator.grid.axes[0].border if own is not None else "renormalise"
    border = {"renormalise": "none", "zero": "zeros"}.get(rule, rule)
    rows = row_tensors(name, operator, rows_within(operator, budget))
    window = operator.window if isinstance(operator, TokenOperator) else None
    return LayerTensors("rows", *about, border, encoding, rows, window=window)


def is_table(encoding: Encoding) -> bool:
    """Whether scores depend on the shift from query to key and on nothing else."""
    return not encoding.reads_content


def position_tensors(encoding: Encoding, sizes: tuple[int, int]) -> dict[str, Tensor]:
    """Scores of all shifts between two tokens, and the Gaussians of heads that have them.

    One query in the middle of an image of (2 height - 1) x (2 width - 1) tokens sees every shift once.

    Example:
        >>> from attnconv import Quadratic
        >>> encoding = Quadratic(3)
        >>> {name: tuple(tensor.shape) for name, tensor in position_tensors(encoding, (4, 5)).items()}
        {'shift_scores': (3, 7, 9), 'centres': (3, 2), 'precision': (3, 2, 2)}
    """
    axes = tuple(Axis(size=2 * size - 1, queries=1, offset=size - 1) for size in sizes)
    some = next(encoding.parameters())
    pixels = some.new_zeros((1, *(axis.size for axis in axes), 1), dtype=torch.float64)
    (scores,) = encoding.terms(Grid(axes), pixels).values()
    found = {"shift_scores": _less_largest(scores[0, :, 0]).unflatten(-1, tuple(axis.size for axis in axes))}
    if (heads := encoding.gaussians()) is not None:
        found |= _gaussians(heads.centres, heads.precision)
    return {key: tensor.detach().float().cpu().contiguous() for key, tensor in found.items()}


def gaussian_tensors(
    centres: Float64[Tensor, "h 2"], precision: Float64[Tensor, "h 2 2"], sizes: tuple[int, int]
) -> dict[str, Tensor]:
    """What `position_tensors` gives, of heads that are known by centre and precision alone: a moment of training."""
    rows, columns = (torch.arange(1 - size, size, dtype=torch.float64) for size in sizes)
    shifts = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1)  # (s, 2)
    off = shifts - centres[:, None]
    scores = -0.5 * ((off @ precision) * off).sum(-1)
    table = _less_largest(scores).unflatten(-1, (len(rows), len(columns)))
    found = {"shift_scores": table, **_gaussians(centres, precision)}
    return {key: tensor.float() for key, tensor in found.items()}


def content_tensors(operator: Content, budget: int) -> tuple[dict[str, Tensor], float] | None:
    """Queries, keys and position scores in float16, and how far the scores are from the exact ones.

    Where they would take more than the budget, queries and keys are replaced by those of fewer channels whose products
    are nearest in the sum of squares (a truncated singular value decomposition of keys less their mean). Row and column
    scores cannot be shortened so. Where no channel is left beside them, or scores would be off by more than `COARSEST`,
    there is nothing to give: some exact rows say more than all rows that are wrong.
    """
    count = operator.grid.key_count
    queries = operator.queries.float().expand(operator.batch, -1, -1, -1)
    keys = operator.keys.float().expand(operator.batch, -1, -1, -1)
    biases = [_less_largest(bias.float()).clamp_min(LOWEST) for bias in operator.biases]
    other = sum(bias.shape[-1] for bias in biases)
    channels = (budget // (2 * operator.heads * count) - other) // 2
    whole = queries.shape[-1] <= channels
    if not whole and channels < 1:
        return None
    left, right = balanced(queries, keys) if whole else fewer(queries, keys, channels)
    found = {"query": left.half(), "key": right.half()}
    for name, bias in zip(("row_scores", "column_scores"), biases, strict=False):
        found[name] = bias.expand(operator.batch, -1, -1, -1).half()
    some = sample_queries(operator.grid, SAMPLE, device=queries.device)
    off = found["query"][:, :, some].float() @ found["key"].float().mT - queries[:, :, some] @ keys.mT
    span = off.amax(-1) - off.amin(-1)
    for name, bias in zip(("row_scores", "column_scores"), biases, strict=False):
        off = (found[name].float() - bias)[:, :, some]
        span = span + off.amax(-1) - off.amin(-1)
    rounding = float(span.max() / 2)
    if not whole and not rounding <= COARSEST:
        return None
    return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}, rounding


def balanced(
    queries: Float[Tensor, "b h n e"], keys: Float[Tensor, "b h n e"]
) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "b h n e"]]:
    """The same products with queries and keys of like size: a power of two goes over, which rounds nothing."""
    if queries.shape[-1] == 0:
        return queries, keys
    ratio = keys.abs().amax((-1, -2), keepdim=True) / queries.abs().amax((-1, -2), keepdim=True)
    usable = torch.isfinite(ratio) & (ratio > 0)
    factor = torch.exp2(torch.log2(ratio.where(usable, 1.0)).div(2).round())
    return queries * factor, keys / factor


def fewer(
    queries: Float[Tensor, "b h n e"], keys: Float[Tensor, "b h n e"], channels: int
) -> tuple[Float[Tensor, "b h n f"], Float[Tensor, "b h n f"]]:
    """Vectors of fewer channels with the nearest products, up to a constant for each query.

    With Q = Q1 R1, K = Q2 R2 (QR) and R1 R2^T = U S V^T, the products are Q1 U S (Q2 V)^T, and the first terms of the
    sum over singular values are the best that many channels can do.
    """
    left, up = torch.linalg.qr(queries.double())
    right, down = torch.linalg.qr((keys - keys.mean(2, keepdim=True)).double())
    u, values, vh = torch.linalg.svd(up @ down.mT)
    root = values[..., None, :channels].sqrt()
    return (left @ u[..., :channels] * root).float(), (right @ vh.mT[..., :channels] * root).float()


def rows_within(operator: AttentionOperator, budget: int) -> int:
    """How many queries' rows fit: per head a probability for each key and the mass elsewhere, and one number."""
    return max(1, budget // (2 * operator.heads * (operator.grid.key_count + 1) + 4))


def row_tensors(name: str, operator: AttentionOperator, most: int) -> dict[str, Tensor]:
    """At most so many queries' rows over the image's tokens, made to sum to 1, and what fell elsewhere, in float16."""
    grid, heads = operator.grid, operator.heads
    queries = lattice_queries(grid, most, device=operator.device)
    rows, elsewhere = [], []
    for some in queries.split(max(1, ROWS_AT_ONCE // (operator.batch * heads * grid.key_count))):
        part = operator.rows(some).float()
        total = part.sum(-1, keepdim=True)
        rows.append((part / total.where(total > 0, 1)).half().cpu())  # a row without mass stays zero
        elsewhere.append(operator.padding_mass(some).half().cpu())
    return {
        "queries": _tokens(name, grid, queries.cpu()).to(torch.int32),
        "probabilities": torch.cat(rows, 2),
        "prefix_mass": torch.cat(elsewhere, 2),
    }


def _is_plain(grid: Grid) -> bool:
    """Whether every token is a query, and the tokens are all there is to look at."""
    return all(
        (axis.queries, axis.stride, axis.offset, axis.spacing, axis.border) == (axis.size, 1, 0, 1, "renormalise")
        for axis in grid.axes
    )


def _tokens(name: str, grid: Grid, queries: Int[Tensor, "m"]) -> Int[Tensor, "m"]:
    """The tokens on which queries stand."""
    flat = torch.zeros_like(queries)
    for axis, index in zip(grid.axes, grid.unravel(queries), strict=True):
        place = index * axis.stride + axis.offset
        if axis.spacing > 1 or bool((place < 0).any() or (place >= axis.size).any()):
            got = f"queries from {axis.offset} on over {axis.size} tokens {axis.spacing} apart"
            fix = "Pass `layers` to show others only."
            raise ValueError(bad("model", f"every query of {name!r} must stand on a token to be shown", got, fix))
        flat = flat * axis.size + place
    return flat


def _plane(name: str, grid: Grid) -> tuple[int, int]:
    if grid.dims > 2:
        fix = "Pass `layers` to show others only."
        raise ValueError(bad("model", f"{name!r} must have one or two axes to be shown", f"{grid.dims} axes", fix))
    height, width = (1, *grid.sizes)[-2:]
    return height, width


def _gaussians(centres: Tensor, precision: Tensor) -> dict[str, Tensor]:
    return {"centres": centres, "precision": precision}


def _less_largest(scores: Tensor) -> Tensor:
    return scores - scores.amax(-1, keepdim=True)
