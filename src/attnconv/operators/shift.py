"""Shift operator: each head attends to one fixed shift, condition (10) of Lemma 1. It runs as a convolution.

If a shift leads outside the lattice, the query attends to the nearest lattice point, as with the softmax of a hard
head. Small changes of centre or width do not change the probabilities, so these parameters get zero gradients.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.grid import Axis, Grid
from attnconv.operators.base import AttentionOperator, Images, Outputs, Queries, Weights, product_dtype, query_indices
from attnconv.operators.kernels.contractions import project

Taps: TypeAlias = tuple[tuple[int, int, int], ...]  # per axis: first shift, step, count
_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Callable[..., Tensor]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@final
class Shift(AttentionOperator):
    """Attention operator of hard heads: one key per query, at a fixed shift for each head.

    Args:
        grid: Grid of queries and keys.
        shifts: Integer shift (key minus query) for each head and axis.
        anchor: Tensor whose dtype and device are used and which receives zero gradients, such as the centres.

    Raises:
        ValueError: If a head does not have one shift per axis.

    Example:
        >>> import torch
        >>> from attnconv.grid import Grid
        >>> right = Shift(Grid.make((3,)), [(1,)], torch.zeros(()))
        >>> right.to_dense()[0, 0].tolist()
        [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]
    """

    batch = 1

    def __init__(self, grid: Grid, shifts: Sequence[Sequence[int]], anchor: Float[Tensor, "*any"]) -> None:
        self.grid = grid
        self.shifts = tuple(tuple(shift) for shift in shifts)
        self.heads = len(self.shifts)
        self._anchor = anchor
        self.device = anchor.device
        if any(len(shift) != grid.dims for shift in self.shifts):
            raise ValueError(bad("shifts", f"must have {grid.dims} integers per head, one per axis", self.shifts))

    def contract(self, x: Images, weight: Weights, groups: int = 1) -> Outputs:
        route = (_route if torch.compiler.is_compiling() else _known_route)(self.grid, self.shifts)
        if route.apart or _is_unsafe(self.grid, route, x):
            out = project(self._shifted(x[:, None].expand(-1, self.heads, *x.shape[1:])).movedim(1, -2), weight, groups)
        else:
            out = _convolve(self.grid, route, x, weight, groups)
        return self._anchored(out)

    def apply(self, values: Float[Tensor, "b h *sizes e"]) -> Float[Tensor, "b h *queries e"]:
        return self._anchored(self._shifted(values))

    def rows(self, queries: Queries) -> Float[Tensor, "1 h r m"]:
        keys = self._keys(queries)
        rows = self._zero.new_ones((*keys[0].shape, 1))
        for axis, key in zip(self.grid.axes, keys, strict=True):
            factor = (key[..., None] == torch.arange(axis.size, device=self.device)).to(rows.dtype)
            rows = (rows[..., None] * factor[..., None, :]).flatten(2)
        return rows[None] + self._zero

    def padding_mass(self, queries: Queries) -> Float[Tensor, "1 h r"]:
        empty = torch.stack(self._keys(queries)).amin(0) < 0
        return empty.to(self._zero.dtype)[None] + self._zero

    def _anchored(self, out: Tensor) -> Tensor:
        """Return the output, with zero gradients for the anchor if it requires any."""
        wanted = self._anchor.requires_grad and torch.is_grad_enabled()  # otherwise skip a pass over the output
        return out + self._zero.to(out.dtype) if wanted else out

    @property
    def _zero(self) -> Tensor:
        return (self._anchor * 0).sum()  # multiply first, because the sum may overflow

    def _keys(self, queries: Queries) -> list[Tensor]:
        """Return the keys that each head attends to along each axis, (h, r); -1 for lattice points with value zero."""
        indices = self.grid.unravel(query_indices(queries, self.grid, self.device))
        steps, keys = torch.tensor(self.shifts, device=self.device).T[..., None], []
        for axis, index, shifts in zip(self.grid.axes, indices, steps, strict=True):
            lattice = axis.lattice_positions(self.device)
            positions = axis.offset + axis.stride * index + shifts
            keys.append(axis.sources(positions.clamp(lattice[0], lattice[-1])))
        return keys

    def _shifted(self, values: Tensor) -> Tensor:
        """Shift the image of every head: (b, h, *sizes, e) -> (b, h, *queries, e)."""
        moved = []
        for head, shift in enumerate(self.shifts):
            image = values[:, head]
            for dim, (axis, step) in enumerate(zip(self.grid.axes, shift, strict=True), start=1):
                image = axis.take(image, dim, axis.query_positions(image.device) + step)
            moved.append(image)
        return torch.stack(moved, 1)


@final
@dataclass(frozen=True)
class _Route:
    """Parameters of the convolution that computes all heads; its kernel size and dilation are those of `taps`."""

    apart: bool  # shift each head separately, because the kernel or the padded image would be mostly zeros
    transposed: bool
    taps: Taps  # arithmetic progression per axis that contains the heads' shifts
    places: tuple[int, ...] | None  # row-major kernel index of each head; None if heads fill the kernel in order
    paddings: tuple[int, ...] | None  # see `_own_padding`


def _route(grid: Grid, shifts: tuple[tuple[int, ...], ...]) -> _Route:
    taps = tuple(_progression(sorted({shift[dim] for shift in shifts})) for dim in range(grid.dims))
    places = [0] * len(shifts)
    for dim, (first, step, count) in enumerate(taps):
        places = [place * count + (shift[dim] - first) // step for place, shift in zip(places, shifts, strict=True)]
    positions, free = math.prod([count for _, _, count in taps]), torch.compiler.is_compiling()  # free: symbolic sizes
    far = not free and any(
        max(-first, first + step * (count - 1)) > 2 * axis.lattice_size + axis.stride * axis.queries
        for axis, (first, step, count) in zip(grid.axes, taps, strict=True)
    )
    return _Route(
        apart=positions > 2 * len(shifts) or far,
        transposed=not free and _keys_stand_apart(grid, taps),  # inductor fails on these strides with symbolic sizes
        taps=taps,
        places=None if places == list(range(positions)) else tuple(places),
        paddings=None if free else _own_padding(grid, taps),
    )


_known_route = functools.lru_cache(maxsize=256)(_route)  # compilers use the function without a cache


def _convolve(grid: Grid, route: _Route, x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Compute one convolution whose kernel contains the weight of each head at its shift."""
    _, steps, counts = zip(*route.taps, strict=True)
    if route.places is not None:
        empty = weight.new_zeros((math.prod(counts), *weight.shape[1:]))
        weight = empty.index_add(0, torch.tensor(route.places, device=weight.device), weight)
    if route.transposed:  # skip the zeros between keys: key k contributes to query spacing * k - shift
        grouped = weight.unflatten(2, (groups, -1)).permute(2, 1, 3, 0)  # (g, i, d / g, kernel positions)
        kernel = grouped.flatten(0, 1).flip(2).unflatten(2, counts)  # largest shift first
        strides, convolution = [axis.spacing for axis in grid.axes], _TRANSPOSED[grid.dims]
    else:
        kernel = weight.permute(2, 1, 0).reshape(weight.shape[2], weight.shape[1], *counts)
        strides, convolution = [axis.stride for axis in grid.axes], _CONVOLUTIONS[grid.dims]
        if route.paddings is None:
            for dim, (axis, (first, step, count)) in enumerate(zip(grid.axes, route.taps, strict=True), start=1):
                length = axis.stride * (axis.queries - 1) + step * (count - 1) + 1
                x = _stretch(x, dim, axis, axis.offset + first, length, first + step * (count - 1))
    out = convolution(
        _canonical(x.movedim(-1, 1), grid),
        _canonical(kernel, grid),
        stride=strides,
        padding=route.paddings or 0,  # None if transposed
        dilation=steps,
        groups=groups,
    )
    if route.transposed:
        edges: list[int] = []
        for axis, (first, step, count), size in zip(grid.axes, route.taps, out.shape[2:], strict=True):
            start = axis.offset + first + step * (count - 1)  # index of the first query's output
            edges = [-start, start + axis.queries - size, *edges]
        out = F.pad(out, edges)
    return out.movedim(1, -1)


