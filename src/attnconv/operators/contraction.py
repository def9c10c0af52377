"""sum_h A_h X W_h for Kronecker products A_h = F_h,1 (x) F_h,2 .., without a tensor of heads x channels per position.

    mix      M_h = A_h X        axis by axis, a few images or a few rows of queries at a time, so that it stays in cache
    project  out = sum_h M_h W_h                           one product over heads and channels

Nothing of M is kept: the backward pass mixes again (a small part of the work) and uses, with G the gradient of out,

    dW_h = M_h^T G,      dM_h = G W_h^T,      dX = sum_h A_h^T dM_h,      dF_h,a = dM_h (x) M_h along the other axes.

On long axes each head's factor is a band, and only the keys inside it are met: for every tile of queries the smallest
range of keys that holds their weights. What lies outside is zero, so nothing is approximated here.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from attnconv.operators.base import full_precision, has_values, product_dtype
from attnconv.operators.products import project, project_heads
from attnconv.operators.recomputing import Gradients, recomputing

BLOCK = 2**22  # bytes of M held at once: what a processor's cache holds
DEVICE_BLOCK = 2**28  # on other devices, whose launches cost more than their memory
LEAST_ROWS = 16  # queries of the first axis in a block, at least: fewer make thin products
LONG_AXIS = 96  # keys from which on a factor is cut into the bands of its heads
TILE = 32  # queries of a long axis that share a range of keys
STRIP = 256  # columns of a wide image that are contracted at a time, so that rows of blocks stay in cache too


def contract_factors(
    x: Float[Tensor, "b *sizes c"], weight: Float[Tensor, "h c d"], factors: Sequence[Float[Tensor, "h _ _"]]
) -> Float[Tensor, "b *queries d"]:
    """sum_h (F_h,1 (x) F_h,2 ..) X W_h.

    Args:
        x: Images, channels last.
        weight: One matrix per head.
        factors: One (h, queries, keys) for each axis. On long axes, entries that are zero get no gradient: a softmax,
            which makes the factors, would not pass it on.
    """
    dtype = product_dtype(x)
    cast = [tensor.to(dtype) for tensor in (x, weight, *factors)]
    with full_precision(x.device):
        if not has_values(x):
            return contract_plainly(*cast)
        return _contraction(*cast)


def contract_plainly(x: Tensor, weight: Tensor, *factors: Tensor) -> Tensor:
    """The same in a few differentiable products, with all of M at once: what compilers and transforms see."""
    if _narrows(x, weight):
        return mix_values(project_heads(x, weight, 1).movedim(-2, 1), factors).sum(1)
    return project(mix_values(x[:, None], factors).movedim(1, -2), weight, 1)


def mix_values(
    values: Float[Tensor, "b one_or_h *sizes c"], factors: Sequence[Float[Tensor, "h _ _"]]
) -> Float[Tensor, "b h *queries c"]:
    """A_h V_h, one axis after the other; `values` may be shared by all heads (second axis 1)."""
    for dim, factor in enumerate(factors, start=2):
        moved = values.flatten(dim + 1)  # (b, h, *before, m_a, rest)
        matrix = factor.to(values.dtype).reshape(factor.shape[0], *(1,) * (dim - 2), *factor.shape[1:])
        values = (matrix @ moved).unflatten(-1, values.shape[dim + 1 :])
    return values


@dataclass(frozen=True)
class _Tile:
    """Some queries of an axis, and the range of keys that holds all of their weights."""

    queries: slice
    keys: slice


@dataclass(frozen=True)
class _Group:
    """Heads that are mixed together: their keys along the first axis, and their tiles along the others."""

    heads: slice
    keys: slice
    tiles: tuple[tuple[_Tile, ...], ...]


@dataclass(frozen=True)
class _Block:
    """Images and queries of the first axis that are mixed at a time."""

    images: slice
    rows: slice
    groups: tuple[_Group, ...]


def _forward(x: Tensor, weight: Tensor, *factors: Tensor) -> Tensor:
    if not _narrows(x, weight):
        return _contract(x, weight, *factors)
    shape = _outputs(x, weight, factors)
    out = _pull(_transposed(shape, weight, factors), x, (True, *[False] * (1 + len(factors))))[0]
    assert out is not None
    return out


def _gradients(inputs: Sequence[Tensor], gradient: Tensor, wanted: Sequence[bool]) -> Gradients:
    x, weight, *factors = inputs
    if not _narrows(x, weight):
        return _pull(inputs, gradient, wanted)
    swapped = _transposed(gradient, weight, factors)
    found = _pull(swapped, x, (False, *wanted[1:]))[1:]
    to_x = _contract(*swapped) if wanted[0] else None
    return to_x, *(None if grad is None else grad.mT for grad in found)


def _narrows(x: Tensor, weight: Tensor) -> bool:
    """Whether there are fewer channels after the projection, so that mixing comes second: sum_h A_h (X W_h).

    With X in the place of G, A_h^T in that of A_h and W_h^T in that of W_h, that is the gradient of X in the module's
    docstring: the two orders are each other's adjoints, and the same two functions serve both.
    """
    return weight.shape[2] < x.shape[-1]


def _transposed(x: Tensor, weight: Tensor, factors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return x, weight.mT, *(factor.mT for factor in factors)


def _outputs(x: Tensor, weight: Tensor, factors: Sequence[Tensor]) -> Tensor:
    return x.new_empty((x.shape[0], *(factor.shape[1] for factor in factors), weight.shape[2]))


def _contract(x: Tensor, weight: Tensor, *factors: Tensor) -> Tensor:
    """The products of the module's docstring, strip by strip."""
    out = _outputs(x, weight, factors)
    for strip in _strips(factors):
        if strip is None:
            _contract_blocks(x, weight, factors, out)
        else:
            narrow = [factors[0], factors[1][:, strip.queries, strip.keys], *factors[2:]]
            _contract_blocks(x[:, :, strip.keys], weight, narrow, out[:, :, strip.queries])
    return out


