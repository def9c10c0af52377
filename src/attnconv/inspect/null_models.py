"""Statistics of heads against chance: heads turned at random, mirrors exchanged, layers shuffled.

Heads are compared by the cosine of their shift profiles, <p, p'> / (|p| |p'|), as in `redundancy`.

    turned      each head's profile is mirrored along each axis, and axes of one length are exchanged, at random: how
                far and how widely a head attends stays, its direction is drawn anew
    mirrored    p_h(delta) with one component of delta negated; a layer is symmetric along an axis if every mirrored
                head has a partner in the layer, another head or itself
    trend       rho = corr(rank(layer), rank(value)) over all heads, with mean ranks for ties: 1 where every head of a
                later layer has the larger value

Chance is what the statistic exceeds in one of twenty draws (`DRAWS`, the same in each call).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float64, Int
from scipy.stats import rankdata
from torch import Tensor

from attnconv._util.errors import bad
from attnconv._util.value_checks import whole
from attnconv.inspect.head_statistics import grid_coverage, profile_cosines, redundancy
from attnconv.inspect.shift_profiles import ShiftProfile

LEVEL = 0.95  # quantile of the draws that is chance
DRAWS = 1000


@final
@dataclass(frozen=True, eq=False)
class TurnedHeads:
    """`redundancy` and `grid_coverage` of a layer's heads, turned at random: one value for each draw, float64."""

    redundancy: Float64[Tensor, "draws"]
    coverage: Float64[Tensor, "draws"]


def turned_heads(profile: ShiftProfile, *, draws: int = 200, seed: int = 0) -> TurnedHeads:
    """Compute what redundancy and coverage of a layer would be if its heads were turned at random.

    Args:
        profile: The layer's attention per shift.
        draws: Number of draws, at least 1.
        seed: Their seed, at least 0.

    Raises:
        ValueError: `draws` or `seed` is below that, or shifts reach farther one way than the other.

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
    """One draw of `turned_heads`: a profile of which the mass alone is turned."""
    dims = _symmetric_axes(profile)
    square = len(set(profile.reach)) == 1
    heads = []
    for head in profile.mass:
        flipped = (torch.rand(dims, generator=generator) < 0.5).nonzero().flatten().tolist()
        order = torch.randperm(dims, generator=generator).tolist() if square else range(dims)
        heads.append(head.flip(flipped).permute(*order))
    return replace(profile, mass=torch.stack(heads))


def mirror_partners(profile: ShiftProfile, axis: int) -> tuple[Float64[Tensor, "h"], Int[Tensor, "h"]]:
    """Find for each head the head of the layer most like its mirror image: the cosine, 0 to 1, and that head's index.

    Args:
        profile: The layer's attention per shift.
        axis: The axis whose shifts are negated; in images 0 mirrors up and down, 1 left and right.

    Raises:
        ValueError: There is no such axis, or shifts reach farther one way than the other.

    Example:
        >>> from attnconv import Grid, Shift
        >>> from attnconv.inspect import shift_profile
        >>> profile = shift_profile(Shift(Grid.make((8, 8)), [(0, 1), (0, -1), (2, 0)], torch.zeros(())))
        >>> [found.tolist() for found in mirror_partners(profile, 1)]
        [[1.0, 1.0, 1.0], [1, 0, 2]]
    """
    dims = _symmetric_axes(profile)
    if axis not in range(dims):
        raise ValueError(bad("axis", f"must be in 0 .. {dims - 1}", axis))
    mirrored = profile.mass.flip(axis + 1)
    found = profile_cosines(mirrored.flatten(1), profile.mass.flatten(1)).max(1)
    return found.values.clamp(0.0, 1.0), found.indices


def _symmetric_axes(profile: ShiftProfile) -> int:
    """The number of axes, where shifts reach as far down as up: only then a flip negates them."""
    if any(least != -most for least, most in profile.reach):
        fix = "Use a layer whose queries stand on its pixels."
        raise ValueError(bad("profile", "must reach as far either way", list(profile.reach), fix))
    return len(profile.reach)


@final
@dataclass(frozen=True)
class MirrorSymmetry:
    """Whether heads have left-right partners more than up-down ones.

    Attributes:
        left_right, up_down: Mean over heads of the cosine with the partner, for each mirror.
        chance: What `left_right - up_down` exceeds in one of twenty draws that exchange the two mirrors head by head,
            or pair by pair for heads that are each other's partner.
    """

    left_right: float
    up_down: float
    chance: float


def mirror_symmetry(profiles: Sequence[ShiftProfile]) -> MirrorSymmetry:
    """Measure the symmetry of all heads of some layers, each head with a partner in its own layer.

    Args:
        profiles: One for each layer, of two axes.

    Raises:
        ValueError: There is no profile, or one has not two axes or reaches farther one way than the other.

    Example:
        >>> from attnconv import Grid, Shift
        >>> from attnconv.inspect import shift_profile
        >>> taps = [(2, 1), (2, -1), (3, 2), (3, -2), (4, 4), (4, -4)]
        >>> mirror_symmetry([shift_profile(Shift(Grid.make((12, 12)), taps, torch.zeros(())))]).left_right
        1.0
    """
    if not profiles or any(len(profile.reach) != 2 for profile in profiles):
        got = [len(profile.reach) for profile in profiles]
        raise ValueError(bad("profiles", "must be one or more, of two axes each", f"axes {got}"))
    across, upright, sums = [], [], []
    for profile in profiles:
        (one, partner), (other, _) = mirror_partners(profile, 1), mirror_partners(profile, 0)
        own = torch.arange(len(partner), device=partner.device)
        pair = torch.where(partner[partner] == own, torch.minimum(own, partner), own)  # an index for each pair
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
    """How a statistic changes from layer to layer.

    Attributes:
        rho: Spearman's rank correlation, -1 to 1; 0 where all values or all layers are the same.
        chance: What rho exceeds in one of twenty shuffles.
    """

    rho: float
    chance: float


def layer_trend(values: Sequence[Sequence[float]]) -> LayerTrend:
    """Test whether a statistic of heads grows with their layer.

    Args:
        values: Layer by layer, first to last, one value per head; NaN leaves a head out, infinity ranks last.

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
    """Ranks, centred and of length 1, so that their product is a correlation; zeros where all are the same."""
    ranks = torch.from_numpy(rankdata(values))
    return F.normalize(ranks - ranks.mean(), dim=0)
