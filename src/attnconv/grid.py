"""Positions of queries and keys: the geometry that every attention operator shares.

Along one axis an image has m keys, `spacing` apart, and query i is at `stride * i + offset`. The *shift* is key
position minus query position. The **lattice** is the ordered list of all positions that take part in the softmax; the
border rule decides what its points hold:

    renormalise   lattice = the image's keys; rows over them sum to 1 (the paper's softmax)
    zero          lattice = keys, gaps and padding; gaps and padding hold zeros but take their share of the softmax
    replicate     lattice = keys and padding; a padding point is a copy of the nearest key
    reflect       ... of the key mirrored at the edge (the edge itself not repeated)
    circular      ... of the key one period away

The lattice of an image is the product of its axes' lattices, and *folding* lattice probabilities onto image keys works
axis by axis. `docs/grid.md` states this as formulas; `tests/laws.py` tests them.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, SupportsIndex, TypeAlias, cast, get_args

import torch
from torch import Tensor

from attnconv._util.errors import bad
from attnconv._util.value_checks import is_index

Border: TypeAlias = Literal["renormalise", "zero", "replicate", "reflect", "circular"]
BORDERS: tuple[Border, ...] = get_args(Border)
Padding: TypeAlias = int | Sequence[int] | Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Axis:
    """One axis of a grid: `queries` query points over `size` keys."""

    size: int  # number of image keys m, at least 1
    queries: int  # number of queries n, at least 1
    stride: int = 1  # distance between neighbouring queries
    offset: int = 0  # position of the first query
    padding: tuple[int, int] = (0, 0)  # lattice points before the first and after the last key
    spacing: int = 1  # distance between neighbouring keys; above 1 for transposed convolutions
    border: Border = "renormalise"  # what the lattice points that are not image keys hold

    def __post_init__(self) -> None:
        if self.spacing > 1 and self.border != "zero":
            raise ValueError(bad("border", "must be 'zero' where keys have gaps between them", repr(self.border)))

    @property
    def lattice_size(self) -> int:
        """Number of positions that take part in the softmax."""
        if self.border == "renormalise":
            return self.size
        return self.spacing * (self.size - 1) + 1 + self.padding[0] + self.padding[1]

    def query_positions(self, device: torch.device | None = None) -> Tensor:
        """Positions of the queries, (n,) int64: stride * i + offset."""
        return torch.arange(self.offset, self.offset + self.stride * self.queries, self.stride, device=device)

    def lattice_positions(self, device: torch.device | None = None) -> Tensor:
        """Positions of the lattice points in order, (lattice,) int64."""
        if self.border == "renormalise":
            return torch.arange(0, self.spacing * self.size, self.spacing, device=device)
        return torch.arange(-self.padding[0], self.lattice_size - self.padding[0], device=device)

    def shifts(self, device: torch.device | None = None) -> Tensor:
        """Lattice position minus query position, (n, lattice) int64."""
        return self.lattice_positions(device)[None, :] - self.query_positions(device)[:, None]

    @property
    def shift_count(self) -> int:
        """Number of different shifts: those of `all_shifts`."""
        return self.lattice_size + self.stride * (self.queries - 1)

    def all_shifts(self, device: torch.device | None = None) -> Tensor:
        """Every shift that occurs, ascending, int64."""
        first = 0 if self.border == "renormalise" else -self.padding[0]
        last_query = self.offset + self.stride * (self.queries - 1)
        return torch.arange(first - last_query, first - last_query + self.shift_count, device=device)

    def windows(self, queries: Tensor) -> Tensor:
        """Places in `all_shifts` of the shifts of queries (r,), (r, lattice): from stride * (n - 1 - query) on."""
        starts = self.stride * (self.queries - 1 - queries)
        return starts[:, None] + torch.arange(self.lattice_size, device=queries.device)

    def sources(self, positions: Tensor) -> Tensor:
        """The image key that each position of the lattice shows, int64, -1 where it holds zeros."""
        if self.border in ("renormalise", "zero"):
            key = torch.div(positions, self.spacing, rounding_mode="floor")
            shown = (positions % self.spacing == 0) & (key >= 0) & (key < self.size)
            return torch.where(shown, key, -1)
        if self.border == "replicate":
            return positions.clamp(0, self.size - 1)
        if self.border == "circular":
            return positions % self.size
        period = max(2 * (self.size - 1), 1)
        mirrored = positions % period
        return torch.where(mirrored < self.size, mirrored, period - mirrored)

    def fold(self, probabilities: Tensor) -> Tensor:
        """Lattice probabilities (..., lattice) -> probabilities of the image's keys (..., m)."""
        if self.border == "renormalise":
            return probabilities
        if self.border == "zero":
            first, last = self.padding[0], self.padding[0] + self.spacing * (self.size - 1) + 1
            return probabilities[..., first : last : self.spacing]
        sources = self.sources(self.lattice_positions(probabilities.device))
        folded = probabilities.new_zeros((*probabilities.shape[:-1], self.size))
        return folded.index_add(-1, sources, probabilities)

    def empty_mass(self, probabilities: Tensor) -> Tensor:
        """Mass of lattice probabilities (..., lattice) on points that hold zeros, (...)."""
        if self.border != "zero":
            return probabilities.new_zeros(probabilities.shape[:-1])
        empty = self.sources(self.lattice_positions(probabilities.device)) < 0
        return (probabilities * empty).sum(-1)

    def take(self, image: Tensor, dim: int, positions: Tensor) -> Tensor:
        """`image` at the lattice's `positions` (l,) along its axis `dim`; outside the lattice its nearest point."""
        lattice = self.lattice_positions(positions.device)
        sources = self.sources(positions.clamp(lattice[0], lattice[-1]))
        if self.border != "zero":
            return image.index_select(dim, sources)
        zero = torch.zeros_like(image.narrow(dim, 0, 1))
        return torch.cat((image, zero), dim).index_select(dim, torch.where(sources < 0, self.size, sources))


