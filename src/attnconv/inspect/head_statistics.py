"""What each head of a layer does, and the layer as a whole, in numbers: over several batches of images if wanted.

Centre, covariance, distance, entropy and the share of content are means over queries (`attention_moments`), then over
images. Everything about shifts comes from the profile p_h(delta) (`shift_profile`). With w_h = p_h / sum_delta p_h,

    best shift           argmax_delta p_h(delta), and its mass p_h there
    gaussian overlap     sum_delta min(w_h, g_h),  g_h(delta) ~ exp(-1/2 (delta - mu)^T C^-1 (delta - mu)),  sum g_h = 1
                         with mu, C the mean and covariance of w_h: 1 where the head's pattern is a Gaussian
    tap residual         sqrt(mean over taps t of |e_t - its projection onto span{p_h}|^2), e_t one at t, 0 elsewhere;
                         of the span what is above the noise of means over queries (`tap_assignment`)
    redundancy           mean over pairs of heads of <p_h, p_h'> / (|p_h| |p_h'|)
    receptive field      root mean square of |delta - mu| under w, the normalised mean of p_h over heads
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.inspect.conv_score import convolution_score, grid_coverage, tap_residual
from attnconv.inspect.moments import attention_moments
from attnconv.inspect.shift_profiles import RunningShiftProfile, ShiftProfile, checked
from attnconv.operators.base import AttentionOperator

# Variance in pixels squared below which a matched Gaussian is a single tap: no profile on whole shifts lies between.
LEAST_VARIANCE = 1e-6


@final
@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """One attention layer in numbers: see the module's formulas. Tensors are float64 unless said otherwise.

    Attributes:
        centre: Mean centre of attention, key minus query, (h, dims) in pixels.
        covariance: Mean covariance of a query's weights, (h, dims, dims) in pixels squared.
        distance: Mean distance between query and key, (h,) in pixels.
        entropy: Mean entropy, (h,) in nats.
        content_share: Part of the probabilities' variance that differs between images, (h,), 0 to 1, within batches.
            None where no operator held several images.
        position_share: The rest, 1 - content_share: the part that positions alone explain. None with it.
        padding_mass: Mean mass on points that are no pixels: zero padding, class tokens, prefixes, (h,).
        constancy: How far the pattern stays the same as the query moves, (h,), 0 to 1; NaN without mass to judge by.
        best_shift: The shift with the most mass, (h, dims) int64 in pixels.
        shift_mass: What the head puts there, (h,), 0 to 1.
        gaussian_overlap: Mass that the profile shares with the Gaussian of its mean and covariance, (h,), 0 to 1; NaN
            for a head without mass on the profile's shifts.
        coverage: Mean mass of distinct heads on the taps of the kernel, in the middle of the field, that they could
            make up, 0 to 1.
        tap_residual: How far the taps of that kernel lie outside the span of the heads' profiles, 0 to 1: what Lemma 3
            asks of the mean patterns. Of a pattern that changes with the query it says nothing (see `constancy`).
        redundancy: Mean cosine between the profiles of two heads, 0 to 1; 0 for a single head.
        receptive_field: Root mean square extent of the mean profile, in pixels; NaN without mass.
        convolution_score: Share of the attention that one tap per head accounts for, 0 (chance) to 1.
        profile: Where the statistics of shifts come from.
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


def layer_statistics(
    operator: AttentionOperator, *, queries: Int[Tensor, "r"] | None = None, block: int | None = None
) -> LayerStatistics:
    """What each head of one operator does, and how convolutional the layer is.

    For several batches of images see `RunningStatistics`.

    Args:
        operator: The attention probabilities, as `attention_operators(model, images)` give them.
        queries: Flat query indices to look at, as from `sample_queries`; None for all of the grid's.
        block: Rows at a time, at least 1; None for as many as make 2^22 probabilities over all heads and images.

    Raises:
        TypeError: `block` is no whole number, or `queries` are none.
        ValueError: `block` is below 1, or `queries` is empty or outside the grid.

    Example:
        >>> from attnconv import Grid, Shift
        >>> taps = [(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)]
        >>> statistics = layer_statistics(Shift(Grid.make((8, 8)), taps, torch.zeros(())))
        >>> statistics.convolution_score, statistics.coverage, statistics.best_shift[0].tolist()
        (1.0, 1.0, [-1, -1])
    """
    running = RunningStatistics()
    running.add(operator, queries=queries, block=block)
    return running.result()