def _contract_blocks(x: Tensor, weight: Tensor, factors: Sequence[Tensor], out: Tensor) -> None:
    """The same, a block at a time, into `out`."""
    exact = _exact(x)
    for block in _blocks(x, weight, factors):
        part = out[block.images, block.rows]
        total: Tensor | None = None
        for group in block.groups:
            mixed, matrix = _mix(x, factors, block, group)[0], weight[group.heads].flatten(0, 1)
            if total is None:
                total = (mixed @ matrix).to(exact if len(block.groups) > 1 else x.dtype)
            elif total.dtype == mixed.dtype:
                total.addmm_(mixed, matrix)
            else:
                total += mixed @ matrix
        assert total is not None
        part.copy_(total.view(part.shape))


def _mix(
    x: Tensor, factors: Sequence[Tensor], block: _Block, group: _Group
) -> tuple[Float[Tensor, "points gc"], list[Tensor]]:
    """M of a block and a group of heads, its points row-major and heads before channels; and what each axis met.

    Returns:
        M, and the inputs (b, g, rows, *sizes, c) of the axes after the first.
    """
    images = x[block.images]
    first = factors[0][group.heads, block.rows, group.keys]  # (g, rows, keys)
    part = _each(first.flatten(0, 1), images[:, group.keys].flatten(2))
    part = part.reshape(images.shape[0], *first.shape[:2], *x.shape[2:])
    met = []
    for dim, (factor, tiles) in enumerate(zip(factors[1:], group.tiles, strict=True), start=3):
        met.append(part)
        part = _along(part, factor[group.heads], tiles, dim)
    return part.movedim(1, -2).flatten(-2).flatten(0, -2), met


def _each(matrix: Float[Tensor, "q k"], parts: Float[Tensor, "b k rest"]) -> Float[Tensor, "b q rest"]:
    """The same matrix for every part; `matmul` would transpose the parts and copy the product."""
    return torch.bmm(matrix.expand(parts.shape[0], -1, -1), parts)


def _along(part: Tensor, factor: Float[Tensor, "g q k"], tiles: tuple[_Tile, ...], dim: int) -> Tensor:
    """One more axis mixed, per head: (b, g, rows, .., k, .., c) -> (b, g, rows, .., q, .., c)."""
    made = []
    for tile in tiles:
        keys = part[(slice(None),) * dim + (tile.keys,)].flatten(dim + 1)
        made.append(_beside(factor[:, tile.queries, tile.keys], dim) @ keys)
    return (made[0] if len(made) == 1 else torch.cat(made, dim)).unflatten(-1, part.shape[dim + 1 :])


def _beside(matrix: Float[Tensor, "g q k"], dim: int) -> Tensor:
    """A matrix per head that multiplies axis `dim` of (b, g, rows, .., k, rest)."""
    return matrix.reshape(matrix.shape[0], *(1,) * (dim - 2), *matrix.shape[1:])


