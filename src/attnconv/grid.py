"""Positions of queries and keys: the geometry that all attention operators share.

Along one axis, an image has m keys, `spacing` apart, and query i is at position `stride * i + offset`. A *shift* is a
key position minus a query position. The *lattice* is the ordered list of all positions included in the softmax. The
border rule determines which positions these are, and the values at those that are not keys:

    renormalise   only the image's keys are included; each row of probabilities sums to 1 (the paper's softmax)
    zero          padding and gaps between keys are included; they receive probability, but their values are zero
    replicate     padding is included; each padding point copies the nearest key
    reflect       padding is included; each padding point copies the key mirrored at the edge (the edge is not repeated)
    circular      padding is included; each padding point copies the key at its position modulo m

The lattice of an image is the product of the lattices of its axes. Lattice probabilities are *folded* onto the image's
keys (summed over all copies of a key), one axis at a time. `docs/grid.md` gives the formulas.
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
    """One axis of a grid of queries and keys."""

    size: int  # number of keys m, at least 1
    queries: int  # number of queries n, at least 1
    stride: int = 1  # distance between neighbouring queries
    offset: int = 0  # position of the first query
    padding: tuple[int, int] = (0, 0)  # number of lattice points before the first and after the last key
    spacing: int = 1  # distance between neighbouring keys; above 1 for transposed convolutions
    border: Border = "renormalise"  # border rule, see the module's docstring
    finer: int = 1  # number of queries per key if keys are pooled; a query's position is that of the nearest key

    def __post_init__(self) -> None:
        if self.spacing > 1 and self.border != "zero":
            raise ValueError(bad("border", "must be 'zero' if spacing is greater than 1", repr(self.border)))

    @property
    def lattice_size(self) -> int:
        """Number of positions included in the softmax."""
        if self.border == "renormalise":
            return self.size
        return self.spacing * (self.size - 1) + 1 + self.padding[0] + self.padding[1]

    def query_positions(self, device: torch.device | None = None) -> Tensor:
        """Return the query positions, (stride * i + offset) // finer for i from 0, (n,) int64."""
        positions = torch.arange(self.offset, self.offset + self.stride * self.queries, self.stride, device=device)
        return positions if self.finer == 1 else positions.div(self.finer, rounding_mode="floor")

    def lattice_positions(self, device: torch.device | None = None) -> Tensor:
        """Return the lattice positions in ascending order, (lattice,) int64."""
        if self.border == "renormalise":
            return torch.arange(0, self.spacing * self.size, self.spacing, device=device)
        return torch.arange(-self.padding[0], self.lattice_size - self.padding[0], device=device)

    def shifts(self, device: torch.device | None = None) -> Tensor:
        """Return the shifts, lattice position minus query position, (n, lattice) int64."""
        return self.lattice_positions(device)[None, :] - self.query_positions(device)[:, None]

    @property
    def shift_count(self) -> int:
        """Number of distinct shifts, the length of `all_shifts`."""
        return self.lattice_size + self._last - self.offset // self.finer

    @property
    def _last(self) -> int:
        """Position of the last query."""
        return (self.offset + self.stride * (self.queries - 1)) // self.finer

    def all_shifts(self, device: torch.device | None = None) -> Tensor:
        """Return all distinct shifts in ascending order, (shift_count,) int64."""
        first = 0 if self.border == "renormalise" else -self.padding[0]
        return torch.arange(first - self._last, first - self._last + self.shift_count, device=device)

    def windows(self, queries: Tensor) -> Tensor:
        """Return, for query indices (r,), the indices of their shifts in `all_shifts`, (r, lattice)."""
        starts = self._last - self.query_positions(queries.device)[queries]
        return starts[:, None] + torch.arange(self.lattice_size, device=queries.device)

    def sources(self, positions: Tensor) -> Tensor:
        """Return the index of the key that each lattice position copies, int64; -1 for positions with value zero."""
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
        """Fold lattice probabilities (..., lattice) onto the image's keys, (..., m)."""
        if self.border == "renormalise":
            return probabilities
        if self.border == "zero":
            first, last = self.padding[0], self.padding[0] + self.spacing * (self.size - 1) + 1
            return probabilities[..., first : last : self.spacing]
        sources = self.sources(self.lattice_positions(probabilities.device))
        folded = probabilities.new_zeros((*probabilities.shape[:-1], self.size))
        return folded.index_add(-1, sources, probabilities)

    def empty_mass(self, probabilities: Tensor) -> Tensor:
        """Sum lattice probabilities (..., lattice) over the points with value zero, (...)."""
        if self.border != "zero":
            return probabilities.new_zeros(probabilities.shape[:-1])
        empty = self.sources(self.lattice_positions(probabilities.device)) < 0
        return (probabilities * empty).sum(-1)

    def take(self, image: Tensor, dim: int, positions: Tensor) -> Tensor:
        """Sample `image` along dimension `dim` at the given positions (l,), clamped to the lattice."""
        lattice = self.lattice_positions(positions.device)
        sources = self.sources(positions.clamp(lattice[0], lattice[-1]))
        if self.border != "zero":
            return image.index_select(dim, sources)
        zero = torch.zeros_like(image.narrow(dim, 0, 1))
        return torch.cat((image, zero), dim).index_select(dim, torch.where(sources < 0, self.size, sources))


