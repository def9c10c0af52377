"""Statistics of each head of a layer and of the whole layer, over one or several batches of images.

Centre, covariance, distance, entropy and the share of content are means over queries (`attention_moments`), then over
images. The rest comes from the profile p_h(delta) (`shift_profile`). With w_h = p_h / sum_delta p_h,

    best shift           argmax_delta p_h(delta), and its mass p_h there
    gaussian overlap     sum_delta min(w_h, g_h),  g_h(delta) ~ exp(-1/2 (delta - mu)^T C^-1 (delta - mu)),  sum g_h = 1
                         with mu, C the mean and covariance of w_h: 1 where the head's pattern is a Gaussian
    redundancy           mean over pairs of heads of <p_h, p_h'> / (|p_h| |p_h'|)
    receptive field      root mean square of |delta - mu| under w, the normalised mean of p_h over heads
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.inspect.conv_score import convolution_score, grid_coverage, tap_residual
from attnconv.inspect.moments import attention_moments
from attnconv.inspect.shift_profiles import RunningShiftProfile, ShiftProfile
from attnconv.operators.base import AttentionOperator

# Variance in pixels squared below which a matched Gaussian is a single tap: no profile on whole shifts lies between.
LEAST_VARIANCE = 1e-6
MOMENTS = ("centre", "covariance", "distance", "entropy", "padding_mass")


@final
@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """Statistics of one attention layer. Tensors are float64 unless said otherwise.

    Attributes:
        centre: Mean centre of attention, key minus query, (h, dims) in pixels.
        covariance: Mean covariance of a query's weights, (h, dims, dims) in pixels squared.
        distance: Mean distance between query and key, (h,) in pixels.
        entropy: Mean entropy, (h,) in nats.
        content_share: Share of the probabilities' variance that differs between images of a batch, (h,), 0 to 1; None
            where no operator held several images.
        position_share: 1 - content_share, what positions explain.
        padding_mass: Mean mass off the image's pixels: zero padding, class tokens, registers, (h,).
        constancy: How constant the pattern is as the query moves, (h,), 0 to 1; NaN without mass.
        best_shift: The shift with the most mass, (h, dims) int64 in pixels.
        shift_mass: The mass there, (h,), 0 to 1.
        gaussian_overlap: Mass that the profile shares with the Gaussian of its mean and covariance, (h,), 0 to 1; NaN
            for a head without mass on the profile's shifts.
        coverage: Mean mass of distinct heads on the taps of the kernel they could make up, 0 to 1 (`grid_coverage`).
        tap_residual: How far those taps lie outside the span of the heads' profiles, 0 to 1 (`tap_residual`).
        redundancy: Mean cosine between the profiles of two heads, 0 to 1; 0 for a single head.
        receptive_field: Root mean square extent of the mean profile, in pixels; NaN without mass.
        convolution_score: Share of the attention that one tap per head accounts for, 0 (chance) to 1.
        profile: Attention per shift.
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
    """Compute what each head of one operator does, and how convolutional the layer is.

    For several batches of images see `RunningStatistics`.

    Args:
        operator: The attention probabilities, as `attention_operators` returns them.
        queries: Flat query indices, such as `sample_queries` returns; None for all of the grid's.
        block: Rows at a time; None for as many as make 2^22 probabilities.

    Raises:
        TypeError, ValueError: As `attention_moments`.

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
    """One layer's statistics over several batches of images: `add` the operator of each, then ask for the `result`.

    Images have equal weight; an operator that all images share counts as one, and an image on which a head has no mass
    as none in the head's moments.

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
        self._means: dict[str, _Mean] = defaultdict(_Mean)

    @torch.no_grad()
    def add(
        self, operator: AttentionOperator, *, queries: Int[Tensor, "r"] | None = None, block: int | None = None
    ) -> None:
        """Add the images of one operator; the arguments are those of `layer_statistics`.

        Raises:
            ValueError: The operator has another grid or other heads than the first.
        """
        self._profile.add(operator, queries=queries, block=block)  # first, since it refuses a foreign operator
        moments = attention_moments(operator, queries=queries, block=block)
        for name in MOMENTS:
            self._means[name].add(getattr(moments, name))
        if moments.content_share is not None:
            self._means["content_share"].add(moments.content_share.expand(operator.batch, -1))

    def result(self) -> LayerStatistics:
        """The statistics of all operators so far.

        Raises:
            ValueError: None was added, or probabilities are not finite.
        """
        profile = self._profile.result()
        if not bool(profile.mass.isfinite().all()):
            raise ValueError(bad("operator", "must have finite probabilities", "NaN or infinity"))
        content = self._means["content_share"].value if "content_share" in self._means else None
        shift_mass, best = profile.mass.flatten(1).max(-1)
        return LayerStatistics(
            **{name: self._means[name].value for name in MOMENTS},
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


def gaussian_overlap(profile: ShiftProfile) -> Float64[Tensor, "h"]:
    """Gaussian overlap of each head, 0 to 1; NaN for a head without mass."""
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
    """Mean cosine between the profiles of two heads, 0 to 1; 0 for one head, and for heads without mass."""
    heads = len(profile.mass)
    if heads == 1:
        return 0.0
    flat = profile.mass.flatten(1)
    cosines = profile_cosines(flat, flat)
    return float((cosines.sum() - cosines.diagonal().sum()) / (heads * (heads - 1)))


def profile_cosines(one: Float64[Tensor, "h s"], other: Float64[Tensor, "g s"]) -> Float64[Tensor, "h g"]:
    """<p, p'> / (|p| |p'|) of every pair of profiles; 0 where one has no mass."""
    directions = []
    for profiles in (one, other):
        norms = profiles.norm(dim=1, keepdim=True)
        directions.append(profiles / norms.where(norms > 0, 1))
    return directions[0] @ directions[1].mT


def receptive_field(profile: ShiftProfile) -> float:
    """Receptive field in pixels, sqrt(dims (K^2 - 1) / 12) for a kernel of K taps per axis; NaN without mass."""
    shifts = profile.shifts.double()
    weights = _normalised(profile.mass.flatten(1).mean(0, keepdim=True))
    off = shifts - weights @ shifts
    return math.sqrt(float((weights @ off.square()).sum()))


def _normalised(shares: Float64[Tensor, "h s"]) -> Float64[Tensor, "h s"]:
    total = shares.sum(-1, keepdim=True)
    return shares / total.where(total > 0, math.nan)


@final
class _Mean:
    """A mean over images that leaves out NaN."""

    def __init__(self) -> None:
        self._total, self._count = torch.zeros(()), torch.zeros(())

    def add(self, values: Float64[Tensor, "b *rest"]) -> None:
        """Add one entry per image."""
        self._total = values.nansum(0) + self._total
        self._count = (~values.isnan()).sum(0) + self._count

    @property
    def value(self) -> Float64[Tensor, "*rest"]:
        """NaN where every image had it."""
        return self._total / self._count
