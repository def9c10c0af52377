"""The observations of the paper: what it says, what is measured of it here, and when it holds.

The criteria were written before any of these numbers was known, except for the fixed shifts of one run of
`quadratic-small`: they are not fitted to the results. Chance levels are one in twenty (`inspect.null_models.LEVEL`),
from shuffles of the run's own heads.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import final

from attnconv.inspect.null_models import LEVEL
from attnconv.paper import measures
from attnconv.paper.measures import LEAST_CONSTANCY, LEAST_MASS, RECOVERED, Found
from attnconv.paper.models import CONTENT, DROPPED, PRUNED, SOURCE
from attnconv.paper.tables import Unit

MARGIN = 0.005  # smallest gain of accuracy that counts


@final
@dataclass(frozen=True)
class Claim:
    """One observation of the paper and how it is judged."""

    key: str
    models: tuple[str, ...]  # whose runs it needs
    paper: str  # what the paper says, in other words
    measured: str
    criterion: str  # when one seed meets the claim, or for `no_gain` when all seeds together do
    measure: Callable[..., Found]  # of the runs of one seed, one for each model
    unit: Unit = "number"  # `share` and `points` are printed in percent and percentage points
    by_layer: str = ""  # what `Found.layers` is; empty for nothing
    layer_unit: Unit = "number"
    no_gain: bool = False  # whether the claim is that a difference of accuracies is no gain


def _fixed_shifts(title: str, name: str, layers: tuple[int, int], paper: str) -> Claim:
    """Figures 4 to 7."""
    each = "each has a head at a fixed shift, and the model more than at its start"
    return Claim(
        f"fixed shifts: {title}",
        (name,),
        paper,
        f"share of all heads with at least {100 * LEAST_MASS:g} % on one shift and a constancy of {LEAST_CONSTANCY:g}",
        f"layers {layers[0]} and {layers[1]}: {each}",
        partial(measures.fixed_shifts, layers=layers),
        unit="share",
        by_layer="share of the heads at a fixed shift",
        layer_unit="share",
    )


def _no_gain(key: str, name: str, paper: str, measured: str) -> Claim:
    """A model that is no better than `quadratic`."""
    limit = f"stays below a gain of {100 * MARGIN:g} points"
    criterion = f"{100 * LEVEL:g} % interval over seeds (at least two) {limit}"
    return Claim(key, (name, "quadratic"), paper, measured, criterion, measures.gain, unit="points", no_gain=True)


_CHANCE = f"rank correlation with the layer above the {100 * LEVEL:g} % quantile of heads shuffled over layers"
_SPREAD = (  # Figures 4 and 14
    Claim(
        "centres: 9 heads",
        ("quadratic",),
        "Early layers attend near the query; later layers put centres of attention farther away.",
        "rank correlation of a head's layer with the distance of its mean centre of attention",
        _CHANCE,
        partial(measures.trend, of=lambda layer: layer.centre.norm(dim=1)),
        by_layer="distance of the mean centre of attention from the query, mean over heads, in positions",
    ),
    Claim(
        "overlap: 9 heads",
        ("quadratic",),
        "Heads of a layer do not overlap.",
        "mean cosine between the mean maps of two heads of a layer",
        f"below the start, and below the {100 * (1 - LEVEL):g} % quantile of heads turned at random",
        partial(measures.against_turned_heads, of=attrgetter("redundancy"), lower=True),
        by_layer="mean cosine between two heads",
    ),
    Claim(
        "coverage: 9 heads",
        ("quadratic",),
        "Heads spread so as to cover the image.",
        "mean attention that distinct heads put on the taps of a 3 x 3 kernel (the audit's coverage)",
        f"above the start, and above the {100 * LEVEL:g} % quantile of heads turned at random",
        partial(measures.against_turned_heads, of=attrgetter("coverage"), lower=False),
        unit="share",
        by_layer="coverage",
        layer_unit="share",
    ),
)
CLAIMS: tuple[Claim, ...] = (
    _fixed_shifts(
        "quadratic",
        "quadratic",
        (1, 2),
        "Heads of the first two layers narrow down to places near the query.",
    ),
    _fixed_shifts(
        "learned",
        "learned",
        (1, 2),
        "Without content, some heads of the first two layers learn to attend one pixel at a fixed shift.",
    ),
    _fixed_shifts(
        "learned + content",
        CONTENT,
        (2, 3),
        "With content too, some heads of layers 2 and 3 keep a fixed shift as the query moves.",
    ),
    *_SPREAD,
    *(
        replace(claim, key=claim.key.replace("9 heads", "16 heads"), models=("quadratic-16-heads",))
        for claim in _SPREAD
    ),
    Claim(
        "reach: 9 heads",
        ("quadratic",),
        "Later layers attend to larger patterns.",
        "rank correlation of a head's layer with its mean distance between query and key",
        _CHANCE,
        partial(measures.trend, of=attrgetter("distance")),
        by_layer="mean distance between query and key, in positions",
    ),
    Claim(
        "mirror images",
        ("learned",),
        "Some heads of the learned encoding attend patterns that are symmetric from left to right.",
        "mean cosine of each head's mirror image with the head most like it, left-right minus up-down",
        f"above the {100 * LEVEL:g} % quantile of exchanging the two mirrors by chance",
        measures.mirror,
        by_layer="mean cosine with the left-right partner",
    ),
    Claim(
        "content",
        (CONTENT,),
        "Positions rule in early layers, content in later ones.",
        "rank correlation of a head's layer with its share of content",
        _CHANCE,
        partial(measures.trend, of=attrgetter("content_share")),
        by_layer="share of content, mean over heads",
        layer_unit="share",
    ),
    Claim(
        "ellipses",
        (SOURCE,),
        "Heads that may be ellipses become so, most of all in later layers.",
        "rank correlation of a head's layer with the condition number of its covariance",
        f"{_CHANCE}; and the median condition number above the start's",
        measures.elongation,
        by_layer="median condition number",
    ),
    _no_gain(
        "no gain from ellipses",
        SOURCE,
        "Ellipses bring no accuracy.",
        "test accuracy of the generalised model minus the quadratic one's",
    ),
    Claim(
        "dip after pruning",
        (PRUNED, SOURCE),
        "Taking degenerate heads out costs a little accuracy at first.",
        "test accuracy right after pruning minus that before",
        "below 0",
        measures.dip,
        unit="points",
        by_layer="heads taken out",
    ),
    Claim(
        "recovery after pruning",
        (PRUNED, SOURCE),
        "Training on with a smaller rate brings the accuracy back.",
        "test accuracy after training on minus that before pruning",
        f"at most {100 * RECOVERED:g} points below",
        measures.recovery,
        unit="points",
    ),
    _no_gain(
        "no gain from attention dropout",
        DROPPED,
        "Said nowhere: the paper's code drops attention probabilities with rate 0.1, the presets here do not.",
        "test accuracy with rate 0.1 minus that with 0",
    ),
)
