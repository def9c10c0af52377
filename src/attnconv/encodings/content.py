"""Content-based encodings: absolute positions, and relative positions with the four terms of Transformer-XL.

Absolute, equations (3) and (7): before queries and keys (but not values) are computed, a vector for each position is
added to the image. The vectors are sinusoids of the position, or learned.

    score_h(q, k) = (x_q + p_q) W_qry . (x_k + p_k) W_key / sqrt(e)

If this saves operations, W_qry W_key^T is computed first. Then only one product with the image is needed instead of
two, and all heads use the image itself as keys.

Relative, equation (8): r_delta = sum_a phi_a(delta_a) is not learned. Terms and their parameters can be omitted.

    score_h(q, k) = scale * (   x_q W_qry . x_k W_key          content-content
                              + x_q W_qry . W^_key r_delta     content-position
                              + u_h . x_k W_key                position-content
                              + v_h . W^_key r_delta )         position-position
"""

import functools
import math
from typing import Literal, TypeAlias, final, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from attnconv._util.errors import bad
from attnconv._util.value_checks import whole
from attnconv.encodings.base import Encoding, separable_operator
from attnconv.grid import Grid
from attnconv.operators.base import (
    AttentionOperator,
    all_queries,
    full_precision,
    has_values,
    product_dtype,
    score_dtype,
)
from attnconv.operators.content import Content
from attnconv.operators.kernels.contractions import axis_sum

Term: TypeAlias = Literal["content-content", "content-position", "position-content", "position-position"]
TERMS: tuple[Term, ...] = get_args(Term)
WORTHWHILE = 1.25  # minimum ratio of operations for which merging the matrices of queries and keys pays off
_HOOKS_OF_ALL = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)
WAVELENGTH = 10_000.0  # upper limit of the sinusoids' wavelengths, in units of 2 pi positions
_INTERPOLATION = {1: "linear", 2: "bilinear", 3: "trilinear"}


