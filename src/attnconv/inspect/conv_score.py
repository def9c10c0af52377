"""How convolutional a layer is, from 0 to 1: the share of its attention that one tap per head accounts for.

    c     = ceil(heads / 3^d)                                         on d axes
    mass  = max over f with at most c heads at a shift of (1 / heads) sum_h p_h(f(h)),      p_h the shift profile
    score = max(0, (mass - 1/m) / (1 - 1/m)),                         m keys of an image

1 is a layer of Lemma 1 (every head at its own shift, everywhere), 0 is uniform attention. c is what an even split of
the heads among 3^d taps needs: copies of one tap score little, but a tap of full rank may take several thin heads.
"""

import itertools
import math
from collections.abc import Iterator

import torch
from jaxtyping import Float64, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attnconv.inspect.shift_profiles import ShiftProfile

ROUNDING = 1e-6  # of the largest singular value: differences that float32 rows leave between equal heads


def convolution_score(profile: ShiftProfile) -> float:
    """Compute how convolutional a layer is, from 0 (uniform attention) to 1 (a convolution, one tap per head).

    Random attention scores a little above 0, since the best shifts are chosen among noise; more images average it away.

    Args:
        profile: The layer's attention per shift, as `shift_profile` returns it.

    Example:
        >>> from attnconv import Grid, Shift
        >>> from attnconv.inspect import shift_profile
        >>> grid = Grid.make((9,))
        >>> convolution_score(shift_profile(Shift(grid, [(-1,), (0,), (1,)], torch.zeros(()))))
        1.0
        >>> copies = shift_profile(Shift(grid, [(1,), (1,), (1,)], torch.zeros(())))
        >>> round(convolution_score(copies), 2)  # one tap, and what the last pixel holds at shift 0
        0.29
    """
    shares = profile.mass.flatten(1)
    mass = assigned_mass(shares, heads_per_shift(len(shares), len(profile.reach))) / len(shares)
    if profile.key_count == 1:  # one key is attended whatever the head does
        return mass
    chance = 1 / profile.key_count
    return min(1.0, max(0.0, (mass - chance) / (1 - chance)))


def grid_coverage(profile: ShiftProfile) -> float:
    """Compute the mean mass, 0 to 1, that distinct heads put on the taps of the centred kernel they could make up.

    With K the largest odd number such that K^dims <= heads, the taps are the K^dims shifts around the middle of the
    layer's field. Where a stride leaves the middle open, the best one counts.

    Args:
        profile: The layer's attention per shift.

    Example:
        >>> from attnconv import Grid, Shift
        >>> from attnconv.inspect import shift_profile
        >>> grid_coverage(shift_profile(Shift(Grid.make((8,)), [(3,), (0,), (1,), (-1,)], torch.zeros(()))))
        1.0
    """
    shares = profile.mass.flatten(1)
    return max(assigned_mass(shares[:, taps], 1) for taps in _kernels(profile)) / _tap_count(profile)


def tap_residual(profile: ShiftProfile) -> float:
    """How far the taps of `grid_coverage` lie outside the span of the heads' profiles, 0 to 1 (Lemma 3).

        sqrt( mean over taps t of min_a |e_t - sum_h a_h p_h|^2 ),      e_t one at its tap and zero elsewhere

    Singular vectors of p count where their value is above that of noise of variance v,
    max_h (sum_delta v_h)^(1/2) + max_delta (sum_h v_h)^(1/2).
    """
    _, values, directions = torch.linalg.svd(profile.mass.flatten(1), full_matrices=False)
    noise = profile.noise.flatten(1)
    least = torch.maximum(values[0] * ROUNDING, noise.sum(1).max().sqrt() + noise.sum(0).max().sqrt())
    kept = directions[values > least]
    reached = max(float(kept[:, taps].square().sum()) for taps in _kernels(profile))  # squared part within the span
    return math.sqrt(max(0.0, 1 - reached / _tap_count(profile)))


def kernel_size(heads: int, dims: int) -> int:
    """The largest odd K with K^dims <= heads."""
    size = 1
    while (size + 2) ** dims <= heads:
        size += 2
    return size


def heads_per_shift(heads: int, dims: int) -> int:
    """c = ceil(heads / 3^dims), the number of heads that may share one shift in the score."""
    return -(-heads // 3**dims)


def assigned_mass(shares: Float64[Tensor, "h s"], heads_per_shift: int) -> float:
    """The most mass of heads that are assigned a shift each, `heads_per_shift` at most to one; the rest hold none."""
    repeated = shares.cpu().repeat(1, heads_per_shift)  # a shift has as many columns as heads
    heads, columns = linear_sum_assignment(repeated.numpy(), maximize=True)
    return float(repeated[heads.tolist(), columns.tolist()].sum())


def _kernels(profile: ShiftProfile) -> Iterator[Int[Tensor, "taps"]]:
    """For each middle, flat indices of the kernel's taps within reach; those out of reach hold nothing."""
    half = (kernel_size(len(profile.mass), len(profile.reach)) - 1) // 2
    for middle in itertools.product(*(range(least, most + 1) for least, most in profile.middle)):
        off = profile.shifts - torch.tensor(middle, device=profile.mass.device)
        yield (off.abs() <= half).all(-1).nonzero().flatten()


def _tap_count(profile: ShiftProfile) -> int:
    return kernel_size(len(profile.mass), len(profile.reach)) ** len(profile.reach)
