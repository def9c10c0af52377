"""Arrange the tokens of one attention call on the grid of the image, from their positions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnconv.grid import Axis, Grid
from attnconv.inspect.attention_calls import UnreadableError
from attnconv.inspect.position_codes import NONE, SEVERAL, PositionCodes, line
from attnconv.inspect.token_positions import CHANNELS


@final
@dataclass(frozen=True, eq=False)
class TokenWindows:
    """Keys of each sequence, arranged in a window: the product of their positions along each axis, row-major."""

    # Positions of the keys along each axis, ascending; smaller windows end with -1.
    lines: tuple[Int[Tensor, "s _"], ...]
    cells: Int[Tensor, "s m"]  # index in the window of each key; the number of cells for other tokens
    keys: Int[Tensor, "s _"]  # index in the image of each cell's key; the number of keys for empty cells

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(line.shape[1] for line in self.lines)


@final
@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Positions of the tokens of one attention call in the image.

    A call has one sequence for each image, window and head. If each sequence contains all tokens of an image, `windows`
    is None.
    """

    grid: Grid
    places: Int[Tensor, "b h q"]  # of each query of the image: sequence * tokens + index in the sequence
    prefix: int = 0  # number of tokens before the image's tokens, without windows: class tokens, registers
    suffix: int = 0  # number of tokens after them, without windows: detection tokens
    windows: TokenWindows | None = None


def layout_of(
    codes: PositionCodes, queries: Float[Tensor, "s n"], keys: Float[Tensor, "s m"], images: int
) -> TokenLayout:
    """Return the layout of an attention call, given the positions of its queries and keys.

    Raises:
        UnreadableError: If not every query of the image attends exactly once per head to the keys of its own image.
    """
    query, key = (_Tokens.of(codes, each, name) for each, name in ((queries, "queries"), (keys, "keys")))
    grid = _grid(query.axes, key.axes)
    count, tokens = grid.query_count, queries.shape[1]
    inside = (query.index >= 0).flatten().nonzero().squeeze(1)
    token = (query.image * count + query.index).flatten()[inside]
    found, heads = token.bincount(minlength=images * count), len(inside) // (images * count)
    if bool((found != heads).any()):
        times = f"from {int(found.min())} to {int(found.max())} times"
        raise UnreadableError(f"it does not use all queries equally often, but {times}")
    places = inside[token.argsort(stable=True)].reshape(images, count, heads).transpose(1, 2)
    sequences = places // tokens
    if bool((sequences[:, 1:] == sequences[:, :-1]).any()):
        raise UnreadableError(CHANNELS if count == 1 else "a query occurs several times in a sequence")
    _, same = torch.unique(key.index, dim=0, return_inverse=True)
    if bool((same[sequences[:, 1:]] != same[sequences[:, :1]]).any()):
        raise UnreadableError("a query attends to several sets of keys, each with a softmax of its own")
    own = query.image.amax(1, keepdim=True)
    if bool((key.image.where(key.index >= 0, own) != own)[(query.index >= 0).any(1)].any()):
        raise UnreadableError("its queries attend to keys of other images")
    before = int((key.index[0] >= 0).to(torch.int8).argmax())
    all_keys, all_queries = (torch.arange(number, device=queries.device) for number in (grid.key_count, count))
    starts = tokens * torch.arange(images * heads, device=queries.device).reshape(images, heads, 1) + before
    ordered = torch.full_like(key.index[:1], -1)
    ordered[0, before : before + len(all_keys)] = all_keys[: ordered.shape[1] - before]
    if bool((key.index == ordered).all()) and torch.equal(places, starts + all_queries):
        return TokenLayout(grid, places, before, keys.shape[1] - before - len(all_keys))
    if bool((same[sequences] != same[sequences[:1]]).any()):
        raise UnreadableError("its queries attend to different keys in different images")
    return TokenLayout(grid, places, windows=_windows(grid, key.index))


@final
@dataclass(frozen=True, eq=False)
class _Tokens:
    """Queries or keys of an attention call."""

    axes: list[tuple[float, float, int]]  # first position, step and number of tokens of each axis
    index: Int[Tensor, "s n"]  # in the image, row-major; -1 for other tokens
    image: Int[Tensor, "s n"]

    @staticmethod
    def of(codes: PositionCodes, places: Float[Tensor, "s n"], name: str) -> "_Tokens":
        shown = places > NONE
        if bool((places == SEVERAL).any()):
            raise UnreadableError(
                f"its {name} combine different positions, or it attends to channels instead of tokens"
            )
        if not bool(shown.any()):
            raise UnreadableError(f"none of its {name} is a token of the image")
        image, *parts = codes.read(places)
        axes, index = [], torch.zeros_like(places)
        for part in parts:
            values = part[shown].unique()
            size, (first, step) = len(values), (float(each) for each in line(values, 0))
            step = step or 1.0
            # Tokens at the border may be up to half a step off, if their patch is partly padding.
            off = values - first - step * torch.arange(size).to(values)
            if bool((off.abs() > max(1.0, step / 2)).any()):
                raise UnreadableError(f"the positions of its {name} are not on a regular grid")
            axes.append((first, step, size))
            index = index * size + ((part - first) / step).round()
        count = math.prod(size for *_, size in axes)
        if len(index[shown].unique()) != count:
            raise UnreadableError(f"its {name} are only a part of a grid with {count} tokens")
        return _Tokens(axes, index.where(shown, -1).long(), image.where(shown, 0).long())


def _grid(queries: Sequence[tuple[float, float, int]], keys: Sequence[tuple[float, float, int]]) -> Grid:
    """Return the grid; tokens outside the image count as padding, and the grid itself has none."""
    axes = []
    for (start, step, count), (first, apart, size) in zip(queries, keys, strict=True):
        step, apart = (step if count > 1 else apart), (apart if size > 1 else step)
        stride, finer = max(1, round(step / apart)), max(1, round(apart / step))
        if not math.isclose(stride * apart, finer * step, rel_tol=0.02):
            raise UnreadableError(f"its queries are {step / apart:.3g} times as far apart as its keys")
        # In units of the smaller step, rounded; a query between two keys is counted at the nearest one.
        offset = math.floor((start - first) / min(step, apart) + max(1, finer) / 2)
        axes.append(Axis(size, count, stride, offset, border="zero", finer=finer))
    return Grid(tuple(axes))


def _windows(grid: Grid, keys: Int[Tensor, "s m"]) -> TokenWindows:
    """Arrange the keys of each sequence in a window."""
    lines: list[Tensor] = []
    cells, count, rest = torch.zeros_like(keys), 1, keys
    for size in reversed(grid.sizes):
        place = torch.where(keys >= 0, rest % size, size)
        present = torch.zeros(len(keys), size + 1, dtype=torch.bool, device=keys.device).scatter_(1, place, True)
        length = int(present[:, :size].sum(1).max())
        first = present[:, :size].to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, :length]
        lines.insert(0, first.where(present.gather(1, first), -1))
        number = (present.cumsum(1) - 1).gather(1, place)
        cells, count = cells + number * count, count * length
        rest = torch.div(rest, size, rounding_mode="floor")
    cells = cells.where(keys >= 0, count)
    found = torch.full((len(keys), count + 1), grid.key_count, device=keys.device).scatter_(1, cells, keys)
    return TokenWindows(tuple(lines), cells, found[:, :count])