@final
class SinusoidalPositions(nn.Module):
    """Fixed sinusoidal vectors for absolute positions; the channels, a multiple of 2 * dims, are split among axes."""

    def __init__(self, channels: int, dims: int) -> None:
        super().__init__()
        self.channels, self.dims = check_sinusoidal("in_channels", channels, dims), dims

    def forward(self, grid: Grid, points: list[Tensor], dtype: torch.dtype) -> Float[Tensor, "*points channels"]:
        """Return the vectors at all combinations of positions in `points`, one int64 tensor per axis."""
        parts = []
        for dim, positions in enumerate(points):
            part = sinusoids(positions.to(dtype), self.channels // grid.dims)  # (points_a, part)
            shape = (*(1,) * dim, positions.shape[0], *(1,) * (grid.dims - 1 - dim), part.shape[-1])
            parts.append(part.reshape(shape).expand(*(p.shape[0] for p in points), -1))
        return torch.cat(parts, -1)


@final
class LearnedPositions(nn.Module):
    """Learned vectors, one per position of an image of the given sizes, interpolated linearly for other image sizes.

    Initial entries have standard deviation `std`. A position in the padding uses the nearest vector inside the image.
    """

    def __init__(self, channels: int, sizes: tuple[int, ...], *, std: float = 0.02) -> None:
        super().__init__()
        if not sizes or any(size < 1 for size in sizes):
            raise ValueError(bad("sizes", "must be at least 1 on every axis", sizes))
        self.channels, self.dims = channels, len(sizes)
        self.table = nn.Parameter(torch.randn(1, channels, *sizes) * std)

    def forward(self, grid: Grid, points: list[Tensor], dtype: torch.dtype) -> Float[Tensor, "*points channels"]:
        mode = _INTERPOLATION[grid.dims]
        table = F.interpolate(self.table.to(dtype), size=grid.sizes, mode=mode, align_corners=False)[0].movedim(0, -1)
        for dim, (axis, positions) in enumerate(zip(grid.axes, points, strict=True)):
            table = table.index_select(dim, positions.clamp(0, axis.size - 1))
        return table


@final
class Absolute(Encoding):
    """Absolute positional encoding: queries and keys are computed from the content plus a vector for each position.

    Args:
        in_channels: Number of channels of the image and of the position vectors.
        heads, dims: Number of heads and number of axes.
        positions: Module for position vectors: `SinusoidalPositions` or `LearnedPositions`, with in_channels channels.
        head_channels: Length e of a head's queries and keys; None for in_channels.

    Attributes:
        query, key: W_qry and W_key, Linear(in_channels, heads * e) without bias.
        positions: The module that computes the position vectors.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If `heads` is below 1, `dims` is not 1, 2 or 3, a number of channels is below 1, or `positions` has
            other channels or axes.
    """

    by_head = ("query", "key")

    def __init__(
        self,
        in_channels: int,
        heads: int,
        dims: int = 2,
        *,
        positions: SinusoidalPositions | LearnedPositions,
        head_channels: int | None = None,
    ) -> None:
        super().__init__(heads, dims)
        self.head_channels = check_head_channels(in_channels, head_channels)
        self.scale = 1 / math.sqrt(self.head_channels)
        self.query = nn.Linear(in_channels, heads * self.head_channels, bias=False)
        self.key = nn.Linear(in_channels, heads * self.head_channels, bias=False)
        if (positions.channels, positions.dims) != (in_channels, dims):
            got = f"{positions.channels} channels and {positions.dims} axes"
            raise ValueError(bad("positions", f"must have {in_channels} channels and {dims} axes", got))
        self.positions = positions

    def operator(self, grid: Grid, x: Float[Tensor, "b *sizes c"]) -> Content:
        at_queries, at_lattice = self._positions(grid, x)
        if merges(grid, x, (self.query, self.key), self.head_channels, bias=False):
            right = self.key.weight.unflatten(0, (self.heads, -1))
            query = merged(grid.at_queries(x) + at_queries, self.query.weight, None, right, self.scale)
            return Content(grid, query, shared_keys(grid.extend(x) + at_lattice))
        query = split_heads(self.query(grid.at_queries(x) + at_queries), self.heads) * self.scale
        key = split_heads(self.key(grid.extend(x) + at_lattice), self.heads)
        return Content(grid, query, key)

    def terms(self, grid: Grid, x: Float[Tensor, "b *sizes c"]) -> dict[str, Float[Tensor, "#b h n lattice"]]:
        at_queries, at_lattice = self._positions(grid, x)
        left = {"content": grid.at_queries(x), "position": at_queries[None]}
        right = {"content": grid.extend(x), "position": at_lattice[None]}
        queries = {name: split_heads(self.query(part), self.heads) * self.scale for name, part in left.items()}
        keys = {name: split_heads(self.key(part), self.heads) for name, part in right.items()}
        return {f"{a}-{b}": products(query, key) for a, query in queries.items() for b, key in keys.items()}

    def _positions(self, grid: Grid, x: Tensor) -> tuple[Tensor, Tensor]:
        dtype = score_dtype(x.dtype)
        at_queries = self.positions(grid, [axis.query_positions(x.device) for axis in grid.axes], dtype)
        at_lattice = self.positions(grid, [axis.lattice_positions(x.device) for axis in grid.axes], dtype)
        return at_queries.to(x.dtype), at_lattice.to(x.dtype)


@final
class SinusoidalFeatures:
    """Sines and cosines of shifts, at geometrically spaced wavelengths; channels are a multiple of 2 * dims."""

    def __init__(self, channels: int, dims: int) -> None:
        self.channels = check_sinusoidal("position_channels", channels, dims)
        self.dims = dims

    def along(self, axis: int, shifts: Float[Tensor, "*shifts"]) -> Float[Tensor, "*shifts channels"]:
        """Compute phi_a, the contribution of the shifts along one axis to r_delta."""
        part = self.channels // self.dims
        return F.pad(sinusoids(shifts, part), (axis * part, (self.dims - 1 - axis) * part))


@final
class QuadraticFeatures:
    """Features of equation (9), `r_delta = (|delta|^2, delta_1, .., delta_dims)`, with D_p = dims + 1."""

    def __init__(self, dims: int) -> None:
        self.channels = dims + 1
        self.dims = dims

    def along(self, axis: int, shifts: Float[Tensor, "*shifts"]) -> Float[Tensor, "*shifts channels"]:
        zero = torch.zeros_like(shifts)
        others = [shifts if axis == other else zero for other in range(self.dims)]
        return torch.stack([shifts.square(), *others], -1)


@final
class Relative(Encoding):
    """Relative positional encoding of Transformer-XL, equation (8) of the paper, with any subset of its four terms.

    Args:
        in_channels: Number of channels of the image.
        heads, dims: Number of heads and number of axes.
        head_channels: Length e of a head's queries and keys; None for in_channels.
        features: Module for r_delta; None for sinusoids of length in_channels, rounded up to a multiple of 2 * dims.
        terms: Names of the terms to use, as in `Encoding.terms`; parameters of omitted terms are not created.
        scaled: Divide the score by sqrt(e), as in Transformer-XL; equation (8) omits this factor.

    Attributes:
        query, key: W_qry and W_key, Linear(in_channels, heads * e) without bias, or None if unused.
        position_key: W^_key, Linear(features.channels, heads * e) without bias, or None if unused.
        content_bias: u, (heads, e), or None if unused.
        position_bias: v, (heads, e), or None if unused.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If `heads` is below 1, `dims` is not 1, 2 or 3, a number of channels is
            below 1, `features` has other axes, or `terms` is empty or contains an unknown name.
    """

    by_head = ("query", "key", "position_key", "content_bias", "position_bias")

    def __init__(
        self,
        in_channels: int,
        heads: int,
        dims: int = 2,
        *,
        head_channels: int | None = None,
        features: SinusoidalFeatures | QuadraticFeatures | None = None,
        terms: tuple[Term, ...] = TERMS,
        scaled: bool = True,
    ) -> None:
        super().__init__(heads, dims)
        if not terms or any(term not in TERMS for term in terms):
            raise ValueError(bad("terms", f"must be a non-empty subset of {', '.join(TERMS)}", terms))
        self.used = frozenset(terms)
        self.reads_content = self.used != {"position-position"}
        self.head_channels = check_head_channels(in_channels, head_channels)
        self.features = features or SinusoidalFeatures(-(-in_channels // (2 * dims)) * 2 * dims, dims)
        if self.features.dims != dims:
            raise ValueError(bad("features", f"must have {dims} axes", self.features.dims))
        self.scale = 1 / math.sqrt(self.head_channels) if scaled else 1.0
        width, vector = heads * self.head_channels, (heads, self.head_channels)

        def linear(inputs: int, *of: Term) -> nn.Linear | None:
            return nn.Linear(inputs, width, bias=False) if self.used.intersection(of) else None

        self.query = linear(in_channels, "content-content", "content-position")
        self.key = linear(in_channels, "content-content", "position-content")
        self.position_key = linear(self.features.channels, "content-position", "position-position")
        self.content_bias = nn.Parameter(torch.randn(vector)) if "position-content" in self.used else None
        self.position_bias = nn.Parameter(torch.randn(vector)) if "position-position" in self.used else None

    def operator(self, grid: Grid, x: Float[Tensor, "b *sizes c"]) -> AttentionOperator:
        if not self.reads_content:
            return separable_operator(grid, x, self.heads, self._factor_scores)
        left = self._left(grid, x)
        by_content, by_position = (
            [vectors for term, vectors in left.items() if term.endswith(key)] for key in ("-content", "-position")
        )
        biases = self._position_scores(grid, functools.reduce(torch.add, by_position)) if by_position else []
        if self.key is not None:
            key = split_heads(self.key(grid.extend(x)), self.heads)
            return Content(grid, functools.reduce(torch.add, by_content), key, biases=biases)
        nothing = by_position[0][..., :0]  # vectors of length 0, so that all products are 0
        empty = nothing.new_zeros((nothing.shape[0], self.heads, grid.lattice_count, 0))
        return Content(grid, nothing, empty, biases=biases)

    def terms(self, grid: Grid, x: Float[Tensor, "b *sizes c"]) -> dict[str, Float[Tensor, "#b h n lattice"]]:
        key = None if self.key is None else split_heads(self.key(grid.extend(x)), self.heads)
        found: dict[str, Tensor] = {}
        for term, vectors in self._left(grid, x).items():
            if term.endswith("-position"):
                found[term] = axis_sum(self._position_scores(grid, vectors))
            else:
                assert key is not None
                found[term] = products(vectors, key)
        return found

    def extra_repr(self) -> str:
        return f"heads={self.heads}, dims={self.dims}, terms={tuple(t for t in TERMS if t in self.used)}"

    def _left(self, grid: Grid, x: Tensor) -> dict[Term, Float[Tensor, "#b h n e"]]:
        """Return the scaled left factor of each term: the query vectors, u or v."""
        found: dict[str, Tensor] = {}
        if self.query is not None:
            query = split_heads(self.query(grid.at_queries(x)), self.heads) * self.scale
            found = {"content-content": query, "content-position": query}
        for name, bias in (("position-content", self.content_bias), ("position-position", self.position_bias)):
            if bias is not None:
                scaled = bias.to(score_dtype(x.dtype))[None, :, None] * self.scale
                found[name] = scaled.expand(-1, -1, grid.query_count, -1)
        return {term: found[term] for term in TERMS if term in self.used}

    def _position_scores(self, grid: Grid, left: Float[Tensor, "#b h n e"]) -> list[Tensor]:
        """Compute left . W^_key phi_a(delta_a), one (b, h, n, lattice_a) for each axis."""
        indices = grid.unravel(all_queries(grid, left.device))
        along = zip(self._tables(grid, left), grid.axes, indices, strict=True)
        return [scores_at(table, axis.windows(index)) for table, axis, index in along]

    def _factor_scores(
        self, grid: Grid, device: torch.device, dtype: torch.dtype, *, table: bool = False
    ) -> list[Tensor]:
        """Compute the scaled v . W^_key phi_a(delta_a), one (h, n_a, lattice_a) or (h, 1, shifts) for each axis."""
        assert self.position_bias is not None
        found = self._tables(grid, self.position_bias.to(dtype)[None, :, None] * self.scale)
        if table:
            return [scores[0] for scores in found]
        rows = [axis.windows(torch.arange(axis.queries, device=device)) for axis in grid.axes]
        return [scores[0, :, 0][:, each] for scores, each in zip(found, rows, strict=True)]

    def _tables(self, grid: Grid, left: Float[Tensor, "#b h n e"]) -> list[Tensor]:
        """Compute left . W^_key phi_a(delta_a) for all shifts, one (b, h, n, shifts) for each axis."""
        assert self.position_key is not None
        shifts = [axis.all_shifts(left.device).to(left.dtype) for axis in grid.axes]
        with full_precision(left.device):
            matrix = self.position_key.weight.to(left.dtype).unflatten(0, (self.heads, self.head_channels))
            folded = left @ matrix  # (b, h, n, D_p), to be multiplied by r
            return [folded @ self.features.along(dim, row).mT for dim, row in enumerate(shifts)]


def products(query: Float[Tensor, "#b h n e"], key: Float[Tensor, "*keys lattice e"]) -> Float[Tensor, "b h n lattice"]:
    """Compute q . k for all scaled queries and all lattice points or table rows."""
    with full_precision(query.device):
        return query @ key.mT


def scores_at(
    table: Float[Tensor, "b *queries t"], rows: Int[Tensor, "*#queries lattice"]
) -> Float[Tensor, "b *queries lattice"]:
    """Gather scores from the table of each query at the rows of its lattice points."""
    return table.gather(-1, rows.expand(*table.shape[:-1], -1))


def check_head_channels(in_channels: int, head_channels: int | None, *, multiple_of: int = 1) -> int:
    """Validate and return the length of queries and keys; for None, return in_channels rounded up to a multiple."""
    in_channels = whole("in_channels", in_channels, 1)
    if head_channels is None:
        return -(-in_channels // multiple_of) * multiple_of
    channels = whole("head_channels", head_channels, 1)
    if channels % multiple_of:
        raise ValueError(bad("head_channels", f"must be a multiple of {multiple_of}", channels))
    return channels


def split_heads(flat: Float[Tensor, "b *points he"], heads: int) -> Float[Tensor, "b h flat e"]:
    """Split the channels into one vector per head and point, and copy them, in the dtype of scores."""
    # Without `copy`, `to` returns a view if the dtype does not change, and every product would copy it.
    split = _heads_of(flat, heads)
    return split.to(score_dtype(flat.dtype), memory_format=torch.contiguous_format, copy=True)


def _heads_of(flat: Tensor, heads: int) -> Float[Tensor, "b h flat e"]:
    return flat.unflatten(-1, (heads, -1)).flatten(1, -3).transpose(1, 2)


def shared_keys(x: Float[Tensor, "b *sizes c"]) -> Float[Tensor, "b 1 lattice c"]:
    """Return a copy of the image as keys of all heads, which later changes of the image do not affect."""
    return x.flatten(1, -2)[:, None].to(score_dtype(x.dtype), copy=True)


def merges(
    grid: Grid,
    x: Float[Tensor, "b *sizes c"],
    linears: tuple[nn.Module, nn.Module],
    head_channels: int,
    *,
    bias: bool,
    table_rows: int = 0,
) -> bool:
    """Return whether `merged` saves operations and equals a call of the linear maps of queries and keys.

    `bias` is whether the encoding creates them with bias, and `table_rows` the number of table rows over all axes.
    """
    if not has_values(x) or product_dtype(x) is torch.float16:  # the range of float16 is too small for W_qry W_key^T
        return False
    if any(_HOOKS_OF_ALL) or not all(_is_plain(linear, bias=bias) for linear in linears):
        return False
    channels, queries, keys = x.shape[-1], len(x) * grid.query_count, len(x) * grid.lattice_count
    separate = head_channels * ((queries + keys) * channels + queries * table_rows / grid.dims)
    together = (queries + head_channels) * channels * (channels + table_rows)
    return separate > WORTHWHILE * together


def _is_plain(linear: nn.Module, *, bias: bool) -> bool:
    """Return whether a module is an unchanged `nn.Linear`: no subclass, other `forward`, hook or quantised weight."""
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    if type(linear) is not nn.Linear or "forward" in vars(linear) or any(hooks):
        return False
    return type(linear.weight) in (Tensor, nn.Parameter) and (linear._parameters.get("bias") is not None) == bias


def merged(
    x: Float[Tensor, "b *points c"],
    weight: Float[Tensor, "he c"],
    bias: Float[Tensor, "he"] | None,
    right: Float[Tensor, "h e d"],
    scale: float,
) -> Float[Tensor, "b h flat d"]:
    """Compute scale * q_h R_h for queries q_h = x W_h + b_h as x (W_h R_h) + b_h R_h, without computing q_h."""
    heads, exact = len(right), score_dtype(x.dtype)
    with full_precision(x.device):
        left = right.mT.to(exact) * scale
        weight = (left @ weight.to(exact).unflatten(0, (heads, -1))).flatten(0, 1).to(x.dtype)
        if bias is not None:
            bias = (left @ bias.to(exact).view(heads, -1, 1)).flatten().to(x.dtype)
    return _heads_of(F.linear(x, weight, bias), heads)


def sinusoids(positions: Float[Tensor, "*positions"], channels: int) -> Float[Tensor, "*positions channels"]:
    """Compute [sin(p w_i), cos(p w_i)] with w_i = WAVELENGTH^(-2 i / channels), i = 0 .. channels / 2 - 1."""
    exponents = torch.arange(channels // 2, device=positions.device, dtype=positions.dtype) * (2 / channels)
    angles = positions[..., None] * WAVELENGTH**-exponents
    return torch.cat((angles.sin(), angles.cos()), -1)


def check_sinusoidal(name: str, channels: int, dims: int) -> int:
    """Validate that the channels can be split into sine-cosine pairs for each axis."""
    if channels < 1 or channels % (2 * dims):
        requirement = f"must be a positive multiple of {2 * dims} for sinusoids over {dims} axes"
        raise ValueError(bad(name, requirement, channels))
    return channels
