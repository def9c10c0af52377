"""Spectrum: mixing by scores of shifts, A[q, k] = softmax_k s(k - q), for heads that attend everywhere.

    A V = correlation(V, exp s) / correlation(1, exp s)        by FFT in float64

Rows whose sum is a tiny part of the whole (their centre is far outside the image) are computed separately.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnconv.grid import Grid
from attnconv.operators.base import score_dtype
from attnconv.operators.kernels import block_sizes
from attnconv.operators.kernels.contractions import banded_softmax, below_largest
from attnconv.operators.kernels.recompute_in_backward import checkpointed

TRUSTED = 1e-4  # least part of all weights in a row for which float64's rounding is below float32's


def mix_spectrum(
    grid: Grid, values: Float[Tensor, "b *lattice c"], table: Float[Tensor, "*shifts"]
) -> Float[Tensor, "b *queries c"]:
    """A V in differentiable operations; the table in float64."""
    trusted, sums = _sums(grid, table)
    images = values.movedim(-1, 1).to(table.dtype)
    out = _correlate(grid, _weights(table), images) / sums.where(trusted, 1)
    out = out.where(trusted, 0).to(values.dtype).movedim(1, -1).flatten(1, -2)  # (b, queries, c)
    apart = (~trusted).flatten().nonzero().flatten()
    if len(apart):
        flat = values.flatten(1, -2)

        def rows(queries: Tensor) -> Tensor:
            return shift_rows(grid, table[None], queries, score_dtype(flat.dtype))[0].to(flat.dtype) @ flat

        count = max(block_sizes.ROWS_BLOCK // (4 * grid.lattice_count), 1)
        parts = [checkpointed(rows, part) for part in apart.split(count)]
        out = out.index_copy(1, apart, torch.cat(parts, 1))
    return out.unflatten(1, grid.query_sizes)


def rows_apart(grid: Grid, table: Float[Tensor, "*shifts"]) -> int:
    """How many rows a spectrum cannot give."""
    return int((~_sums(grid, table)[0]).sum())


def points(grid: Grid) -> int:
    """Points of a transform."""
    return math.prod(_lengths(grid))


def shift_rows(
    grid: Grid, table: Float[Tensor, "h *shifts"], queries: Int[Tensor, "r"], dtype: torch.dtype
) -> Float[Tensor, "h r lattice"]:
    """Rows of A over the lattice; scores are compared in the table's dtype, which may be finer than `dtype`."""
    windows = torch.zeros((queries.shape[0], 1), dtype=torch.int64, device=table.device)
    for axis, index in zip(grid.axes, grid.unravel(queries), strict=True):
        start = axis.stride * (axis.queries - 1 - index)  # where this query's window of the table begins
        window = start[:, None] + torch.arange(axis.lattice_size, device=table.device)
        windows = (windows[:, :, None] * axis.shift_count + window[:, None, :]).flatten(1)  # (r, points so far)
    return banded_softmax(below_largest(table.flatten(1)[:, windows]).to(dtype))


def _weights(table: Tensor) -> Tensor:
    return torch.exp(table - table.amax().detach())


def _sums(grid: Grid, table: Tensor) -> tuple[Bool[Tensor, "*queries"], Float[Tensor, "*queries"]]:
    """Which rows are right, and the sums of all."""
    weights = _weights(table)
    ones = table.new_ones((1, 1, *grid.lattice_sizes))
    sums = _correlate(grid, weights, ones)[0, 0]
    return sums.detach() > TRUSTED * weights.detach().sum(), sums


def _correlate(
    grid: Grid, weights: Float[Tensor, "*shifts"], images: Float[Tensor, "b c *lattice"]
) -> Float[Tensor, "b c *queries"]:
    """sum_l w[l + start of the query's window] images[l]; the transforms are long enough that nothing wraps around."""
    lengths, axes = _lengths(grid), tuple(range(-grid.dims, 0))
    product = torch.fft.rfftn(weights, lengths, axes) * torch.fft.rfftn(images, lengths, axes).conj()
    out: Tensor = torch.fft.irfftn(product, lengths, axes)
    for dim, axis in enumerate(grid.axes, start=2):
        starts = axis.stride * torch.arange(axis.queries - 1, -1, -1, device=out.device)
        out = out.index_select(dim, starts)
    return out


def _lengths(grid: Grid) -> tuple[int, ...]:
    """Per axis, the least length of a fast transform that holds all shifts."""
    return tuple(_smooth(axis.shift_count) for axis in grid.axes)


def _smooth(least: int) -> int:
    """The smallest number from `least` up without prime factors above 5."""
    while True:
        rest = least
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return least
        least += 1
