"""Kronecker contraction sum_h A_h X W_h for long axes, one head at a time, over the keys with non-zero weights.

With M_h = A_h X, out = sum_h M_h W_h and G the gradient of out,

    dW_h = M_h^T G,      dM_h = G W_h^T,      dX = sum_h A_h^T dM_h,      dF_h,a = dM_h (x) M_h along the other axes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Float
from torch import Tensor

from attnconv.operators.base import Factor, Images, Outputs, Weights, score_dtype
from attnconv.operators.kernels import block_sizes, contractions
from attnconv.operators.kernels.recompute_in_backward import Gradients

Tile: TypeAlias = tuple[slice, slice]  # queries of an axis, and the range of keys that contains all of their weights


@dataclass(frozen=True)
class View:
    """The part of a head's factors that a block of queries uses."""

    head: int
    keys: slice  # of the first axis
    places: Sequence[Any]  # per axis, the index of the head's matrix in the factor; the first two are cut to the block
    tiles: Sequence[Sequence[Tile]]  # per axis, the tiles of that matrix


def contract_long(x: Images, weight: Weights, *factors: Factor) -> Outputs:
    """Compute the products in the module's docstring one block at a time; there are c / i groups of channels."""
    out = x.new_empty((x.shape[0], *(factor.shape[1] for factor in factors), weight.shape[2]))
    groups, exact = x.shape[-1] // weight.shape[1], score_dtype(x.dtype)  # sum heads in at least float32
    for queries, keys, views in blocks(x, weight, factors):
        part = out[queries]
        total = x.new_zeros((part[..., 0].numel(), part.shape[-1]), dtype=exact)
        for view in views:
            mixed, matrix = _mix(x[keys], factors, view)[0], weight[view.head]
            if groups == 1 and exact == mixed.dtype:
                torch.addmm(total, mixed, matrix, out=total)
            else:
                total.add_(contractions.project_each(mixed[None], matrix[None], groups)[:, 0])
        part.copy_(total.view(part.shape))
    return out


def pull_long(inputs: Sequence[Tensor], gradient: Outputs, wanted: Sequence[bool]) -> Gradients:
    """Compute the `wanted` gradients of x, the weights and the factors, one block at a time."""
    x, weight, *factors = inputs
    exact = score_dtype(x.dtype)  # sum blocks in at least float32
    totals = [torch.zeros_like(each, dtype=exact) if want else None for each, want in zip(inputs, wanted, strict=True)]
    to_x, to_weight, *to_factors = totals
    groups, moving = x.shape[-1] // weight.shape[1], any(wanted[2:])
    for queries, keys, views in blocks(x, weight, factors):
        part = gradient[queries].flatten(0, -2)  # (points, d)
        for view in views:
            steps: list[Tensor] = []
            if moving or to_weight is not None:
                mixed, steps = _mix(x[keys], factors, view)
                if to_weight is not None:
                    contractions.add_project_gradient(to_weight[view.head, None], mixed[None], part[None], groups)
                del mixed
            if moving or to_x is not None:
                back = contractions.project_back(part, weight[view.head, None], groups)[0]
                _unmix(back, factors, view, steps, None if to_x is None else to_x[keys], to_factors)
    return tuple(None if total is None else total.to(x.dtype) for total in totals)


def _mix(images: Tensor, factors: Sequence[Tensor], view: View) -> tuple[Float[Tensor, "points c"], list[Tensor]]:
    """Compute M for a block and a head, with row-major points, and return it with the input of each axis."""
    part, steps = images[:, view.keys], []
    for dim, (factor, place, tiles) in enumerate(zip(factors, view.places, view.tiles, strict=True), start=1):
        steps.append(part)
        matrix, flat = factor[place], _flat(part, dim)
        mixed = [_each(matrix[queries, keys], flat[:, keys]) for queries, keys in tiles]
        whole = mixed[0] if len(mixed) == 1 else torch.cat(mixed, 1)
        part = whole.view(*part.shape[:dim], len(matrix), *part.shape[dim + 1 :])
    return part.flatten(0, -2), steps


def _unmix(
    gradient: Float[Tensor, "points c"],
    factors: Sequence[Tensor],
    view: View,
    steps: Sequence[Tensor],
    to_images: Tensor | None,
    to_factors: Sequence[Tensor | None],
) -> None:
    """Propagate the gradient of M back through all axes, adding to the gradients of images and factors."""
    matrices = [factor[place] for factor, place in zip(factors, view.places, strict=True)]
    part = gradient.view(-1, *(len(matrix) for matrix in matrices), gradient.shape[-1])
    for dim in range(len(factors), 0, -1):
        matrix, tiles, total = matrices[dim - 1], view.tiles[dim - 1], to_factors[dim - 1]
        flat = _flat(part, dim)
        if total is not None:
            into, mixed = total[view.places[dim - 1]], _flat(steps[dim - 1], dim)
            for queries, keys in tiles:
                _add_products(into[queries, keys], flat[:, queries], mixed[:, keys])
        if dim == 1 and to_images is None:
            return
        if len(tiles) == 1 and tiles[0][1] == slice(0, matrix.shape[1]):
            back = _each(matrix.mT, flat)
        else:
            back = flat.new_zeros((len(flat), matrix.shape[1], flat.shape[2]))
            for queries, keys in tiles:
                back[:, keys].add_(_each(matrix[queries, keys].mT, flat[:, queries]))
        part = back.view(*part.shape[:dim], -1, *part.shape[dim + 1 :])
    if to_images is not None:
        to_images[:, view.keys].add_(part)


