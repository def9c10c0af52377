"""Statistics of the heads of a layer, and of the layer as a whole, over one or several batches of images.

The moments of a head (`attention_moments`) are averaged over queries, then over images. The other statistics are
computed from the shift profile p_h(delta) (`shift_profile`). With w_h = p_h / sum_delta p_h,

    gaussian overlap     sum_delta min(w_h, g_h),  g_h(delta) ~ exp(-1/2 (delta - mu)^T C^-1 (delta - mu)),  sum g_h = 1
                         with mu, C the mean and covariance of w_h: 1 if the head's pattern is a Gaussian
    redundancy           mean over pairs of heads of <p_h, p_h'> / (|p_h| |p_h'|)
    convolution score    max(0, (mass - 1/m) / (1 - 1/m)) with m keys per image and, on d axes,
                         mass = max over f of (1 / heads) sum_h p_h(f(h)), where f assigns a shift to each head,
                                and the same shift to at most c = ceil(heads / 3^d) heads

A score of 1 means that each head attends to one shift, for every query, as in Lemma 1. Uniform attention scores 0.
With c heads per shift, the heads can be split evenly among 3^d taps: a tap whose matrix has full rank may need several
heads, but many copies of one tap score low.
"""

import itertools
import math
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float64, Int
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.inspect.chosen_queries import query_blocks
from attnconv.inspect.exact_sums import ExactSum
from attnconv.inspect.moments import AttentionMoments, RunningMoments
from attnconv.inspect.shift_profiles import RunningShiftProfile, ShiftProfile
from attnconv.operators.base import AttentionOperator, Queries

LEAST_VARIANCE = 1e-6  # lower limit for a Gaussian's variance, in positions squared; a single tap has variance 0
ROUNDING = 1e-6  # float32 rounding differences between equal heads, relative to the largest singular value


@final
@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """Statistics of one attention layer and its heads; tensors are float64 unless noted otherwise.

    Attributes:
        centre, covariance, distance, entropy, padding_mass: As in `AttentionMoments`, averaged over images.
        content_share: Share of the variance of the probabilities that is due to differences between the images of a
            batch, (h,), 0 to 1; None if every batch had one image, or if attention is independent of it.
        position_share: 1 - content_share, the share of this variance that positions explain; None if that is None.
        constancy: Share of the attention map's energy that survives the projection on shift-invariant matrices, (h,),
            0 to 1; NaN if no attention is on the image.
        best_shift: Shift (key minus query) with the largest mean attention, (h, dims) int64, in positions.
        shift_mass: Mean attention at the best shift, (h,), 0 to 1.
        gaussian_overlap: Overlap of profile and Gaussian, (h,), 0 to 1; NaN if no attention is on the image.
        coverage: Mean attention of heads to the taps of a centred kernel, 0 to 1; see `grid_coverage`.
        tap_residual: Distance of these taps from the span of the profiles, 0 to 1; see the function `tap_residual`.
        redundancy: Mean cosine similarity of profiles over all pairs of heads, 0 to 1; 0 for a single head.
        receptive_field: RMS distance from the centre of the mean profile, in positions; NaN if all profiles are 0.
        convolution_score: Share of attention that one tap per head accounts for, rescaled to 0 for uniform attention.
        profile: Mean attention at each shift.
    """

    centre: Float64[Tensor, "h dims"]
    covariance: Float64[Tensor, "h dims dims"]
    distance: Float64[Tensor, "h"]
    entropy: Float64[Tensor, "h"]
    content_share: Float64[Tensor, "h"] | None
    position_share: Float64[Tensor, "h"] | None
    padding_mass: Float64[Tensor, "h"]
    constancy: Float64[Tensor, "h"]
    best_shift: Int[Tensor, "h dims"]
    shift_mass: Float64[Tensor, "h"]
    gaussian_overlap: Float64[Tensor, "h"]
    coverage: float
    tap_residual: float
    redundancy: float
    receptive_field: float
    convolution_score: float
    profile: ShiftProfile


def layer_statistics(operator: AttentionOperator, *, queries: Queries | None = None) -> LayerStatistics:
    """Compute the statistics of the heads of one operator, and its convolution score.

    Args:
        operator: The attention probabilities, for example from `attention_operators`.
        queries: Flat query indices; None for all queries of the grid.

    Raises:
        TypeError: If `queries` contains values that are not integers.
        ValueError: If `queries` is empty or contains an index outside the grid, or the probabilities are not finite.

    Example:
        >>> from attnconv import Grid, Shift
        >>> statistics = layer_statistics(Shift(Grid.make((8,)), [(-1,), (0,), (1,)], torch.zeros(())))
        >>> statistics.convolution_score, statistics.coverage, statistics.best_shift.flatten().tolist()
        (1.0, 1.0, [-1, 0, 1])
    """
    running = RunningStatistics()
    running.add(operator, queries=queries)
    return running.result()


