"""Kronecker contraction of wide heads along long axes, compressed to polynomials of low degree on panels.

Each long axis is split into panels of equal length, at least half as long as the range of keys of a head. On a panel,
the factors of a wide Gaussian head are smooth: F_h,a = Q_a C_h,a P_a^T up to rounding, where the columns of Q_a and P_a
are orthonormal polynomials over the queries and the keys of one panel of axis a, and C_h,a = Q_a^T F_h,a P_a. Hence

    sum_h (F_h,1 (x) F_h,2) X W_h  =  (Q_1 (x) Q_2) sum_h (C_h,1 (x) C_h,2) ((P_1 (x) P_2)^T X) W_h,

the same contraction over far fewer positions. All heads and panels share the polynomials, so Q_a and P_a are
block-diagonal with equal blocks, and only one block of each is stored. The factors' gradients, Q_a dC_h,a P_a^T, are
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
PANEL = 0.5  # minimum length of a panel relative to the range of keys of a head


@final
@dataclass(frozen=True)
class Compressed:
    """Wide heads and their factors C; blocks of Q and P of each axis, None for an axis that is not compressed."""

    heads: list[int]
    others: list[int]
    factors: tuple[Tensor, ...]
    queries: tuple[Tensor | None, ...]
    keys: tuple[Tensor | None, ...]


def compress(factors: Sequence[Float[Tensor, "h _ _"]], values: int) -> Compressed | None:
    """Compress wide heads if this saves operations on an image of `values` numbers; otherwise return None."""
    axes = [axis for axis, factor in enumerate(factors) if factor.shape[2] >= block_sizes.LONG_AXIS]
    digits, count = -math.log(torch.finfo(factors[0].dtype).eps), len(factors[0])
    widths = {axis: (factors[axis] != 0).sum(-1).amax(1).clamp_min(1).tolist() for axis in axes}  # in keys, per head

    def division(axis: int, heads: Sequence[int]) -> tuple[int, int]:
        """Return the number of panels, and how many polynomials resolve Gaussians whose weights end at eps^2."""
        size, width = factors[axis].shape[2], min(widths[axis][head] for head in heads)
        panels = _panels(*factors[axis].shape[1:], math.ceil(PANEL * width))
        return panels, min(math.ceil(3 * digits * size / panels / width) + 16, size // panels)

    def cost(heads: Sequence[int]) -> float:
        """Return the number of multiplications with these heads compressed, minus the number without."""
        divisions = [(axis, factors[axis].shape[2], *division(axis, heads)) for axis in axes]
        coarse = values * math.prod(min(panels * degree / size, 1.0) for _, size, panels, degree in divisions)
        total = 0.0
        for axis, size, panels, degree in divisions:
            total += 2 * degree * values + 2 * len(heads) * factors[axis][0].numel() * degree
            seen = sum(min(panels, widths[axis][head] * panels / size + 2) for head in heads)  # panels, for all heads
            total += seen * degree * coarse - sum(widths[axis][head] for head in heads) * values
        return total

    order = sorted(range(count), key=lambda head: -min(widths[axis][head] / factors[axis].shape[2] for axis in axes))
    heads = min((sorted(order[:some]) for some in range(1, len(order) + 1)), key=cost)
    if cost(heads) >= 0:
        return None
    made, queries, keys = list[Tensor](), list[Tensor | None](), list[Tensor | None]()
    for axis, factor in enumerate(factors):
        if axis not in axes:
            made, queries, keys = [*made, factor[heads]], [*queries, None], [*keys, None]
            continue
        found = _fit(factor[heads], *division(axis, heads))
        if found is None:
            return None
        made, queries, keys = [*made, found[0]], [*queries, found[1]], [*keys, found[2]]
    others = sorted(set(range(count)) - set(heads))
    return Compressed(heads, others, tuple(made), tuple(queries), tuple(keys))


@lru_cache(maxsize=64)
def _panels(queries: int, keys: int, length: int) -> int:
    """Return the largest number of equal panels of at least `length` keys; one if there is no other."""
    common = math.gcd(queries, keys)
    return max(
        count for count in range(1, common + 1) if common % count == 0 and (count == 1 or keys >= count * length)
    )


def _fit(factor: Float[Tensor, "h q k"], panels: int, count: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return C and the blocks of Q and P of one axis, with about `count` polynomials; None if these do not suffice.

    Padding is folded onto the first and last keys, where the factor is not smooth; the bases then include these keys.
    """
    sizes = [size // panels for size in factor.shape[1:]]
    for ends in (0, FOLDED):
        left, right = (basis(size, count, ends, factor.dtype, factor.device) for size in sizes)
        core = between(left.mT, factor, right).view(-1, panels, left.shape[1], panels, right.shape[1])
        kept = [_significant(core, dim) for dim in (2, 4)]
        most = left.shape[1], right.shape[1]
        if all(few <= each - 8 or each == size for few, each, size in zip(kept, most, sizes, strict=True)):
            return core[:, :, : kept[0], :, : kept[1]].flatten(3).flatten(1, 2), left[:, : kept[0]], right[:, : kept[1]]
    return None


def between(left: Float[Tensor, "a b"], matrices: Float[Tensor, "h pb pc"], right: Float[Tensor, "c d"]) -> Tensor:
    """Multiply from both sides with the block-diagonal matrices whose p blocks are `left` and `right`."""
    part = (left @ matrices.unflatten(1, (-1, left.shape[1]))).flatten(1, 2)
    return (part.unflatten(2, (-1, len(right))) @ right).flatten(2)


def _significant(core: Float[Tensor, "h p q p k"], dim: int) -> int:
    """Return the number of leading functions along a dimension; all other coefficients are rounding errors, not NaN."""
    largest = core.abs().amax([other for other in range(5) if other != dim])
    return int(torch.nonzero(~(largest <= torch.finfo(core.dtype).eps * largest.max())).max()) + 1


@lru_cache(maxsize=16)
def basis(size: int, count: int, ends: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "size _"]:
    """Return orthonormal functions: the first and last `ends` points, then at most `count` polynomials by degree."""
    ends = min(ends, size // 2)
    angles = torch.linspace(-1, 1, size, dtype=torch.float64).acos()
    chebyshev = torch.cos(angles[:, None] * torch.arange(min(count, size - 2 * ends)))
    single = torch.eye(size, dtype=torch.float64)[:, [*range(ends), *range(size - ends, size)]]
    return torch.linalg.qr(torch.cat((single, chebyshev), 1))[0].to(device, dtype)


def transform(
    images: Float[Tensor, "b *sizes c"], bases: Sequence[Tensor | None], *, back: bool = False
) -> Float[Tensor, "b *other_sizes c"]:
    """Multiply each axis by its transposed basis or, for `back`, by its basis; last axis first, for small products.

    Each panel of an axis is multiplied by the same block.
    """
    order = list(enumerate(bases, start=1))
    for dim, functions in order if back else reversed(order):
        if functions is not None:
            matrix = functions if back else functions.mT
            flat = images.flatten(dim + 1).reshape(-1, matrix.shape[1], math.prod(images.shape[dim + 1 :]))
            mixed = torch.bmm(matrix.expand(len(flat), -1, -1), flat)
            images = mixed.view(*images.shape[:dim], -1, *images.shape[dim + 1 :])
    return images