def _own_padding(grid: Grid, taps: Taps) -> tuple[int, ...] | None:
    """Return the zero padding with which a convolution computes these queries; None if there is none."""
    found = []
    for axis, (first, step, count) in zip(grid.axes, taps, strict=True):
        pad, reach = -axis.offset - first, step * (count - 1)
        fits = axis.spacing == 1 and pad >= 0 and (axis.size + 2 * pad - reach - 1) // axis.stride + 1 == axis.queries
        inside = pad == 0 and axis.stride * (axis.queries - 1) + reach < axis.size
        zeros = axis.border == "zero" and min(axis.padding) > 0  # all points outside the image are zeros
        if not (fits and (inside or zeros)):
            return None
        found.append(pad)
    return tuple(found)


def _is_unsafe(grid: Grid, route: _Route, x: Tensor) -> bool:
    """Return whether oneDNN may compute wrong values or corrupt memory (PyTorch 2.13).

    On CPUs with AVX2 only, the backward pass of a strided convolution with one tap and fewer than 8 channels, in the
    channels-last format, writes out of bounds. On CPUs with AMX, in bf16, if an axis is no longer than the kernel,
    weight gradients are wrong or written out of bounds, mostly if some taps read only padding; and if the last axis has
    a single query and a stride, part of the output is not written. In all of these cases, shifting the images is cheap.
    """
    single = all(count == 1 for _, _, count in route.taps)
    if single and x.device.type == "cpu" and x.shape[-1] < 8 and any(axis.stride > 1 for axis in grid.axes):
        return True
    if torch.compiler.is_compiling() or x.device.type != "cpu" or product_dtype(x) != torch.bfloat16:
        return False
    last = grid.axes[-1]
    return (last.queries == 1 and last.stride > 1) or any(
        axis.size <= step * (count - 1) + 1 for axis, (_, step, count) in zip(grid.axes, route.taps, strict=True)
    )


