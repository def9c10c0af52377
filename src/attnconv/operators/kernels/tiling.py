"""How a contraction with long axes is cut: strips of wide images, blocks that stay in cache, bands of keys per head.

Nothing is approximated: what lies outside a band is zero.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

# Bytes of M for all heads in a block. A processor's cache holds 4 MiB, and a call costs it little.
BLOCK = 2**22
# A GPU's memory is fast and its launches are slow: a product over 16 MiB takes it about as long as the launch, 10 us at
# 3 TB/s. More would gain nothing, and cost the lead in memory: the backward pass holds three tensors of a block, and at
# 32 x 32 the whole of M is no more than the dense form keeps. By data sheets; not measured.
DEVICE_BLOCK = 2**24
# Long axes go head by head and tile by tile: a launch sees a hundredth of a block, and one head's part is held.
LONG_DEVICE_BLOCK = 2**28
LEAST_ROWS = 16  # queries of the first axis in a block, at least: fewer make thin products
LONG_AXIS = 96  # keys from which on a factor is cut into the bands of its heads
TILE = 32  # queries of a long axis that share a range of keys
STRIP = 256  # columns of a wide image that are contracted at a time, so that rows of blocks stay in cache too


@dataclass(frozen=True)
class Tile:
    """Some queries of an axis, and the range of keys that holds all of their weights."""

    queries: slice
    keys: slice


@dataclass(frozen=True)
class View:
    """What a head looks at from a block: its keys along the first axis, and its tiles along the others."""

    head: int
    keys: slice
    tiles: tuple[tuple[Tile, ...], ...]


@dataclass(frozen=True)
class Block:
    """Images and queries of the first axis that are mixed at a time."""

    images: slice
    rows: slice
    views: tuple[View, ...]


def block_bytes(x: Tensor, *, long: bool = False) -> int:
    """How many bytes of mixed pixels a block of an image has, on short axes or on long ones."""
    return block_bytes_on(x.device.type, long=long)


def block_bytes_on(device: str, *, long: bool = False) -> int:
    """The same on a kind of device: `cpu`, `cuda`, .."""
    if device == "cpu":
        return BLOCK
    return LONG_DEVICE_BLOCK if long else DEVICE_BLOCK


def are_short(factors: Sequence[Tensor]) -> bool:
    """Whether no axis is long enough for bands."""
    return all(factor.shape[2] < LONG_AXIS for factor in factors)


def strips(factors: Sequence[Tensor]) -> Sequence[Tile]:
    """Columns of a wide image with the keys that they meet; a single strip of all where none would be narrow.

    A row of a wide image does not fit in the cache with the rows around it.
    """
    whole = [Tile(slice(None), slice(None))]
    if len(factors) < 2 or min(factors[1].shape[1:]) < 2 * STRIP:
        return whole
    queries, keys = factors[1].shape[1:]
    bands, found = Bands.of(factors[1]), []
    for start in range(0, queries, STRIP):
        part = slice(start, min(start + STRIP, queries))
        met = [bands.keys(head, part) for head in range(len(factors[1]))]
        found.append(Tile(part, slice(min(one.start for one in met), max(one.stop for one in met))))
    narrow = sum(strip.keys.stop - strip.keys.start for strip in found) < 1.25 * keys
    return found if narrow else whole


def within(factors: Sequence[Tensor], strip: Tile) -> list[Tensor]:
    """The factors of a strip."""
    return [factor[:, strip.queries, strip.keys] if dim == 1 else factor for dim, factor in enumerate(factors)]


def blocks(x: Tensor, weight: Tensor, factors: Sequence[Tensor]) -> Iterator[Block]:
    """The whole problem, in parts whose M takes about `BLOCK` bytes: whole images, or rows of queries of one."""
    heads, rows = weight.shape[0], factors[0].shape[1]
    channels = max(heads * x.shape[-1], weight.shape[2])  # of M, or of what it is projected to
    per_row = math.prod(factor.shape[1] for factor in factors[1:]) * channels
    bands = [Bands.of(factor) if factor.shape[2] >= LONG_AXIS else None for factor in factors]
    most = block_bytes(x, long=True) // x.element_size()
    if rows * per_row <= 2 * most:
        images, height = max(most // (rows * per_row), 1), rows
    else:
        images, height = 1, min(max(most // per_row, LEAST_ROWS), rows)
    tiles = [_head_tiles(factors[1:], bands[1:], head) for head in range(heads)]
    for start in range(0, rows, height):
        part = slice(start, min(start + height, rows))
        first, every = bands[0], slice(0, factors[0].shape[2])
        views = tuple(
            View(head, every if first is None else first.keys(head, part), tiles[head]) for head in range(heads)
        )
        for image in range(0, x.shape[0], images):
            yield Block(slice(image, min(image + images, x.shape[0])), part, views)


def _head_tiles(factors: Sequence[Tensor], bands: Sequence["Bands | None"], head: int) -> tuple[tuple[Tile, ...], ...]:
    found = []
    for factor, band in zip(factors, bands, strict=True):
        queries, keys = slice(0, factor.shape[1]), slice(0, factor.shape[2])
        found.append((Tile(queries, keys),) if band is None else band.tiles(head, factor.shape[1], keys.stop))
    return tuple(found)


@final
@dataclass(frozen=True)
class Bands:
    """Per head and query of an axis, the first and one behind the last key with any weight."""

    low: list[list[int]]
    high: list[list[int]]

    @staticmethod
    def of(factor: Float[Tensor, "h q k"]) -> "Bands":
        """By looking at the values; a query without any weight has an empty range."""
        held = factor != 0
        size = factor.shape[2]
        some = held.any(-1)
        low = torch.where(some, held.to(torch.uint8).argmax(-1), size)
        high = torch.where(some, size - held.flip(-1).to(torch.uint8).argmax(-1), 0)
        return Bands(low.tolist(), high.tolist())

    def keys(self, head: int, queries: slice) -> slice:
        """The range of keys of some queries; one key, without weight, where it would be empty."""
        low, high = min(self.low[head][queries]), max(self.high[head][queries])
        return slice(low, high) if low < high else slice(0, 1)

    def tiles(self, head: int, queries: int, keys: int) -> tuple[Tile, ...]:
        """Tiles of neighbouring queries; a single one where the head looks at most of the axis anyway."""
        found = []
        for start in range(0, queries, TILE):
            part = slice(start, min(start + TILE, queries))
            found.append(Tile(part, self.keys(head, part)))
        met = sum((t.keys.stop - t.keys.start) * (t.queries.stop - t.queries.start) for t in found)
        return tuple(found) if met < queries * keys / 2 else (Tile(slice(0, queries), slice(0, keys)),)
