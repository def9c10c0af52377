"""How convolutional a layer is, from 0 to 1: the share of its attention that one tap per head accounts for.

Heads are given shifts, each shift to at most c heads, so that the mass they hold there is largest (an assignment
problem, solved exactly),

    c     = ceil(heads / 3^d)                                         on d axes
    mass  = max over f with at most c heads at a shift of (1 / heads) sum_h p_h(f(h)),      p_h the shift profile
    score = max(0, (mass - 1/m) / (1 - 1/m)),                         m keys of an image

so that 1 is a layer of Lemma 1 (every head at its own shift, everywhere) and 0 is what uniform attention holds. Heads
that share a shift are one tap: nine copies of a shift score 1/9, not 1. But a tap of full rank takes several thin
heads, and they are no copies: their values differ. Of a kernel with 3^d taps, the smallest that is more than a point,
c heads per tap are what an even split has. Up to 3^d heads c is 1; N heads at one shift score c / N, on two axes at
most 1/5 from nine heads on.

It does not see convolutions by soft heads whose pattern is constant (`constancy` does), nor the value matrices: a layer
that scores 1 is *some* convolution, one tap per head. Kernels of fewer than 3^d taps with several heads at each score
less than 1, and so do heads split unevenly among the taps: from attention alone they cannot be told from copies.
"""

import itertools
import math
from collections.abc import Iterator

import torch
from jaxtyping import Float64, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attnconv.inspect.shift_profiles import ShiftProfile

ROUNDING = 1e-6  # of the largest singular value: what float32 rows leave between heads that are alike