def _keys_stand_apart(grid: Grid, taps: Taps) -> bool:
    """Return whether to use a transposed convolution: keys have zeros between them, and no shift leaves the lattice."""
    axes = grid.axes
    if all(axis.spacing == 1 for axis in axes) or any(axis.stride > 1 or axis.border != "zero" for axis in axes):
        return False
    return all(
        -axis.padding[0] <= axis.offset + first
        and axis.offset + axis.queries - 1 + first + step * (count - 1) < axis.lattice_size - axis.padding[0]
        for axis, (first, step, count) in zip(axes, taps, strict=True)
    )


def _stretch(image: Tensor, dim: int, axis: Axis, start: int, length: int, farthest: int) -> Tensor:
    """Sample the lattice at start, start + 1, ..; pad with zeros where that is equivalent."""
    # Without padding on a side, shifts beyond it sample the edge of the image (at the end, positive shifts only).
    zeros_before, zeros_after = axis.padding[0] > 0 or start >= 0, axis.padding[1] > 0 or farthest <= 0
    padded = axis.border == "zero" and axis.spacing == 1 and axis.offset == 0 and zeros_before and zeros_after
    if padded and (torch.compiler.is_compiling() or (start < axis.size and start + length > 0)):  # overlaps the image
        return F.pad(image, [0, 0] * (image.dim() - 1 - dim) + [-start, start + length - axis.size])
    return axis.take(image, dim, torch.arange(length, device=image.device) + start)


def _canonical(tensor: Tensor, grid: Grid) -> Tensor:
    """Return an image or kernel (channels second) with the canonical strides of its memory format.

    The stride of an axis of size 1 is arbitrary. With some strides, oneDNN leaves part of its results unwritten (see
    PyTorch issue 82060), backward passes fail, and inductor cannot order symbolic sizes.
    """
    if torch.compiler.is_compiling() or grid.axes[-1].queries == 1 or (1 in tensor.shape and tensor.is_contiguous()):
        return tensor.flatten().view(tensor.shape)
    last = tensor.movedim(1, -1)
    known = 1 in tensor.shape and last.is_contiguous()
    return last.flatten().view(last.shape).movedim(-1, 1) if known else tensor


def _progression(values: list[int]) -> tuple[int, int, int]:
    """Return the shortest arithmetic progression that contains all sorted values, as (first, step, count)."""
    step = math.gcd(*(value - values[0] for value in values)) or 1
    return values[0], step, (values[-1] - values[0]) // step + 1
