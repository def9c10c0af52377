"""Mixing by scores of shifts, A[q, k] = softmax_k s(k - q): by windows (`toeplitz_tiles`) or by its spectrum.

    A V = correlation(V, exp s) / correlation(1, exp s)        by FFT in float64, for heads that attend everywhere

Rows whose sum is a tiny part of the whole (their centre is far outside the image) are computed separately.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnconv.grid import Grid
from attnconv.operators.base import Outputs, Weights, score_dtype
from attnconv.operators.kernels import block_sizes
from attnconv.operators.kernels.contractions import banded_softmax, below_largest, project, project_heads
from attnconv.operators.kernels.recompute_in_backward import Gradients, checkpointed, recomputing
from attnconv.operators.kernels.toeplitz_tiles import Runs, mix_windows, runs_of, window_gradients, work_of

PRODUCT = 60e9  # flops per second of a window's product, and of a transform in float64: they decide between the two
SPECTRUM = 2.5e9
TRUSTED = 1e-4  # least part of all weights in a row for which float64's rounding is below float32's


def contract_by_shift(
    grid: Grid, values: Float[Tensor, "b *lattice c"], weight: Weights, tables: Float[Tensor, "h *shifts"], groups: int
) -> Outputs:
    """sum_h A_h V W_h over all lattice points, head by head, each in the order that mixes fewer channels."""
    dtype = values.dtype

    def share(wide: Tensor, matrix: Tensor, table: Tensor) -> Tensor:
        values = wide.to(dtype)
        if matrix.shape[2] < values.shape[-1]:
            out = mix_by_shift(grid, project_heads(values, matrix, groups)[..., 0, :], table)
        else:
            out = project(mix_by_shift(grid, values, table)[..., None, :], matrix, groups)
        return out.to(wide.dtype)

    wide = values.to(score_dtype(dtype))  # sums over heads, also of gradients, are at least float32
    shares = (checkpointed(share, wide, one[None], table) for one, table in zip(weight, tables, strict=True))
    return functools.reduce(torch.add, shares).to(dtype)


def mix_by_shift(
    grid: Grid, values: Float[Tensor, "b *lattice c"], table: Float[Tensor, "*shifts"]
) -> Float[Tensor, "b *queries c"]:
    """A V for one head, from its scores of the shifts of `Axis.all_shifts` along each axis, in float32 or float64."""
    return _mixing(grid)(values, table)


@functools.lru_cache(maxsize=64)
def _mixing(grid: Grid) -> Callable[..., Tensor]:
    partial = functools.partial
    return recomputing(partial(mix_plainly, grid), partial(_forward, grid), partial(_gradients, grid))


def mix_plainly(grid: Grid, values: Tensor, table: Tensor) -> Tensor:
    """`mix_by_shift` with the head's whole matrix."""
    queries = torch.arange(grid.query_count, device=table.device)
    rows = shift_rows(grid, table[None], queries, score_dtype(values.dtype))[0]
    return (rows.to(values.dtype) @ values.flatten(1, -2)).unflatten(1, grid.query_sizes)


def _forward(grid: Grid, values: Tensor, table: Tensor) -> Tensor:
    runs = runs_of(grid, table, values.dtype)
    if not _prefers_spectrum(grid, runs, values, table):
        return mix_windows(grid, runs, values, table)
    out = values.new_empty((values.shape[0], *grid.query_sizes, values.shape[-1]))
    for images, channels in _columns(grid, values):
        out[images, ..., channels] = _mix_spectrum(grid, values[images, ..., channels], table)
    return out


def _gradients(grid: Grid, inputs: Sequence[Tensor], gradient: Tensor, wanted: Sequence[bool]) -> Gradients:
    values, table = inputs
    runs = runs_of(grid, table, values.dtype)
    if not _prefers_spectrum(grid, runs, values, table):
        return window_gradients(grid, runs, values, table, gradient, wanted)
    totals = [torch.zeros_like(tensor) for tensor in inputs]
    for images, channels in _columns(grid, values):
        part = values[images, ..., channels].detach().requires_grad_()
        scores = table.detach().requires_grad_()
        with torch.enable_grad():
            out = _mix_spectrum(grid, part, scores)
        found = torch.autograd.grad(out, [part, scores], gradient[images, ..., channels])
        totals[0][images, ..., channels] = found[0]
        totals[1] += found[1]
    return tuple(total if want else None for total, want in zip(totals, wanted, strict=True))


def _columns(grid: Grid, values: Tensor) -> Iterator[tuple[slice, slice]]:
    """All images and channels, in parts of about `SPECTRUM_BLOCK` bytes in float64."""
    most = max(block_sizes.SPECTRUM_BLOCK // (8 * math.prod(_lengths(grid))), 1)
    for images in block_sizes.spans(values.shape[0], max(most // values.shape[-1], 1)):
        for channels in block_sizes.spans(values.shape[-1], most):
            yield images, channels


def _prefers_spectrum(grid: Grid, runs: Runs, values: Tensor, table: Tensor) -> bool:
    """Whether transforms cost less than windows; they serve values of 32 bits at most, and need float64."""
    if table.dtype != torch.float64 or values.dtype == torch.float64:
        return False
    columns = values.shape[0] * values.shape[-1]
    by_windows = 2 * work_of(runs) * columns / PRODUCT
    points = math.prod(_lengths(grid))
    by_spectrum = 5 * points * points.bit_length() * columns / SPECTRUM
    if by_windows <= by_spectrum:
        return False
    apart = int((~_weights(grid, table)[2]).sum())  # rows that a spectrum cannot give
    return by_windows > by_spectrum + 2 * apart * grid.lattice_count * columns / PRODUCT


def _mix_spectrum(
    grid: Grid, values: Float[Tensor, "b *lattice c"], table: Float[Tensor, "*shifts"]
) -> Float[Tensor, "b *queries c"]:
    """A V in differentiable operations; the table in float64."""
    weights, sums, trusted = _weights(grid, table)
    images = values.movedim(-1, 1).to(table.dtype)
    out = _correlate(grid, weights, images) / sums.where(trusted, 1)
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


def _weights(grid: Grid, table: Tensor) -> tuple[Tensor, Float[Tensor, "*queries"], Bool[Tensor, "*queries"]]:
    """exp s, its sums over rows, and which of these are right."""
    weights = torch.exp(table - table.amax().detach())
    sums = _correlate(grid, weights, table.new_ones((1, 1, *grid.lattice_sizes)))[0, 0]
    return weights, sums, sums.detach() > TRUSTED * weights.detach().sum()


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
    from scipy.fft import next_fast_len  # takes longer to import than all else

    return tuple(next_fast_len(axis.shift_count, real=True) for axis in grid.axes)