@dataclass(frozen=True)
class Grid:
    """Queries over keys in one, two or three dimensions: the product of its axes, row-major (height before width).

    Example:
        >>> grid = Grid.make((5, 4), stride=2)
        >>> grid.sizes, grid.query_sizes, grid.query_count
        ((5, 4), (3, 2), 6)
    """

    axes: tuple[Axis, ...]

    @staticmethod
    def make(
        sizes: Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        padding: Padding = 0,
        border: Border = "renormalise",
        window: Sequence[int] | None = None,
    ) -> "Grid":
        """The grid of a layer over an image.

        A free layer has ceil(m / stride) queries per axis, whatever the padding; with a `window`, as many as that
        convolution has outputs: (m + padding_before + padding_after - window) // stride + 1.

        Args:
            sizes: Keys per axis, each at least 1.
            stride: Distance between queries, at least 1; one number or one per axis.
            padding: Points added to the lattice, at least 0: one number, one per axis, or (before, after) per axis.
            border: One of `renormalise`, `zero`, `replicate`, `reflect`, `circular`.
            window: Extent dilation * (kernel - 1) + 1 of a kernel per axis, or None for a free layer.

        Raises:
            ValueError: An axis without a pixel, or a window larger than the padded image.
        """
        strides = per_axis("stride", stride, len(sizes), least=1)
        paddings = padding_pairs(padding, len(sizes))
        check_border(border)
        axes = []
        _check_pixels(sizes)
        for axis, (size, step, pad) in enumerate(zip(sizes, strides, paddings, strict=True)):
            queries = -(-size // step) if window is None else (size + pad[0] + pad[1] - window[axis]) // step + 1
            if queries < 1:
                got = f"window {tuple(window or ())} over an image of {tuple(sizes)} padded by {paddings}"
                fix = "Use a larger image or padding."
                raise ValueError(bad("window", "must not exceed the padded image", got, fix))
            axes.append(Axis(size=size, queries=queries, stride=step, padding=pad, border=border))
        return Grid(tuple(axes))

    @staticmethod
    def transposed(
        sizes: Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        padding: Padding = 0,
        output_padding: int | Sequence[int] = 0,
        window: Sequence[int],
    ) -> "Grid":
        """The grid of a transposed convolution: keys are `stride` apart, with zeros between them.

        Per axis there are stride * (m - 1) + window - padding_before - padding_after + output_padding queries: padding
        is cut off the output, and output_padding, at least 0, comes after it. The rest is as for `make`.

        Raises:
            ValueError: An axis without a pixel, or a padding that leaves no output.
        """
        strides = per_axis("stride", stride, len(sizes), least=1)
        extras = per_axis("output_padding", output_padding, len(sizes), least=0)
        paddings = padding_pairs(padding, len(sizes))
        axes = []
        _check_pixels(sizes)
        for size, step, (before, after), extra, extent in zip(sizes, strides, paddings, extras, window, strict=True):
            queries = step * (size - 1) + extent - before - after + extra
            if queries < 1:
                got = f"padding {(before, after)} of {queries + before + after} outputs"
                raise ValueError(bad("padding", "must leave at least one output", got))
            around = (max(extent - 1 - before, 0), max(extent - 1 - after + extra, 0))
            axes.append(Axis(size=size, queries=queries, padding=around, spacing=step, border="zero"))
        return Grid(tuple(axes))

    @property
    def dims(self) -> int:
        """Number of axes."""
        return len(self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Image keys per axis."""
        return tuple(axis.size for axis in self.axes)

    @property
    def query_sizes(self) -> tuple[int, ...]:
        """Queries per axis."""
        return tuple(axis.queries for axis in self.axes)

    @property
    def lattice_sizes(self) -> tuple[int, ...]:
        """Lattice points per axis."""
        return tuple(axis.lattice_size for axis in self.axes)

    @property
    def key_count(self) -> int:
        """Number of image keys."""
        return math.prod(self.sizes)

    @property
    def query_count(self) -> int:
        """Number of queries."""
        return math.prod(self.query_sizes)

    @property
    def lattice_count(self) -> int:
        """Number of lattice points."""
        return math.prod(self.lattice_sizes)

    def unravel(self, queries: Tensor) -> tuple[Tensor, ...]:
        """Flat row-major query indices (r,) -> one index per axis, each (r,)."""
        indices: list[Tensor] = []
        for axis in reversed(self.axes):
            indices.append(queries % axis.queries)
            queries = torch.div(queries, axis.queries, rounding_mode="floor")
        return tuple(reversed(indices))

    def fold(self, probabilities: Tensor) -> Tensor:
        """Joint lattice probabilities (..., lattice points) -> (..., image keys)."""
        folded = probabilities.unflatten(-1, self.lattice_sizes)
        for dim, axis in zip(range(-self.dims, 0), self.axes, strict=True):
            folded = axis.fold(folded.movedim(dim, -1)).movedim(-1, dim)
        return folded.flatten(-self.dims)

    def empty(self, device: torch.device | None = None) -> Tensor:
        """Which lattice points hold zeros, (lattice points,) bool."""
        shown = torch.ones((), dtype=torch.bool, device=device)
        for axis in self.axes:
            filled = axis.sources(axis.lattice_positions(device)) >= 0
            shown = (shown[..., None] & filled).flatten()
        return ~shown

    def extend(self, image: Tensor) -> Tensor:
        """What every lattice point shows: (..., *sizes, c) -> (..., *lattice sizes, c)."""
        for dim, axis in zip(range(-self.dims - 1, -1), self.axes, strict=True):
            if axis.border != "renormalise":
                image = axis.take(image, dim, axis.lattice_positions(image.device))
        return image

    def at_queries(self, image: Tensor) -> Tensor:
        """The pixels under the queries: (..., *sizes, c) -> (..., *query sizes, c); ValueError if there is none."""
        for dim, axis in zip(range(-self.dims - 1, -1), self.axes, strict=True):
            last = axis.stride * (axis.queries - 1) + axis.offset
            if not torch.compiler.is_compiling() and (axis.offset < 0 or last >= axis.size or axis.spacing > 1):
                requirement, fix = "content-based scores need every query on a pixel", "Use a position-only encoding."
                got = f"queries from {axis.offset} to {last} over {axis.size} pixels {axis.spacing} apart"
                raise ValueError(bad("encoding", requirement, got, fix))
            if axis.stride > 1 or axis.offset > 0 or axis.queries != axis.size:
                image = image.index_select(dim, axis.query_positions(image.device))
        return image


def per_axis(name: str, value: int | Sequence[int], dims: int, *, least: int) -> tuple[int, ...]:
    """One whole number per axis, each at least `least`; a single number serves every axis."""
    given = tuple(value) if isinstance(value, Sequence) else (value,) * dims
    if len(given) != dims or not all(is_index(v) and _plain(v) >= least for v in given):
        requirement = f"must be a whole number of at least {least}, or one for each of {dims} axes"
        raise ValueError(bad(name, requirement, repr(value)))
    return tuple(_plain(v) for v in given)


def padding_pairs(padding: Padding, dims: int) -> tuple[tuple[int, int], ...]:
    """Padding as (before, after) for every axis."""
    given = list(padding) if isinstance(padding, Sequence) else [padding] * dims
    pairs = [tuple(v) if isinstance(v, Sequence) else (v, v) for v in given]
    numbers = [number for pair in pairs for number in pair]
    whole_pairs = len(pairs) == dims and all(len(pair) == 2 for pair in pairs)
    if not whole_pairs or not all(is_index(v) and _plain(v) >= 0 for v in numbers):
        requirement = f"must be a whole number of at least 0, one for each of {dims} axes, or (before, after) pairs"
        raise ValueError(bad("padding", requirement, repr(padding)))
    return tuple((_plain(before), _plain(after)) for before, after in pairs)


def _plain(value: SupportsIndex) -> int:
    """An int of numpy's as Python's; a compiler's symbol stays one."""
    if isinstance(value, torch.SymInt):
        return cast("int", value)
    return operator.index(value)


def _check_pixels(sizes: Sequence[int]) -> None:
    if any(size < 1 for size in sizes):
        raise ValueError(bad("sizes", "every axis needs at least one pixel", tuple(sizes)))


def check_border(border: str) -> None:
    """Refuse a border rule that does not exist."""
    if border not in BORDERS:
        raise ValueError(bad("border", f"must be one of {', '.join(BORDERS)}", repr(border)))