@final
class RunningStatistics:
    """One layer's statistics over several batches of images: `add` each batch's operator, then ask for the `result`.

    Images count alike, but for an operator that all images share, which counts as one. An image on which a head has no
    mass does not count for the head's centre, covariance, distance and entropy.

    Example:
        >>> from attnconv import Dense, Grid
        >>> grid, running = Grid.make((5,)), RunningStatistics()
        >>> for seed in range(3):
        ...     generator = torch.Generator().manual_seed(seed)
        ...     running.add(Dense.from_scores(grid, torch.randn(2, 4, 5, 5, generator=generator)))
        >>> running.result().entropy.shape
        torch.Size([4])
    """

    def __init__(self) -> None:
        self._profile = RunningShiftProfile()
        self._means: dict[str, _Mean] = {}

    @torch.no_grad()
    def add(
        self, operator: AttentionOperator, *, queries: Int[Tensor, "r"] | None = None, block: int | None = None
    ) -> None:
        """Take in the images of one operator; the arguments are those of `layer_statistics`.

        Raises:
            TypeError, ValueError: As `layer_statistics`, or the operator's grid or heads are not the first's.
        """
        self._profile.add(operator, queries=queries, block=block)  # first, since it refuses a foreign operator
        moments = attention_moments(operator, queries=queries, block=block)
        for name in ("centre", "covariance", "distance", "entropy"):
            self._mean(name).add(getattr(moments, name))
        if moments.content_share is not None:
            self._mean("content_share").add(moments.content_share.expand(operator.batch, -1))
        if any(axis.border == "zero" for axis in operator.grid.axes):
            padding = moments.padding_mass  # where there is any; rows of content are dear to make again
        else:
            padding = _mean_padding(operator, *checked(operator, queries, block))
        self._mean("padding_mass").add(padding)

    def result(self) -> LayerStatistics:
        """The statistics of all operators so far.

        Raises:
            ValueError: None was added, or probabilities are not finite.
        """
        profile = self._profile.result()
        if not bool(profile.mass.isfinite().all()):
            raise ValueError(bad("operator", "must have finite probabilities", "NaN or infinity"))
        content = self._mean("content_share").value if "content_share" in self._means else None
        shift_mass, best = profile.mass.flatten(1).max(-1)
        centre, covariance, distance, entropy, padding = (
            self._mean(name).value for name in ("centre", "covariance", "distance", "entropy", "padding_mass")
        )
        return LayerStatistics(
            centre=centre,
            covariance=covariance,
            distance=distance,
            entropy=entropy,
            content_share=content,
            position_share=None if content is None else 1 - content,
            padding_mass=padding,
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

    def _mean(self, name: str) -> "_Mean":
        return self._means.setdefault(name, _Mean())


def gaussian_overlap(profile: ShiftProfile) -> Float64[Tensor, "h"]:
    """Mass that each head's normalised profile shares with the Gaussian of its mean and covariance, 0 to 1.

    The Gaussian is taken at the profile's shifts and made to sum to 1 there. NaN for a head without mass.
    """
    shifts = profile.shifts.double()
    weights = _normalised(profile.mass.flatten(1))
    mean = weights @ shifts
    off = shifts - mean[:, None]  # (h, s, dims)
    covariance = (off * weights[..., None]).mT @ off
    values, vectors = torch.linalg.eigh(torch.nan_to_num(covariance))
    along = off @ vectors  # (h, s, dims): off in the covariance's own axes
    scores = -0.5 * (along.square() / values.clamp_min(LEAST_VARIANCE)[:, None]).sum(-1)
    return torch.minimum(weights, torch.softmax(scores, -1)).sum(-1)


def redundancy(profile: ShiftProfile) -> float:
    """Mean cosine between the profiles of two different heads, 0 to 1; 0 for one head, and for heads without mass."""
    heads = len(profile.mass)
    if heads == 1:
        return 0.0
    flat = profile.mass.flatten(1)
    cosines = profile_cosines(flat, flat)
    return float((cosines.sum() - cosines.diagonal().sum()) / (heads * (heads - 1)))


def profile_cosines(one: Float64[Tensor, "h s"], other: Float64[Tensor, "g s"]) -> Float64[Tensor, "h g"]:
    """<p, p'> / (|p| |p'|) of every pair of profiles; 0 where one has no mass.

    Example:
        >>> profile_cosines(torch.eye(2).double(), torch.ones(1, 2).double()).flatten().round(
        ...     decimals=3
        ... ).tolist()
        [0.707, 0.707]
    """
    directions = []
    for profiles in (one, other):
        norms = profiles.norm(dim=1, keepdim=True)
        directions.append(profiles / norms.where(norms > 0, 1))
    return directions[0] @ directions[1].mT


def receptive_field(profile: ShiftProfile) -> float:
    """Root mean square extent of the heads' mean profile about its own centre, in pixels; NaN without mass.

    A convolution's K x K taps have sqrt(dims (K^2 - 1) / 12). Shifts beyond the profile's reach are not seen.
    """
    shifts = profile.shifts.double()
    weights = _normalised(profile.mass.flatten(1).mean(0, keepdim=True))
    off = shifts - weights @ shifts
    return math.sqrt(float((weights @ off.square()).sum()))


def _normalised(shares: Float64[Tensor, "h s"]) -> Float64[Tensor, "h s"]:
    total = shares.sum(-1, keepdim=True)
    return shares / total.where(total > 0, math.nan)


def _mean_padding(operator: AttentionOperator, queries: Tensor, block: int) -> Float64[Tensor, "b h"]:
    """Mean over queries of the mass that is on no key; asked of the operator, since class tokens are on no grid."""
    total = torch.zeros(operator.batch, operator.heads, dtype=torch.float64, device=operator.device)
    for some in queries.split(block):
        total += operator.padding_mass(some).double().sum(-1)
    return total / len(queries)


@final
class _Mean:
    """A mean over images, of numbers each of which counts unless it is NaN."""

    def __init__(self) -> None:
        self._total: Tensor | float = 0.0
        self._count: Tensor | int = 0

    def add(self, values: Float64[Tensor, "b *rest"]) -> None:
        """One entry per image."""
        self._total = self._total + values.nansum(0)
        self._count = self._count + (~values.isnan()).sum(0)

    @property
    def value(self) -> Float64[Tensor, "*rest"]:
        """NaN where every image had it."""
        assert isinstance(self._total, Tensor)
        return self._total / self._count