def convolution_score(profile: ShiftProfile) -> float:
    """How convolutional a layer is, from 0 (uniform or random attention) to 1 (a convolution, one tap per head).

    Chance stays a little above 0 where few queries were looked at, since the best shifts are chosen among noise: hard
    random rows of one image score 0.03 in the mean on 14 x 14 pixels and 0.09 on 7 x 7, whether of 3 heads or 16. More
    images average it away; `experiments.chance_scores` has the table.

    Args:
        profile: The layer's attention per shift, as `shift_profile` gives it.

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
    _, held = assigned_shifts(shares, heads_per_shift=heads_per_shift(len(shares), len(profile.reach)))
    mass = float(held.sum()) / len(shares)
    if profile.key_count == 1:  # one key is attended whatever the head does
        return mass
    chance = 1 / profile.key_count
    return min(1.0, max(0.0, (mass - chance) / (1 - chance)))


def grid_coverage(profile: ShiftProfile) -> float:
    """How much of the attention distinct heads put on the taps of the centred kernel that they could make up.

    With K the largest odd number with K^dims <= heads: the K^dims shifts of at most (K - 1) / 2 per axis from the
    middle of the layer's field are given to distinct heads so that the mass they hold is largest; the mean of that mass
    over the shifts, from 0 to 1. The layer of the theorem has 1; heads beyond K^dims are free. The middle is 0 where
    queries stand on the pixels and (K - 1) / 2 without padding; where a stride leaves it open, the middle with the most
    mass is taken.

    Args:
        profile: The layer's attention per shift.

    Example:
        >>> from attnconv import Grid, Shift
        >>> from attnconv.inspect import shift_profile
        >>> grid_coverage(shift_profile(Shift(Grid.make((8,)), [(3,), (0,), (1,), (-1,)], torch.zeros(()))))
        1.0
    """
    flat = profile.mass.flatten(1)
    held = max(float(assigned_shifts(flat[:, taps], heads_per_shift=1)[1].sum()) for taps in _kernels(profile))
    size = kernel_size(len(profile.mass), len(profile.reach))
    return held / size ** len(profile.reach)  # taps out of reach hold nothing


def tap_residual(profile: ShiftProfile) -> float:
    """How far the taps of the centred kernel lie outside the span of the heads' profiles: Lemma 3 of mean patterns.

        sqrt( mean over taps t of min_a |e_t - sum_h a_h p_h|^2 )

    with the taps of `grid_coverage`, and e_t one at its tap and zero at every other shift. 0 where weights can make
    every such kernel of the heads' mean maps, sharp or soft; near 1 for heads that all do the same. Unlike
    `can_express`, which asks every query's own row, it takes the pattern to be constant.

    The span is that of the singular vectors of p whose singular value is above the noise of means over queries,

        max_h (sum_delta v_h)^(1/2) + max_delta (sum_h v_h)^(1/2),      v the profile's `noise`,

    about the largest that noise of these variances alone has. Heads that differ by less are taken to do the same;
    otherwise the differences of nearly uniform heads, which are noise, would span taps.

    Args:
        profile: The layer's attention per shift.

    Example:
        >>> from attnconv import Grid, Shift
        >>> from attnconv.inspect import shift_profile
        >>> taps = [(1,), (0,), (-1,)]
        >>> tap_residual(shift_profile(Shift(Grid.make((8,)), taps, torch.zeros(()))))
        0.0
    """
    flat = profile.mass.flatten(1)
    _, values, directions = torch.linalg.svd(flat, full_matrices=False)
    noise = profile.noise.flatten(1)
    least = torch.maximum(values[0] * ROUNDING, noise.sum(1).max().sqrt() + noise.sum(0).max().sqrt())
    kept = directions[values > least]
    reached = max(float(kept[:, taps].square().sum()) for taps in _kernels(profile))  # squared part within the span
    taps = kernel_size(len(profile.mass), len(profile.reach)) ** len(profile.reach)  # those out of reach are missed
    return math.sqrt(max(0.0, 1 - reached / taps))


def _kernels(profile: ShiftProfile) -> Iterator[Int[Tensor, "taps"]]:
    """For each middle, flat indices of the taps of the kernel that the heads could make up, where profiles reach."""
    half = (kernel_size(len(profile.mass), len(profile.reach)) - 1) // 2
    for middle in itertools.product(*(range(least, most + 1) for least, most in profile.middle)):
        off = profile.shifts - torch.tensor(middle, device=profile.mass.device)
        yield (off.abs() <= half).all(-1).nonzero().flatten()


def kernel_size(heads: int, dims: int) -> int:
    """The largest odd K with K^dims <= heads.

    Example:
        >>> [kernel_size(heads, 2) for heads in (1, 8, 9, 12, 16, 25)]
        [1, 1, 3, 3, 3, 5]
    """
    size = 1
    while (size + 2) ** dims <= heads:
        size += 2
    return size


def heads_per_shift(heads: int, dims: int) -> int:
    """c = ceil(heads / 3^dims): how many heads the score lets hold one shift.

    Example:
        >>> [heads_per_shift(heads, 2) for heads in (4, 9, 10, 12, 18, 19, 36)]
        [1, 1, 2, 2, 2, 3, 4]
    """
    return -(-heads // 3**dims)


def assigned_shifts(
    shares: Float64[Tensor, "h s"], *, heads_per_shift: int
) -> tuple[Int[Tensor, "h"], Float64[Tensor, "h"]]:
    """The assignment of heads to shifts that holds the most mass, with no shift given to too many heads.

    Args:
        shares: Mass of each head at each shift.
        heads_per_shift: How many heads may have the same shift, at least 1.

    Returns:
        The shift and the mass there, per head; -1 and 0 for heads without a shift, where heads are more than
        `heads_per_shift` times the shifts.
    """
    repeated = shares.cpu().repeat(1, heads_per_shift)  # column j is shift j % s: a shift has as many columns as heads
    heads, columns = linear_sum_assignment(repeated.numpy(), maximize=True)
    which = torch.full((len(shares),), -1, dtype=torch.int64)
    which[torch.from_numpy(heads)] = torch.from_numpy(columns) % shares.shape[1]
    held = shares.cpu().gather(1, which.clamp_min(0)[:, None]).squeeze(1)
    return which, held.where(which >= 0, 0.0)