@dataclass(frozen=True)
class Grid:
    """Grid of queries and keys in one, two or three dimensions: a product of axes, row-major (height before width).

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
        """Create the grid of a layer over an image.

        Without a window, there are ceil(size / stride) queries per axis, regardless of padding. With a window, there
        are as many as a convolution has outputs: (size + padding_before + padding_after - window) // stride + 1.

        Args:
            sizes: Number of keys per axis, each at least 1.
            stride: Distance between neighbouring queries, in positions, at least 1; one number, or one per axis.
            padding: Positions added on each side, at least 0: one number, one per axis, or (before, after) per axis.
            border: One of `renormalise`, `zero`, `replicate`, `reflect`, `circular`.
            window: Kernel extent per axis, in positions, dilation * (kernel_size - 1) + 1; None if there is no kernel.

        Raises:
            ValueError: If the window is larger than the padded image, or an argument is out of range.
        """
        strides = per_axis("stride", stride, len(sizes), least=1)
        paddings = padding_pairs(padding, len(sizes))
        check_border(border)
        axes = []
        _check_pixels(sizes)
        for axis, (size, step, pad) in enumerate(zip(sizes, strides, paddings, strict=True)):
            queries = -(-size // step) if window is None else (size + pad[0] + pad[1] - window[axis]) // step + 1
            if queries < 1:
                got = f"window {tuple(window or ())} for an image of size {tuple(sizes)} with padding {paddings}"
                fix = "Use a larger image or more padding."
                raise ValueError(bad("window", "must not be larger than the padded image", got, fix))
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
        """Create the grid of a transposed convolution: keys are `stride` apart, with zeros between them.

        There are stride * (size - 1) + window - padding_before - padding_after + output_padding queries per axis:
        padding is cropped from the output, and output_padding (at least 0) extends the output's end. See also `make`.

        Raises:
            ValueError: If the padding leaves no output, or an argument is out of range.
        """
        strides = per_axis("stride", stride, len(sizes), least=1)
        extras = per_axis("output_padding", output_padding, len(sizes), least=0)
        paddings = padding_pairs(padding, len(sizes))
        axes = []
        _check_pixels(sizes)
        for size, step, (before, after), extra, extent in zip(sizes, strides, paddings, extras, window, strict=True):
            queries = step * (size - 1) + extent - before - after + extra
            if queries < 1:
                got = f"padding {(before, after)} cropped from {queries + before + after} outputs"
                raise ValueError(bad("padding", "must leave at least one output per axis", got, "Reduce the padding."))
            around = (max(extent - 1 - before, 0), max(extent - 1 - after + extra, 0))
            axes.append(Axis(size=size, queries=queries, padding=around, spacing=step, border="zero"))
        return Grid(tuple(axes))

    @property
    def dims(self) -> int:
        """Number of axes."""
        return len(self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of keys per axis."""
        return tuple(axis.size for axis in self.axes)

    @property
    def query_sizes(self) -> tuple[int, ...]:
        """Number of queries per axis."""
        return tuple(axis.queries for axis in self.axes)

    @property
    def lattice_sizes(self) -> tuple[int, ...]:
        """Number of lattice points per axis."""
        return tuple(axis.lattice_size for axis in self.axes)

    @property
    def key_count(self) -> int:
        """Number of keys."""
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
        """Convert flat row-major query indices (r,) to one index per axis, each (r,)."""
        indices: list[Tensor] = []
        for axis in reversed(self.axes):
            indices.append(queries % axis.queries)
            queries = torch.div(queries, axis.queries, rounding_mode="floor")
        return tuple(reversed(indices))

    def fold(self, probabilities: Tensor) -> Tensor:
        """Fold lattice probabilities (..., lattice points) onto the image's keys, (..., keys)."""
        folded = probabilities.unflatten(-1, self.lattice_sizes)
        for dim, axis in zip(range(-self.dims, 0), self.axes, strict=True):
            folded = axis.fold(folded.movedim(dim, -1)).movedim(-1, dim)
        return folded.flatten(-self.dims)

    def empty(self, device: torch.device | None = None) -> Tensor:
        """Return a mask of the lattice points with value zero, (lattice points,) bool."""
        shown = torch.ones((), dtype=torch.bool, device=device)
        for axis in self.axes:
            filled = axis.sources(axis.lattice_positions(device)) >= 0
            shown = (shown[..., None] & filled).flatten()
        return ~shown

    def extend(self, image: Tensor) -> Tensor:
        """Extend an image (..., *sizes, c) to all lattice points, (..., *lattice sizes, c)."""
        for dim, axis in zip(range(-self.dims - 1, -1), self.axes, strict=True):
            if axis.border != "renormalise":
                image = axis.take(image, dim, axis.lattice_positions(image.device))
        return image

    def at_queries(self, image: Tensor) -> Tensor:
        """Sample an image (..., *sizes, c) at the queries, (..., *query sizes, c); each query must be at a key."""
        for dim, axis in zip(range(-self.dims - 1, -1), self.axes, strict=True):
            last = axis.stride * (axis.queries - 1) + axis.offset
            if not torch.compiler.is_compiling() and (axis.offset < 0 or last >= axis.size or axis.spacing > 1):
                requirement = "must not use content unless there is a key at the position of every query"
                got = f"queries from {axis.offset} to {last} over {axis.size} keys with spacing {axis.spacing}"
                raise ValueError(bad("encoding", requirement, got, "Use a position-only encoding."))
            if axis.stride > 1 or axis.offset > 0 or axis.queries != axis.size:
                image = image.index_select(dim, axis.query_positions(image.device))
        return image


