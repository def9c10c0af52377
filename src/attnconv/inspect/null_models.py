"""Null models for statistics of heads: randomly reflected heads, exchanged mirror axes and shuffled layers.

Heads are compared by the cosine similarity of their shift profiles, <p, p'> / (|p| |p'|), as in `redundancy`.

    turned      each head's profile is reflected along random axes, and axes are permuted at random if all have the same
                length: this changes a head's direction, but not how far or how widely it attends
    mirrored    p_h(delta) with one component of delta negated; a layer is symmetric along an axis if every mirrored
                head equals a head of the layer, its partner
    trend       rho = corr(rank(layer), rank(value)) over all heads: close to 1 if later layers have larger values

The chance level is the 95 % quantile of the statistic over `DRAWS` random samples with a fixed seed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float64, Int
from torch import Tensor

from attnconv._util.errors import bad
from attnconv._util.value_checks import whole
from attnconv.inspect.head_statistics import grid_coverage, profile_cosines, redundancy
from attnconv.inspect.shift_profiles import ShiftProfile

LEVEL = 0.95  # the chance level is this quantile of the random samples
DRAWS = 1000


@final
@dataclass(frozen=True, eq=False)
class TurnedHeads:
    """Redundancy and coverage of a layer with randomly turned heads, one float64 value per random sample."""

    redundancy: Float64[Tensor, "draws"]
    coverage: Float64[Tensor, "draws"]


def turned_heads(profile: ShiftProfile, *, draws: int = 200, seed: int = 0) -> TurnedHeads:
    """Compute redundancy and coverage after randomly reflecting each head and permuting its axes of equal length.

    Args:
        profile: The layer's profile, as returned by `shift_profile`.
        draws: Number of random samples, at least 1.
        seed: Random seed, at least 0.

    Raises:
        ValueError: If `draws` or `seed` is too small, or the range of shifts is not symmetric about 0.

    Example:
        >>> from attnconv import Grid, Shift
        >>> from attnconv.inspect import shift_profile
        >>> profile = shift_profile(Shift(Grid.make((8,)), [(-1,), (0,), (1,)], torch.zeros(())))
        >>> redundancy(profile) < float(turned_heads(profile, draws=20).redundancy.mean())
        True
    """
    generator = torch.Generator().manual_seed(whole("seed", seed, 0))
    turned = [turned_at_random(profile, generator) for _ in range(whole("draws", draws, 1))]
    return TurnedHeads(
        redundancy=torch.tensor([redundancy(one) for one in turned], dtype=torch.float64),
        coverage=torch.tensor([grid_coverage(one) for one in turned], dtype=torch.float64),
    )


def turned_at_random(profile: ShiftProfile, generator: torch.Generator) -> ShiftProfile:
    """Return a profile with each head turned at random, as in `turned_heads`; only `mass` changes."""
    dims = _symmetric_axes(profile)
    square = len(set(profile.reach)) == 1
    heads = []
    for head in profile.mass:
        flipped = (torch.rand(dims, generator=generator) < 0.5).nonzero().flatten().tolist()
        order = torch.randperm(dims, generator=generator).tolist() if square else range(dims)
        heads.append(head.flip(flipped).permute(*order))
    return replace(profile, mass=torch.stack(heads))


def mirror_partners(profile: ShiftProfile, axis: int) -> tuple[Float64[Tensor, "h"], Int[Tensor, "h"]]:
    """Find the most similar head to each head's mirror image; return cosine similarities and head indices (from 0).

    Args:
        profile: The layer's profile, as returned by `shift_profile`.
        axis: Index of the axis whose shifts are negated: in images, 0 swaps up and down, and 1 swaps left and right.

    Raises:
        ValueError: If `axis` is out of range, or the range of shifts is not symmetric about 0.

    Example:
        >>> from attnconv import Grid, Shift
        >>> from attnconv.inspect import shift_profile
        >>> profile = shift_profile(Shift(Grid.make((8, 8)), [(0, 1), (0, -1), (2, 0)], torch.zeros(())))
        >>> [found.tolist() for found in mirror_partners(profile, 1)]
        [[1.0, 1.0, 1.0], [1, 0, 2]]
    """
    dims = _symmetric_axes(profile)
    if axis not in range(dims):
        raise ValueError(bad("axis", f"must be an integer from 0 to {dims - 1}", axis))
    mirrored = profile.mass.flip(axis + 1)
    found = profile_cosines(mirrored.flatten(1), profile.mass.flatten(1)).max(1)
    return found.values.clamp(0.0, 1.0), found.indices


def _symmetric_axes(profile: ShiftProfile) -> int:
    """Return the number of axes; raise a `ValueError` unless flipping `mass` negates the shifts."""
    if any(least != -most for least, most in profile.reach):
        fix = "Use a layer with one query per position."
        raise ValueError(bad("profile", "must have a range of shifts symmetric about 0", list(profile.reach), fix))
    return len(profile.reach)


@final
@dataclass(frozen=True)
class MirrorSymmetry:
    """Left-right and up-down symmetry of heads.

    Attributes:
        left_right, up_down: Mean cosine similarity, 0 to 1, of the heads' mirror images to the most similar heads.
        chance: 95 % quantile of `left_right - up_down` if the axes of each head or mirrored pair are swapped at random.
    """

    left_right: float
    up_down: float
    chance: float


def mirror_symmetry(profiles: Sequence[ShiftProfile]) -> MirrorSymmetry:
    """Measure how closely the set of heads of each layer matches its mirror image, left-right and up-down.

    Args:
        profiles: One profile per layer, each with two axes.

    Raises:
        ValueError: If there is no profile, one does not have two axes, or a range of shifts is not symmetric about 0.

    Example:
        >>> from attnconv import Grid, Shift
        >>> from attnconv.inspect import shift_profile
        >>> taps = [(2, 1), (2, -1), (3, 2), (3, -2), (4, 4), (4, -4)]
        >>> mirror_symmetry([shift_profile(Shift(Grid.make((12, 12)), taps, torch.zeros(())))]).left_right
        1.0
    """
    if not profiles or any(len(profile.reach) != 2 for profile in profiles):
        got = [len(profile.reach) for profile in profiles]
        raise ValueError(bad("profiles", "must contain one or more profiles with two axes", f"numbers of axes {got}"))
    across, upright, sums = [], [], []
    for profile in profiles:
        (one, partner), (other, _) = mirror_partners(profile, 1), mirror_partners(profile, 0)
        own = torch.arange(len(partner), device=partner.device)
        pair = torch.where(partner[partner] == own, torch.minimum(own, partner), own)  # one index per pair
        across.append(one)
        upright.append(other)
        sums.append(torch.zeros_like(one).index_add(0, pair, one - other))
    together = torch.cat(sums).cpu()
    signs = torch.randint(0, 2, (DRAWS, len(together)), generator=torch.Generator().manual_seed(0)).double() * 2 - 1
    chance = torch.quantile(signs @ together / len(together), LEVEL)
    return MirrorSymmetry(float(torch.cat(across).mean()), float(torch.cat(upright).mean()), float(chance))


@final
@dataclass(frozen=True)
class LayerTrend:
    """Trend of a statistic over layers.

    Attributes:
        rho: Spearman's rank correlation between layer index and value, -1 to 1; 0 if either is constant.
        chance: 95 % quantile of `rho` when heads are shuffled across layers.
    """

    rho: float
    chance: float


def layer_trend(values: Sequence[Sequence[float]]) -> LayerTrend:
    """Test whether a statistic of heads increases from layer to layer.

    Args:
        values: For each layer in order, one value per head. Heads whose value is NaN are ignored.

    Example:
        >>> found = layer_trend([[1.0, 1.5, 2.0], [3.0, 2.5, 4.0], [5.0, 9.0, 7.0]])
        >>> round(found.rho, 2), found.rho > found.chance
        (0.95, True)
    """
    pairs = [(layer, value) for layer, some in enumerate(values) for value in some if not math.isnan(value)]
    layers = _standard_ranks([float(layer) for layer, _ in pairs])
    numbers = _standard_ranks([value for _, value in pairs])
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.rand(DRAWS, len(layers), generator=generator, dtype=torch.float64).argsort(-1)
    return LayerTrend(float(layers @ numbers), float(torch.quantile(layers[shuffled] @ numbers, LEVEL)))


def _standard_ranks(values: Sequence[float]) -> Float64[Tensor, "n"]:
    """Return ranks, centred and scaled to norm 1: dot products are correlations. Equal values give zeros."""
    from scipy.stats import rankdata  # takes a second to import

    ranks = torch.from_numpy(rankdata(values))
    return F.normalize(ranks - ranks.mean(), dim=0)
