"""What the paper observed in its trained models, what is measured of it, and when it is said to hold.

Written before any of these numbers was looked at, but for the fixed shifts of one run of `quadratic-small`: the limits
here are not fitted to what came out. The chance levels are one in twenty (`inspect.layer_trends.LEVEL`), from shuffles
of the run's own heads.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from attnconv.inspect.layer_trends import LEVEL
from attnconv.paper.claim_measures import (
    RECOVERED,
    Measure,
    centre_distance,
    content,
    coverage,
    dip,
    elongation,
    fixed_shifts,
    gain,
    mirrored,
    overlap,
    reach,
    recovery,
)
from attnconv.paper.fixed_shifts import LEAST_CONSTANCY, LEAST_MASS
from attnconv.paper.number_format import Unit
from attnconv.paper.training_plan import DROPPED, PRUNED, SOURCE

Rule: TypeAlias = Literal["votes", "no gain"]

MARGIN = 0.005  # of accuracy: a gain that is worth the name


@final
@dataclass(frozen=True)
class Question:
    """One observation of the paper and how it is judged.

    Attributes:
        key: Short name.
        models: Whose runs it needs, as `attnconv reproduce --only` calls them.
        paper: What the paper says, in other words.
        measured: What the number is.
        criterion: When one seed speaks for it; of a difference between models, when all seeds together do.
        measure: Gives the number of one seed.
        unit: `share` and `points` are printed in percent and percentage points.
        by_layer: What is shown of each layer; empty for nothing.
        layer_unit: Unit of that.
        rule: How seeds are put together.
    """

    key: str
    models: tuple[str, ...]
    paper: str
    measured: str
    criterion: str
    measure: Measure
    unit: Unit = "number"
    by_layer: str = ""
    layer_unit: Unit = "number"
    rule: Rule = "votes"


_FIXED = f"share of all heads with at least {100 * LEAST_MASS:g} % on one shift and a constancy of {LEAST_CONSTANCY:g}"
_FIXED_LAYERS = "share of the heads at a fixed shift"
_CHANCE = f"rank correlation with the layer above the {100 * LEVEL:g} % quantile of heads shuffled over layers"
_TURNED = "heads turned at random"
_EACH = "each has a head at a fixed shift, and the model more than at its start"
_DISTANCE = "distance of the mean centre of attention from the query, mean over heads, in positions"
_SEEDS = f"{100 * LEVEL:g} % interval over seeds (at least two) stays below a gain of {100 * MARGIN:g} points"


def _fixed(name: str, title: str, layers: tuple[int, int], paper: str) -> Question:
    """What the paper says of Figures 4 to 7: these layers have heads that hold a fixed shift."""
    return Question(
        f"fixed shifts: {title}",
        (name,),
        paper,
        _FIXED,
        f"layers {layers[0]} and {layers[1]}: {_EACH}",
        fixed_shifts(name, layers),
        unit="share",
        by_layer=_FIXED_LAYERS,
        layer_unit="share",
    )


def _spread(name: str, title: str) -> tuple[Question, ...]:
    """What the paper says of Figures 4 and 14."""
    return (
        Question(
            f"centres: {title}",
            (name,),
            "Early layers attend near the query; later layers put centres of attention farther away.",
            "rank correlation of a head's layer with the distance of its mean centre of attention",
            _CHANCE,
            centre_distance(name),
            by_layer=_DISTANCE,
        ),
        Question(
            f"overlap: {title}",
            (name,),
            "Heads of a layer do not overlap.",
            "mean cosine between the mean maps of two heads of a layer",
            f"below the start, and below the {100 * (1 - LEVEL):g} % quantile of {_TURNED}",
            overlap(name),
            by_layer="mean cosine between two heads",
        ),
        Question(
            f"coverage: {title}",
            (name,),
            "Heads spread so as to cover the image.",
            "mean attention that distinct heads put on the taps of a 3 x 3 kernel (the audit's coverage)",
            f"above the start, and above the {100 * LEVEL:g} % quantile of {_TURNED}",
            coverage(name),
            unit="share",
            by_layer="coverage",
            layer_unit="share",
        ),
    )


QUESTIONS: tuple[Question, ...] = (
    _fixed("quadratic", "quadratic", (1, 2), "Heads of the first two layers narrow down to places near the query."),
    _fixed(
        "learned",
        "learned",
        (1, 2),
        "Without content, some heads of the first two layers learn to attend one pixel at a fixed shift.",
    ),
    _fixed(
        "learned-content",
        "learned + content",
        (2, 3),
        "With content too, some heads of layers 2 and 3 keep a fixed shift as the query moves.",
    ),
    *_spread("quadratic", "9 heads"),
    *_spread("quadratic-16-heads", "16 heads"),
    Question(
        "reach: 9 heads",
        ("quadratic",),
        "Later layers attend to larger patterns.",
        "rank correlation of a head's layer with its mean distance between query and key",
        _CHANCE,
        reach("quadratic"),
        by_layer="mean distance between query and key, in positions",
    ),
    Question(
        "mirror images",
        ("learned",),
        "Some heads of the learned encoding attend patterns that are symmetric from left to right.",
        "mean cosine of each head's mirror image with the head most like it, left-right minus up-down",
        f"above the {100 * LEVEL:g} % quantile of exchanging the two mirrors by chance",
        mirrored("learned"),
        by_layer="mean cosine with the left-right partner",
    ),
    Question(
        "content",
        ("learned-content",),
        "Positions rule in early layers, content in later ones.",
        "rank correlation of a head's layer with its share of content",
        _CHANCE,
        content("learned-content"),
        by_layer="share of content, mean over heads",
        layer_unit="share",
    ),
    Question(
        "ellipses",
        (SOURCE,),
        "Heads that may be ellipses become so, most of all in later layers.",
        "rank correlation of a head's layer with the condition number of its covariance",
        f"{_CHANCE}; and the median condition number above the start's",
        elongation(SOURCE),
        by_layer="median condition number",
    ),
    Question(
        "no gain from ellipses",
        (SOURCE, "quadratic"),
        "Ellipses bring no accuracy.",
        "test accuracy of the generalised model minus the quadratic one's",
        _SEEDS,
        gain(SOURCE, "quadratic"),
        unit="points",
        rule="no gain",
    ),
    Question(
        "dip after pruning",
        (PRUNED, SOURCE),
        "Taking degenerate heads out costs a little accuracy at first.",
        "test accuracy right after pruning minus that before",
        "below 0",
        dip(PRUNED, SOURCE),
        unit="points",
        by_layer="heads taken out",
    ),
    Question(
        "recovery after pruning",
        (PRUNED, SOURCE),
        "Training on with a smaller rate brings the accuracy back.",
        "test accuracy after training on minus that before pruning",
        f"at most {100 * RECOVERED:g} points below",
        recovery(PRUNED, SOURCE),
        unit="points",
    ),
    Question(
        "no gain from attention dropout",
        (DROPPED, "quadratic"),
        "Said nowhere: the paper's code drops attention probabilities with rate 0.1, the presets here do not.",
        "test accuracy with rate 0.1 minus that with 0",
        _SEEDS,
        gain(DROPPED, "quadratic"),
        unit="points",
        rule="no gain",
    ),
)
