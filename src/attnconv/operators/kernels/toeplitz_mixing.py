"""Mixing by scores of shifts, A[q, k] = softmax_k s(k - q): by windows or by FFT, whichever costs less."""

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attnconv.grid import Grid
from attnconv.operators.base import score_dtype
from attnconv.operators.kernels import block_sizes
from attnconv.operators.kernels.contractions import project, project_heads
from attnconv.operators.kernels.recompute_in_backward import Gradients, checkpointed, recomputing
from attnconv.operators.kernels.toeplitz_fft import mix_spectrum, points, rows_apart, shift_rows
from attnconv.operators.kernels.toeplitz_tiles import Runs, mix_windows, runs_of, window_gradients, work_of

PRODUCT = 60e9  # flops per second of a window's product, and of a transform in float64: they decide between the two
SPECTRUM = 2.5e9


def contract_by_shift(
    grid: Grid,
    values: Float[Tensor, "b *lattice c"],
    weight: Float[Tensor, "h i d"],
    tables: Float[Tensor, "h *shifts"],
    groups: int,
) -> Float[Tensor, "b *queries d"]:
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
        out[images, ..., channels] = mix_spectrum(grid, values[images, ..., channels], table)
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
            out = mix_spectrum(grid, part, scores)
        found = torch.autograd.grad(out, [part, scores], gradient[images, ..., channels])
        totals[0][images, ..., channels] = found[0]
        totals[1] += found[1]
    return tuple(total if want else None for total, want in zip(totals, wanted, strict=True))


def _columns(grid: Grid, values: Tensor) -> Iterator[tuple[slice, slice]]:
    """All images and channels, in parts of about `SPECTRUM_BLOCK` bytes in float64."""
    most = max(block_sizes.SPECTRUM_BLOCK // (8 * points(grid)), 1)
    for images in block_sizes.spans(values.shape[0], max(most // values.shape[-1], 1)):
        for channels in block_sizes.spans(values.shape[-1], most):
            yield images, channels


def _prefers_spectrum(grid: Grid, runs: Runs, values: Tensor, table: Tensor) -> bool:
    """Whether transforms cost less than windows; they serve values of 32 bits at most, and need float64."""
    if table.dtype != torch.float64 or values.dtype == torch.float64:
        return False
    columns = values.shape[0] * values.shape[-1]
    by_windows = 2 * work_of(runs) * columns / PRODUCT
    by_spectrum = 5 * points(grid) * points(grid).bit_length() * columns / SPECTRUM
    if by_windows <= by_spectrum:
        return False
    return by_windows > by_spectrum + 2 * rows_apart(grid, table) * grid.lattice_count * columns / PRODUCT
