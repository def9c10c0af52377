"""Kronecker contraction of wide heads along long axes, compressed to polynomials of low degree.

The factors of a wide Gaussian head are smooth: F_h,a = Q_a C_h,a P_a^T up to rounding, where the columns of Q_a and P_a
are orthonormal polynomials over the queries and the keys of axis a, and C_h,a = Q_a^T F_h,a P_a. Hence

    sum_h (F_h,1 (x) F_h,2) X W_h  =  (Q_1 (x) Q_2) sum_h (C_h,1 (x) C_h,2) ((P_1 (x) P_2)^T X) W_h,

the same contraction over far fewer positions. All heads share the bases. The factors' gradients, Q_a dC_h,a P_a^T, are
projections on these polynomials, so they are only valid for parameters on which the factors depend smoothly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from attnconv.operators.kernels import block_sizes

FOLDED = 8  # padding of at most this width at each end of an axis may be folded onto its keys


@final
@dataclass(frozen=True)
class Compressed:
    """Wide heads and their factors C; bases Q and P of each axis, None for an axis that is not compressed."""

    heads: list[int]
    others: list[int]
    factors: tuple[Tensor, ...]
    queries: tuple[Tensor | None, ...]
    keys: tuple[Tensor | None, ...]


def compress(factors: Sequence[Float[Tensor, "h _ _"]], values: int) -> Compressed | None:
    """Compress wide heads if this saves operations on an image of `values` numbers; otherwise return None."""
    axes = [axis for axis, factor in enumerate(factors) if factor.shape[2] >= block_sizes.LONG_AXIS]
    digits = -math.log(torch.finfo(factors[0].dtype).eps)
    widths = {axis: (factors[axis] != 0).sum(-1).amax(1).clamp_min(1).tolist() for axis in axes}  # in keys, per head

    def degree(axis: int, head: int) -> int:
        """Predict how many polynomials resolve a Gaussian whose range of keys ends where its weights are eps^2."""
        return math.ceil(3 * digits * factors[axis].shape[2] / widths[axis][head]) + 16

    count = {axis: [degree(axis, head) for head in range(len(factors[0]))] for axis in axes}

    def cost(heads: Sequence[int]) -> int:
        """Return the number of multiplications with these heads compressed, minus the number without."""
        total = 0
        for axis in axes:
            most = max(count[axis][head] for head in heads)
            total += 2 * most * values + 2 * len(heads) * factors[axis][0].numel() * most
            total -= sum(widths[axis][head] for head in heads) * values
        return total

    order = sorted(range(len(factors[0])), key=lambda head: max(count[axis][head] for axis in axes))
    heads = min((sorted(order[:some]) for some in range(1, len(order) + 1)), key=cost)
    if cost(heads) >= 0:
        return None
    made, queries, keys = list[Tensor](), list[Tensor | None](), list[Tensor | None]()
    for axis, factor in enumerate(factors):
        if axis not in axes:
            made, queries, keys = [*made, factor[heads]], [*queries, None], [*keys, None]
            continue
        found = _fit(factor[heads], max(count[axis][head] for head in heads))
        if found is None:
            return None
        made, queries, keys = [*made, found[0]], [*queries, found[1]], [*keys, found[2]]
    others = sorted(set(range(len(factors[0]))) - set(heads))
    return Compressed(heads, others, tuple(made), tuple(queries), tuple(keys))


def _fit(factor: Float[Tensor, "h q k"], count: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return C, Q and P of one axis with at most about `count` polynomials; None if these do not suffice.

    Padding is folded onto the first and last keys, where the factor is not smooth; the bases then include these keys.
    """
    sizes = factor.shape[1:]
    for ends in (0, FOLDED):
        left, right = (basis(size, count, ends, factor.dtype, factor.device) for size in sizes)
        core = left.mT @ factor @ right
        kept = [_significant(core, dim) for dim in (1, 2)]
        fits = [few <= most - 8 or most == size for few, most, size in zip(kept, core.shape[1:], sizes, strict=True)]
        if all(fits):
            return core[:, : kept[0], : kept[1]].contiguous(), left[:, : kept[0]], right[:, : kept[1]]
    return None


def _significant(core: Float[Tensor, "h q k"], dim: int) -> int:
    """Return the number of leading functions along a dimension; all other coefficients are rounding errors, not NaN."""
    largest = core.abs().amax((0, 3 - dim))
    return int(torch.nonzero(~(largest <= torch.finfo(core.dtype).eps * largest.max())).max()) + 1


@lru_cache(maxsize=16)
def basis(size: int, count: int, ends: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "size _"]:
    """Return orthonormal functions: the first and last `ends` points, then at most `count` polynomials by degree."""
    angles = torch.linspace(-1, 1, size, dtype=torch.float64).acos()
    chebyshev = torch.cos(angles[:, None] * torch.arange(min(count, size - 2 * ends)))
    single = torch.eye(size, dtype=torch.float64)[:, [*range(ends), *range(size - ends, size)]]
    return torch.linalg.qr(torch.cat((single, chebyshev), 1))[0].to(device, dtype)


def transform(
    images: Float[Tensor, "b *sizes c"], bases: Sequence[Tensor | None], *, back: bool = False
) -> Float[Tensor, "b *other_sizes c"]:
    """Multiply each axis by its transposed basis or, for `back`, by its basis; last axis first, for small products."""
    order = list(enumerate(bases, start=1))
    for dim, functions in order if back else reversed(order):
        if functions is not None:
            matrix = functions if back else functions.mT
            flat = images.flatten(dim + 1).flatten(0, dim - 1)
            mixed = torch.bmm(matrix.expand(len(flat), -1, -1), flat)
            images = mixed.view(*images.shape[:dim], -1, *images.shape[dim + 1 :])
    return images