@final
class RunningStatistics:
    """Statistics of one layer, accumulated over batches of images: `add` one operator per batch, then call `result`.

    All images have equal weight; an operator shared by a batch counts as one image. NaN moments of a head are skipped.
    The order of the batches does not matter, and they can be added to several accumulators, for example in different
    processes, which are then combined with `merge`.

    Example:
        >>> from attnconv import Dense, Grid
        >>> running = RunningStatistics()
        >>> running.add(Dense.from_scores(Grid.make((5,)), torch.zeros(2, 4, 5, 5)))
        >>> running.result().entropy.shape
        torch.Size([4])
    """

    def __init__(self) -> None:
        self._profile = RunningShiftProfile()
        self._moments = ExactSum.of(torch.zeros((), dtype=torch.float64))  # (2, h, moments): sums, numbers of images

    @torch.no_grad()
    def add(self, operator: AttentionOperator, *, queries: Queries | None = None) -> None:
        """Add an operator; raise a `ValueError` if its grid or number of heads is not that of the first operator."""
        blocks = query_blocks(operator, queries)
        running = RunningMoments(operator, all_queries=queries is None)
        with self._profile.adding(operator) as add:
            for some in blocks:
                window = operator.window_rows(some)
                add(some, window)
                if running.needs_rows:
                    running.add(some, window)
        moments = _packed(running.result())
        self._moments += ExactSum.of(torch.stack((moments.nansum(0), (~moments.isnan()).sum(0))))

    def merge(self, other: "RunningStatistics") -> None:
        """Add all operators of another accumulator; raise a `ValueError` if its grid or number of heads differs."""
        self._profile.merge(other._profile)
        self._moments += other._moments

    def result(self) -> LayerStatistics:
        """Return the statistics so far; raise a `ValueError` if there is no operator or a probability is not finite."""
        profile = self._profile.result()
        if not bool(profile.mass.isfinite().all()):
            raise ValueError(bad("operator", "must have finite probabilities", "NaN or infinity"))
        total, count = self._moments.value()
        dims = len(profile.reach)
        centre, covariance, others = (total / count).split((dims, dims * dims, 4), -1)
        distance, entropy, padding_mass, shares = others.unbind(-1)
        content = shares if bool(count[:, -1].any()) else None
        shift_mass, best = profile.mass.flatten(1).max(-1)
        return LayerStatistics(
            centre=centre,
            covariance=covariance.unflatten(-1, (dims, dims)),
            distance=distance,
            entropy=entropy,
            padding_mass=padding_mass,
            content_share=content,
            position_share=None if content is None else 1 - content,
            constancy=profile.constancy,
            best_shift=profile.shifts[best],
            shift_mass=shift_mass,
            gaussian_overlap=gaussian_overlap(profile),
            coverage=grid_coverage(profile),
            tap_residual=tap_residual(profile),
            redundancy=redundancy(profile),
            receptive_field=receptive_field(profile),
            convolution_score=convolution_score(profile),
            profile=profile,
        )


def _packed(moments: AttentionMoments) -> Float64[Tensor, "b h moments"]:
    """Return all moments in one tensor, with NaN for a content share that is None."""
    share = moments.content_share
    shares = torch.full_like(moments.entropy, math.nan) if share is None else share.expand_as(moments.entropy)
    others = torch.stack((moments.distance, moments.entropy, moments.padding_mass, shares), -1)
    return torch.cat((moments.centre, moments.covariance.flatten(2), others), -1)


def convolution_score(profile: ShiftProfile) -> float:
    """Compute how convolutional a layer is, from 0 (uniform attention) to 1 (a convolution with one tap per head).

    The score of random attention is above 0 (up to 0.3 on small grids), since heads get the shifts of largest noise.

    Args:
        profile: The layer's profile, as returned by `shift_profile`.

    Example:
        >>> from attnconv import Grid, Shift
        >>> from attnconv.inspect import shift_profile
        >>> copies = shift_profile(Shift(Grid.make((9,)), [(1,), (1,), (1,)], torch.zeros(())))
        >>> round(convolution_score(copies), 2)  # masses 1, 1/9 (the last query attends to itself), 0
        0.29
    """
    shares = profile.mass.flatten(1)
    mass = assigned_mass(shares, math.ceil(len(shares) / 3 ** len(profile.reach))) / len(shares)
    if profile.key_count == 1:  # any attention has all its mass on the only key
        return mass
    chance = 1 / profile.key_count
    return min(1.0, max(0.0, (mass - chance) / (1 - chance)))


def grid_coverage(profile: ShiftProfile) -> float:
    """Compute the mean attention of heads to the taps of a centred kernel, 0 to 1, with a different head for each tap.

    With K the largest odd number such that K^dims <= heads, the taps are the K^dims shifts around the centre of the
    receptive field. The result is the maximum over all assignments of heads to taps and over all candidates for the
    centre; with a stride above 1, there may be several (`ShiftProfile.middle`).

    Args:
        profile: The layer's profile, as returned by `shift_profile`.

    Example:
        >>> from attnconv import Grid, Shift
        >>> from attnconv.inspect import shift_profile
        >>> grid_coverage(shift_profile(Shift(Grid.make((8,)), [(3,), (0,), (1,), (-1,)], torch.zeros(()))))
        1.0
    """
    count, kernels = _kernels(profile)
    return max(assigned_mass(profile.mass.flatten(1)[:, taps], 1) for taps in kernels) / count


