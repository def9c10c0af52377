"""Mixing by scores that depend on the shift alone, A[q, k] = softmax_k s(k - q), without the matrix.

By windows where a head looks nearby, by its spectrum where it looks everywhere: whichever costs less. Both look at the
values of the scores, so they live in one function that keeps its inputs alone and computes the rest again.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attnconv.grid import Grid
from attnconv.operators.base import score_dtype
from attnconv.operators.kernels.autograd import Gradients, recomputing
from attnconv.operators.kernels.contractions import contract_rows, project, project_heads
from attnconv.operators.kernels.toeplitz_fft import mix_spectrum, points, rows_apart, shift_rows
from attnconv.operators.kernels.toeplitz_tiles import Runs, mix_windows, runs_of, window_gradients, work_of

PRODUCT = 60e9  # flops per second of a window's product, and of a transform in float64: they decide between the two
SPECTRUM = 2.5e9
COLUMNS = 2**25  # numbers that are transformed at a time


def contract_by_shift(
    grid: Grid,
    values: Float[Tensor, "b *lattice c"],
    weight: Float[Tensor, "h i d"],
    tables: Float[Tensor, "h *shifts"],
    groups: int,
) -> Float[Tensor, "b *queries d"]:
    """sum_h A_h V W_h, head by head.

    Args:
        grid: Where the queries stand over the lattice.
        values: What every lattice point shows, channels last.
        weight: See `AttentionOperator.contract`.
        tables: Scores of the shifts, one table per head as in `mix_by_shift`.
        groups: See `AttentionOperator.contract`.
    """
    return _contracting(grid, groups)(values, weight, tables)


def mix_by_shift(
    grid: Grid, values: Float[Tensor, "b *lattice c"], table: Float[Tensor, "*shifts"]
) -> Float[Tensor, "b *queries c"]:
    """A V for one head.

    Args:
        grid: Where the queries stand over the lattice.
        values: What every lattice point shows, channels last.
        table: The head's scores of the shifts of `Axis.all_shifts` along each axis, in float32 or float64.
    """
    return _mixing(grid)(values, table)


def mix_plainly(grid: Grid, values: Tensor, table: Tensor) -> Tensor:
    """The same with the head's whole matrix: what transforms see."""
    queries = torch.arange(grid.query_count, device=table.device)
    rows = shift_rows(grid, table[None], queries, score_dtype(values.dtype))[0]
    return (rows.to(values.dtype) @ values.flatten(1, -2)).unflatten(1, grid.query_sizes)


@functools.lru_cache(maxsize=64)
def _contracting(grid: Grid, groups: int) -> Callable[..., Tensor]:
    return recomputing(
        functools.partial(_contract_plainly, grid, groups),
        functools.partial(_contract, grid, groups),
        functools.partial(_contract_gradients, grid, groups),
    )


def _contract_plainly(grid: Grid, groups: int, values: Tensor, weight: Tensor, tables: Tensor) -> Tensor:
    queries = torch.arange(grid.query_count, device=tables.device)
    rows = shift_rows(grid, tables, queries, score_dtype(values.dtype))[None]
    return contract_rows(rows, values.flatten(1, -2), weight, groups).unflatten(1, grid.query_sizes)


def _contract(grid: Grid, groups: int, values: Tensor, weight: Tensor, tables: Tensor) -> Tensor:
    shares = (_share(grid, groups, values, matrix[None], table) for matrix, table in zip(weight, tables, strict=True))
    return functools.reduce(torch.add, (share.to(score_dtype(values.dtype)) for share in shares)).to(values.dtype)


def _contract_gradients(
    grid: Grid, groups: int, inputs: Sequence[Tensor], gradient: Tensor, wanted: Sequence[bool]
) -> Gradients:
    values, weight, tables = inputs
    to_values = torch.zeros_like(values, dtype=score_dtype(values.dtype))
    to_weight, to_tables = torch.zeros_like(weight), torch.zeros_like(tables)
    for head in range(len(tables)):
        parts = (values, weight[head : head + 1], tables[head])
        leaves = [part.detach().requires_grad_(want) for part, want in zip(parts, wanted, strict=True)]
        with torch.enable_grad():
            share = _share(grid, groups, *leaves)
        found = iter(torch.autograd.grad(share, [leaf for leaf in leaves if leaf.requires_grad], gradient))
        for into, want in zip((to_values, to_weight[head : head + 1], to_tables[head]), wanted, strict=True):
            if want:
                into += next(found)
    totals = (to_values.to(values.dtype), to_weight, to_tables)
    return tuple(total if want else None for total, want in zip(totals, wanted, strict=True))


def _share(grid: Grid, groups: int, values: Tensor, matrix: Tensor, table: Tensor) -> Tensor:
    """One head's A V W, in the order that mixes fewer channels."""
    if matrix.shape[2] < values.shape[-1]:
        return mix_by_shift(grid, project_heads(values, matrix, groups)[..., 0, :], table)
    return project(mix_by_shift(grid, values, table)[..., None, :], matrix, groups)


@functools.lru_cache(maxsize=64)
def _mixing(grid: Grid) -> Callable[..., Tensor]:
    return recomputing(
        functools.partial(mix_plainly, grid), functools.partial(_forward, grid), functools.partial(_gradients, grid)
    )


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
    """All images and channels, in parts of about `COLUMNS` transformed numbers."""
    channels = min(max(COLUMNS // points(grid), 1), values.shape[-1])
    images = max(COLUMNS // (points(grid) * channels), 1) if channels == values.shape[-1] else 1
    for image in range(0, values.shape[0], images):
        for channel in range(0, values.shape[-1], channels):
            yield slice(image, image + images), slice(channel, channel + channels)


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