def _pull(inputs: Sequence[Tensor], gradient: Tensor, wanted: Sequence[bool]) -> Gradients:
    """Gradients of x, of the weights and of the factors, as far as they are wanted; strip by strip."""
    x, weight, *factors = inputs
    strips = _strips(factors)
    if strips[0] is None:
        found = _pull_blocks(x, weight, factors, gradient, wanted)
    else:
        totals: list[Tensor | None] = [
            torch.zeros_like(tensor, dtype=_exact(x)) if want else None
            for tensor, want in zip(inputs, wanted, strict=True)
        ]
        for strip in strips:
            assert strip is not None
            narrow = [factors[0], factors[1][:, strip.queries, strip.keys], *factors[2:]]
            parts = _pull_blocks(x[:, :, strip.keys], weight, narrow, gradient[:, :, strip.queries], wanted)
            for place, (total, part) in enumerate(zip(totals, parts, strict=True)):
                if total is not None and part is not None:
                    into = {0: total[:, :, strip.keys], 3: total[:, strip.queries, strip.keys]}.get(place, total)
                    into += part
        found = totals
    return tuple(None if grad is None else grad.to(x.dtype) for grad in found)


def _pull_blocks(
    x: Tensor, weight: Tensor, factors: Sequence[Tensor], gradient: Tensor, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The same, a block at a time."""
    exact = _exact(x)
    moving = any(wanted[2:])
    blocks = list(_blocks(x, weight, factors))
    once = all(len(block.groups) == 1 and block.rows == blocks[0].rows for block in blocks)  # one block per image
    to_x = torch.zeros_like(x, dtype=x.dtype if once else exact) if wanted[0] else None
    to_weight = torch.zeros_like(weight, dtype=exact) if wanted[1] else None
    to_factors = [torch.zeros_like(factor, dtype=exact) for factor in factors] if moving else []
    for block in blocks:
        part = gradient[block.images, block.rows].flatten(0, -2)  # (points, d)
        for group in block.groups:
            met: list[Tensor] = []
            if moving or to_weight is not None:
                mixed, met = _mix(x, factors, block, group)
                if to_weight is not None:
                    to_weight[group.heads] += (mixed.mT @ part).reshape(-1, *weight.shape[1:])
                del mixed
            if moving or to_x is not None:
                back = part @ weight[group.heads].flatten(0, 1).mT
                _unmix(x, factors, block, group, back, met, to_x, to_factors)
    return [to_x, to_weight, *(to_factors if moving else [None] * len(factors))]


def _exact(x: Tensor) -> torch.dtype:
    """In which sums over blocks lose nothing."""
    return torch.promote_types(x.dtype, torch.float32)


def _unmix(
    x: Tensor,
    factors: Sequence[Tensor],
    block: _Block,
    group: _Group,
    gradient: Float[Tensor, "points gc"],
    met: list[Tensor],
    to_x: Tensor | None,
    to_factors: list[Tensor],
) -> None:
    """Carry the gradient of M back through every axis, and add what x and the factors get of it."""
    images, sizes = x[block.images], [factor.shape[1] for factor in factors[1:]]
    first = factors[0][group.heads, block.rows, group.keys]  # (g, rows, keys)
    part = gradient.reshape(images.shape[0], first.shape[1], *sizes, first.shape[0], x.shape[-1])
    part = part.movedim(-2, 1).contiguous()  # (b, g, rows, *queries, c)
    for axis in range(len(factors) - 1, 0, -1):
        known, into = (met[axis - 1], to_factors[axis]) if to_factors else (None, None)
        part = _back_along(part, factors[axis], group.heads, group.tiles[axis - 1], axis + 2, known, into)
    flat = part.flatten(1, 2).flatten(2)  # (b, g rows, rest)
    if to_factors:
        outer = (flat @ images[:, group.keys].flatten(2).mT).sum(0, dtype=to_factors[0].dtype)
        to_factors[0][group.heads, block.rows, group.keys] += outer.reshape(first.shape)
    if to_x is not None:
        back = _each(first.flatten(0, 1).mT, flat)
        to_x[block.images, group.keys] += back.reshape(images.shape[0], -1, *x.shape[2:])


def _back_along(
    gradient: Tensor,
    factor: Float[Tensor, "h q k"],
    heads: slice,
    tiles: tuple[_Tile, ...],
    dim: int,
    met: Tensor | None,
    into: Tensor | None,
) -> Tensor:
    """The adjoint of `_along`, which also adds the factor's own gradient `into` place if it is told what it `met`."""
    chosen, rest = factor[heads], gradient.shape[dim + 1 :]
    whole = len(tiles) == 1
    back = None if whole else gradient.new_zeros((*gradient.shape[:dim], factor.shape[2], *rest))
    for tile in tiles:
        part = gradient[(slice(None),) * dim + (tile.queries,)].flatten(dim + 1)
        if met is not None and into is not None:
            keys = met[(slice(None),) * dim + (tile.keys,)].flatten(dim + 1)
            outer = part @ keys.mT  # (b, g, rows, .., q, k)
            others = (0, *range(2, dim))
            into[heads, tile.queries, tile.keys] += outer.sum(others, dtype=into.dtype)
        carried = (_beside(chosen[:, tile.queries, tile.keys].mT, dim) @ part).unflatten(-1, rest)
        if back is None:
            size = tile.keys.stop - tile.keys.start
            if size == factor.shape[2]:
                return carried
            back = gradient.new_zeros((*gradient.shape[:dim], factor.shape[2], *rest))
        back[(slice(None),) * dim + (tile.keys,)] += carried
    assert back is not None
    return back


def _strips(factors: Sequence[Tensor]) -> Sequence[_Tile | None]:
    """Columns of a wide image with the keys that they meet, or None for all where no strip of them is narrow.

    A row of a wide image does not fit in the cache with the rows around it.
    """
    if len(factors) < 2 or min(factors[1].shape[1:]) < 2 * STRIP:
        return [None]
    queries, keys = factors[1].shape[1:]
    bands, strips = _Bands.of(factors[1]), []
    for start in range(0, queries, STRIP):
        part = slice(start, min(start + STRIP, queries))
        met = [bands.keys(head, part) for head in range(len(factors[1]))]
        strips.append(_Tile(part, slice(min(one.start for one in met), max(one.stop for one in met))))
    narrow = sum(strip.keys.stop - strip.keys.start for strip in strips) < 1.25 * keys
    return strips if narrow else [None]


def _blocks(x: Tensor, weight: Tensor, factors: Sequence[Tensor]) -> Iterator[_Block]:
    """The whole problem, in parts whose M takes about `BLOCK` bytes: whole images, or rows of queries of one."""
    heads, channels, _ = weight.shape
    rows = factors[0].shape[1]
    per_row = math.prod(factor.shape[1] for factor in factors[1:]) * heads * channels
    bands = [_Bands.of(factor) if factor.shape[2] >= LONG_AXIS else None for factor in factors]
    most = (BLOCK if x.device.type == "cpu" else DEVICE_BLOCK) // x.element_size()
    if rows * per_row <= 2 * most:
        images, height = max(most // (rows * per_row), 1), rows
    else:
        images, height = 1, min(max(most // per_row, LEAST_ROWS), rows)
    banded = any(band is not None for band in bands)
    tiles = [_group_tiles(factors[1:], bands[1:], head) for head in range(heads if banded else 1)]
    for start in range(0, rows, height):
        part = slice(start, min(start + height, rows))
        groups = tuple(
            _Group(
                slice(head, head + 1) if banded else slice(0, heads),
                slice(0, factors[0].shape[2]) if (band := bands[0]) is None else band.keys(head, part),
                tiles[head],
            )
            for head in range(len(tiles))
        )
        for image in range(0, x.shape[0], images):
            yield _Block(slice(image, min(image + images, x.shape[0])), part, groups)


def _group_tiles(
    factors: Sequence[Tensor], bands: Sequence["_Bands | None"], head: int
) -> tuple[tuple[_Tile, ...], ...]:
    found = []
    for factor, band in zip(factors, bands, strict=True):
        queries, keys = slice(0, factor.shape[1]), slice(0, factor.shape[2])
        found.append((_Tile(queries, keys),) if band is None else band.tiles(head, factor.shape[1], keys.stop))
    return tuple(found)


@final
@dataclass(frozen=True)
class _Bands:
    """Per head and query of an axis, the first and one behind the last key with any weight."""

    low: list[list[int]]
    high: list[list[int]]

    @staticmethod
    def of(factor: Float[Tensor, "h q k"]) -> "_Bands":
        """By looking at the values; a query without any weight has an empty range."""
        held = factor != 0
        size = factor.shape[2]
        some = held.any(-1)
        low = torch.where(some, held.to(torch.uint8).argmax(-1), size)
        high = torch.where(some, size - held.flip(-1).to(torch.uint8).argmax(-1), 0)
        return _Bands(low.tolist(), high.tolist())

    def keys(self, head: int, queries: slice) -> slice:
        """The range of keys of some queries; one key, without weight, where it would be empty."""
        low, high = min(self.low[head][queries]), max(self.high[head][queries])
        return slice(low, high) if low < high else slice(0, 1)

    def tiles(self, head: int, queries: int, keys: int) -> tuple[_Tile, ...]:
        """Tiles of neighbouring queries; a single one where the head looks at most of the axis anyway."""
        found = []
        for start in range(0, queries, TILE):
            part = slice(start, min(start + TILE, queries))
            found.append(_Tile(part, self.keys(head, part)))
        met = sum((t.keys.stop - t.keys.start) * (t.queries.stop - t.queries.start) for t in found)
        return tuple(found) if met < queries * keys / 2 else (_Tile(slice(0, queries), slice(0, keys)),)


_contraction = recomputing(contract_plainly, _forward, _gradients)