def tap_residual(profile: ShiftProfile) -> float:
    """Compute the distance, 0 to 1, of the taps of `grid_coverage` from the span of the profiles p_h (Lemma 3).

        sqrt( mean over taps t of min_a |e_t - sum_h a_h p_h|^2 ),      e_t = 1 at tap t and 0 at other shifts

    The span includes only singular vectors of p with singular values above max_h (sum_delta v_h)^(1/2) +
    max_delta (sum_h v_h)^(1/2), about the largest singular value of noise with the variance v = `profile.noise`.
    """
    _, values, directions = torch.linalg.svd(profile.mass.flatten(1), full_matrices=False)
    noise = profile.noise.flatten(1)
    least = torch.maximum(values[0] * ROUNDING, noise.sum(1).max().sqrt() + noise.sum(0).max().sqrt())
    kept = directions[values > least]
    count, kernels = _kernels(profile)
    reached = max(float(kept[:, taps].square().sum()) for taps in kernels)  # squared norm inside the span
    return math.sqrt(max(0.0, 1 - reached / count))


def kernel_size(heads: int, dims: int) -> int:
    """Return the largest odd K with K^dims <= heads."""
    return max(size for size in range(1, heads + 1, 2) if size**dims <= heads)


def assigned_mass(shares: Float64[Tensor, "h s"], heads_per_shift: int) -> float:
    """Return the largest total mass at one shift per head, with at most `heads_per_shift` heads per shift."""
    from scipy.optimize import linear_sum_assignment  # takes a second to import

    repeated = shares.cpu().repeat(1, heads_per_shift)  # `heads_per_shift` columns per shift
    heads, columns = linear_sum_assignment(repeated.numpy(), maximize=True)
    return float(repeated[heads.tolist(), columns.tolist()].sum())


def _kernels(profile: ShiftProfile) -> tuple[int, list[Int[Tensor, "taps"]]]:
    """Return K^dims and, for each candidate centre, the flat indices of the kernel's taps within reach."""
    dims = len(profile.reach)
    size = kernel_size(len(profile.mass), dims)
    middles = itertools.product(*(range(least, most + 1) for least, most in profile.middle))
    offs = (profile.shifts - torch.tensor(middle, device=profile.mass.device) for middle in middles)
    return size**dims, [(off.abs() <= size // 2).all(-1).nonzero().flatten() for off in offs]


def gaussian_overlap(profile: ShiftProfile) -> Float64[Tensor, "h"]:
    """Compute each head's overlap with a Gaussian, 0 to 1; NaN for a head without attention to the image."""
    shifts = profile.shifts.double()
    weights = _normalised(profile.mass.flatten(1))
    mean = weights @ shifts
    off = shifts - mean[:, None]  # (h, s, dims)
    covariance = (off * weights[..., None]).mT @ off
    values, vectors = torch.linalg.eigh(torch.nan_to_num(covariance))
    along = off @ vectors  # (h, s, dims): coordinates along the covariance's eigenvectors
    scores = -0.5 * (along.square() / values.clamp_min(LEAST_VARIANCE)[:, None]).sum(-1)
    return torch.minimum(weights, torch.softmax(scores, -1)).sum(-1)


def redundancy(profile: ShiftProfile) -> float:
    """Compute the mean cosine similarity of two heads' profiles, 0 to 1; 0 for one head, or if all profiles are 0."""
    heads, flat = len(profile.mass), profile.mass.flatten(1)
    cosines = profile_cosines(flat, flat).fill_diagonal_(0)
    return float(cosines.sum() / max(1, heads * (heads - 1)))


def profile_cosines(one: Float64[Tensor, "h s"], other: Float64[Tensor, "g s"]) -> Float64[Tensor, "h g"]:
    """Compute <p, p'> / (|p| |p'|) for every pair of profiles; 0 if one of them is 0."""
    tiny = torch.finfo(torch.float64).tiny
    return F.normalize(one, dim=1, eps=tiny) @ F.normalize(other, dim=1, eps=tiny).mT


def receptive_field(profile: ShiftProfile) -> float:
    """Compute the root mean square of |delta - its mean| under the mean profile, in positions; NaN if that is 0."""
    shifts = profile.shifts.double()
    weights = _normalised(profile.mass.flatten(1).mean(0, keepdim=True))
    off = shifts - weights @ shifts
    return math.sqrt(float((weights @ off.square()).sum()))


def _normalised(shares: Float64[Tensor, "h s"]) -> Float64[Tensor, "h s"]:
    total = shares.sum(-1, keepdim=True)
    return shares / total.where(total > 0, math.nan)