def _each(matrix: Float[Tensor, "q k"], parts: Float[Tensor, "p k rest"]) -> Float[Tensor, "p q rest"]:
    """Multiply every part by the same matrix; `matmul` would transpose the parts and copy the product."""
    return torch.bmm(matrix.expand(len(parts), -1, -1), parts)


def _flat(part: Tensor, dim: int) -> Float[Tensor, "p k rest"]:
    """Flatten all axes before `dim` into one and all axes after it into another."""
    return part.flatten(dim + 1).flatten(0, dim - 1)


def _add_products(
    into: Float[Tensor, "q k"], left: Float[Tensor, "p q rest"], right: Float[Tensor, "p k rest"]
) -> None:
    """Add the sum of left right^T over the parts, with at most one block of products at a time."""
    row, queries = left.element_size() * right.shape[1], left.shape[1]
    most = max(block_sizes.block_bytes(left.device.type) // row, 1)
    for rows in block_sizes.spans(queries, most):
        for chosen in block_sizes.spans(len(left), max(most // queries, 1)):
            products = torch.bmm(left[chosen, rows], right[chosen].mT)
            into[rows].add_(products.sum(0, dtype=into.dtype))


def strips(factors: Sequence[Tensor]) -> Sequence[Tile]:
    """Split the columns of a wide image into strips with their ranges of keys; one strip if splitting saves little."""
    whole = [(slice(None), slice(None))]
    if len(factors) < 2 or min(factors[1].shape[1:]) < 2 * block_sizes.STRIP:
        return whole
    queries, keys = factors[1].shape[1:]
    bands, found = Bands.of(factors[1]), []
    for part in block_sizes.spans(queries, block_sizes.STRIP):
        seen = [bands.keys(head, part) for head in range(len(factors[1]))]
        found.append((part, slice(min(one.start for one in seen), max(one.stop for one in seen))))
    narrow = sum(seen.stop - seen.start for _, seen in found) < 1.25 * keys
    return found if narrow else whole


def blocks(x: Tensor, weight: Tensor, factors: Sequence[Tensor]) -> Iterator[tuple[Any, Any, list[View]]]:
    """Yield blocks of about `block_bytes`: indices (images, rows, strip) of queries and keys, and a view per head."""
    heads, count = weight.shape[0], factors[0].shape[1]
    channels = max(heads * x.shape[-1], weight.shape[2])  # of mixed values or of their projection
    most = block_sizes.block_bytes(x.device.type, long=True) // x.element_size()
    first = Bands.of(factors[0])
    for strip in strips(factors):
        around = [part[:, strip[0], strip[1]] if dim == 0 else part for dim, part in enumerate(factors[1:])]
        per_row = math.prod(factor.shape[1] for factor in around) * channels
        images, height = max(most // (count * per_row), 1), count
        if count * per_row > 2 * most:
            images, height = 1, min(max(most // per_row, block_sizes.LEAST_ROWS), count)
        bands = [Bands.of(factor) for factor in around]
        tiles = [[band.tiles(head) for band in bands] for head in range(heads)]
        for rows in block_sizes.spans(count, height):
            views = []
            for head in range(heads):
                keys = first.keys(head, rows)
                whole = (slice(0, rows.stop - rows.start), slice(0, keys.stop - keys.start))
                places = [(head, rows, keys), (head, *strip), head][: len(factors)]
                views.append(View(head, keys, places, [[whole], *tiles[head]]))
            for some in block_sizes.spans(x.shape[0], images):
                yield (some, rows, strip[0]), (some, slice(None), strip[1]), views


@final
@dataclass(frozen=True)
class Bands:
    """Range of keys with non-zero weights, from `low` up to but not including `high`, per head and query of an axis."""

    low: list[list[int]]
    high: list[list[int]]
    size: int

    @staticmethod
    def of(factor: Float[Tensor, "h q k"]) -> "Bands":
        """Find the ranges of a long axis from its values; short axes use all keys, queries without weights use none."""
        heads, queries, size = factor.shape
        if size < block_sizes.LONG_AXIS:
            return Bands([[0] * queries] * heads, [[size] * queries] * heads, size)
        held = factor != 0
        some = held.any(-1)
        low = torch.where(some, held.to(torch.uint8).argmax(-1), size)
        high = torch.where(some, size - held.flip(-1).to(torch.uint8).argmax(-1), 0)
        return Bands(low.tolist(), high.tolist(), size)

    def keys(self, head: int, queries: slice) -> slice:
        """Return the range of keys of the given queries; if it is empty, return one key, whose weight is 0."""
        low, high = min(self.low[head][queries]), max(self.high[head][queries])
        return slice(low, high) if low < high else slice(0, 1)

    def tiles(self, head: int) -> tuple[Tile, ...]:
        """Return tiles of neighbouring queries, or a single tile if they would cover at least half of the matrix."""
        queries = len(self.low[head])
        found = tuple((part, self.keys(head, part)) for part in block_sizes.spans(queries, block_sizes.BAND_TILE))
        area = sum((keys.stop - keys.start) * (part.stop - part.start) for part, keys in found)
        return found if area < queries * self.size / 2 else ((slice(0, queries), slice(0, self.size)),)
