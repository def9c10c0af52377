"""How a contraction with long axes is split: strips of wide images, blocks that fit in cache, bands per head."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from attnconv.operators.kernels import block_sizes


@dataclass(frozen=True)
class Tile:
    """Some queries of an axis, and the range of keys that holds all of their weights."""

    queries: slice
    keys: slice


@dataclass(frozen=True)
class View:
    """The keys that a head attends to from a block: along the first axis, and in tiles along the others."""

    head: int
    keys: slice
    tiles: tuple[tuple[Tile, ...], ...]


@dataclass(frozen=True)
class Block:
    """Images and queries of the first axis that are mixed at a time."""

    images: slice
    rows: slice
    views: tuple[View, ...]


def block_bytes(device: str, *, long: bool = False) -> int:
    """Bytes of mixed values in a block on a kind of device (`cpu`, `cuda`, ..), on short axes or on long ones."""
    if device == "cpu":
        return block_sizes.KRONECKER_BLOCK
    return block_sizes.KRONECKER_LONG_BLOCK_GPU if long else block_sizes.KRONECKER_BLOCK_GPU


def are_short(factors: Sequence[Tensor]) -> bool:
    """Whether no axis is long enough for bands."""
    return all(factor.shape[2] < block_sizes.LONG_AXIS for factor in factors)


def strips(factors: Sequence[Tensor]) -> Sequence[Tile]:
    """Columns of a wide image with the keys that they attend to; one strip of all where none would be narrow."""
    whole = [Tile(slice(None), slice(None))]
    if len(factors) < 2 or min(factors[1].shape[1:]) < 2 * block_sizes.STRIP:
        return whole
    queries, keys = factors[1].shape[1:]
    bands, found = Bands.of(factors[1]), []
    for part in spans(queries, block_sizes.STRIP):
        seen = [bands.keys(head, part) for head in range(len(factors[1]))]
        found.append(Tile(part, slice(min(one.start for one in seen), max(one.stop for one in seen))))
    narrow = sum(strip.keys.stop - strip.keys.start for strip in found) < 1.25 * keys
    return found if narrow else whole


def within(factors: Sequence[Tensor], strip: Tile) -> list[Tensor]:
    """The factors of a strip."""
    return [factor[:, strip.queries, strip.keys] if dim == 1 else factor for dim, factor in enumerate(factors)]


def blocks(x: Tensor, weight: Tensor, factors: Sequence[Tensor]) -> Iterator[Block]:
    """The whole problem in blocks of about `block_bytes`: whole images, or rows of queries of one."""
    heads, rows = weight.shape[0], factors[0].shape[1]
    channels = max(heads * x.shape[-1], weight.shape[2])  # of the mixed values, or of their projection
    per_row = math.prod(factor.shape[1] for factor in factors[1:]) * channels
    most = block_bytes(x.device.type, long=True) // x.element_size()
    images, height = max(most // (rows * per_row), 1), rows
    if rows * per_row > 2 * most:
        images, height = 1, min(max(most // per_row, block_sizes.LEAST_ROWS), rows)
    bands = [Bands.of(factor) for factor in factors]
    tiles = [tuple(band.tiles(head) for band in bands[1:]) for head in range(heads)]
    for part in spans(rows, height):
        views = tuple(View(head, bands[0].keys(head, part), tiles[head]) for head in range(heads))
        for some in spans(x.shape[0], images):
            yield Block(some, part, views)


def spans(count: int, length: int) -> list[slice]:
    """`count` places in parts of `length`, the last one shorter."""
    return [slice(start, min(start + length, count)) for start in range(0, count, length)]


@final
@dataclass(frozen=True)
class Bands:
    """Per head and query of an axis, the first and one behind the last key with any weight."""

    low: list[list[int]]
    high: list[list[int]]
    size: int

    @staticmethod
    def of(factor: Float[Tensor, "h q k"]) -> "Bands":
        """Read from the values of a long axis; all keys of a short one. A query without weight has an empty range."""
        heads, queries, size = factor.shape
        if size < block_sizes.LONG_AXIS:
            return Bands([[0] * queries] * heads, [[size] * queries] * heads, size)
        held = factor != 0
        some = held.any(-1)
        low = torch.where(some, held.to(torch.uint8).argmax(-1), size)
        high = torch.where(some, size - held.flip(-1).to(torch.uint8).argmax(-1), 0)
        return Bands(low.tolist(), high.tolist(), size)

    def keys(self, head: int, queries: slice) -> slice:
        """The range of keys of some queries; one key, without weight, where it would be empty."""
        low, high = min(self.low[head][queries]), max(self.high[head][queries])
        return slice(low, high) if low < high else slice(0, 1)

    def tiles(self, head: int) -> tuple[Tile, ...]:
        """Tiles of neighbouring queries; a single one where the head attends to most of the axis anyway."""
        queries = len(self.low[head])
        found = tuple(Tile(part, self.keys(head, part)) for part in spans(queries, block_sizes.BAND_TILE))
        area = sum((t.keys.stop - t.keys.start) * (t.queries.stop - t.queries.start) for t in found)
        return found if area < queries * self.size / 2 else (Tile(slice(0, queries), slice(0, self.size)),)