def per_axis(name: str, value: int | Sequence[int], dims: int, *, least: int) -> tuple[int, ...]:
    """Validate one integer per axis, each at least `least`; a single integer applies to every axis."""
    given = tuple(value) if isinstance(value, Sequence) else (value,) * dims
    if len(given) != dims or not all(is_index(v) and _plain(v) >= least for v in given):
        requirement = f"must be an integer of at least {least}, or a sequence of {dims} such integers"
        raise ValueError(bad(name, requirement, repr(value)))
    return tuple(_plain(v) for v in given)


def padding_pairs(padding: Padding, dims: int) -> tuple[tuple[int, int], ...]:
    """Convert padding to one (before, after) pair per axis."""
    given = list(padding) if isinstance(padding, Sequence) else [padding] * dims
    pairs = [tuple(v) if isinstance(v, Sequence) else (v, v) for v in given]
    numbers = [number for pair in pairs for number in pair]
    whole_pairs = len(pairs) == dims and all(len(pair) == 2 for pair in pairs)
    if not whole_pairs or not all(is_index(v) and _plain(v) >= 0 for v in numbers):
        requirement = f"must be an integer of at least 0, or a sequence of {dims} integers or (before, after) pairs"
        raise ValueError(bad("padding", requirement, repr(padding)))
    return tuple((_plain(before), _plain(after)) for before, after in pairs)


def _plain(value: SupportsIndex) -> int:
    """Convert a NumPy integer to an int; return a compiler's symbolic integer unchanged."""
    if isinstance(value, torch.SymInt):
        return cast("int", value)
    return operator.index(value)


def _check_pixels(sizes: Sequence[int]) -> None:
    if any(size < 1 for size in sizes):
        raise ValueError(bad("sizes", "must be at least 1 on every axis", tuple(sizes)))


def check_border(border: str) -> None:
    """Raise `ValueError` for an unknown border rule."""
    if border not in BORDERS:
        raise ValueError(bad("border", f"must be one of {', '.join(BORDERS)}", repr(border)))
