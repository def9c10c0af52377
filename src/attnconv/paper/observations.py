"""The observations of the paper: what it says, what is measured of it here, seed by seed, and whether it holds.

The criteria were written before any of these numbers was known, except for the fixed shifts of one run of
`quadratic-small`: they are not fitted to the results. Chance levels are one in twenty (`inspect.null_models.LEVEL`),
from shuffles of the run's own heads.

    votes      a claim holds where every seed meets its criterion and is not seen where none does
    no gain    with d the mean difference over seeds and e half the width of its 95 % interval (Student's t):
               it holds where d + e is below `MARGIN`, else it does not hold where d - e is above 0

Nothing else can be said: seeds that disagree, missing runs, only one seed for a difference between models.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal, TypeAlias, final

import torch
from scipy.stats import t as student
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.inspect.head_statistics import LayerStatistics
from attnconv.inspect.null_models import LEVEL, layer_trend, mirror_partners, mirror_symmetry
from attnconv.models.preset_tables import Table
from attnconv.paper.tables import LEAST_CONSTANCY, LEAST_MASS, PaperTable, Runs, Unit, at_fixed_shift, formatted
from attnconv.paper.training_plan import CONTENT, DROPPED, PRUNED, SOURCE
from attnconv.report.run_data import RunData
from attnconv.surgery.head_pruning import attention_layers, condition_numbers

Verdict: TypeAlias = Literal["holds", "not seen", "does not hold", "cannot be said"]

MARGIN = 0.005  # smallest gain of accuracy that counts
RECOVERED = 0.005  # largest loss of accuracy after which a pruned model has recovered


@final
@dataclass(frozen=True)
class Found:
    """One number of one seed."""

    value: float
    beside: Mapping[str, float]  # numbers to compare it with, by name
    meets: bool | None = None  # whether it meets the claim's criterion; None if one seed cannot say
    layers: tuple[float, ...] = ()  # the number by layer, or what `Claim.by_layer` says


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
    unit: Unit = "number"  # shares are parts of 1, printed in percent, and points their differences
    by_layer: str = ""  # what `Found.layers` is; empty for nothing
    layer_unit: Unit = "number"
    no_gain: bool = False  # whether the claim is that a difference of accuracies is no gain


def fixed_shifts(run: RunData, *, layers: tuple[int, ...]) -> Found:
    """Share of all heads at a fixed shift; each of these layers, counted from 1, must have one."""
    now, before = ([at_fixed_shift(layer).double() for layer in found] for found in (run.end, run.start))
    value, start = (float(torch.cat(heads).mean()) for heads in (now, before))
    by_layer = tuple(float(heads.mean()) for heads in now)
    meets = None
    if len(by_layer) >= max(layers):
        meets = all(by_layer[layer - 1] > 0 for layer in layers) and value > start
    return Found(value, {"at the start": start}, meets, by_layer)


def trend(run: RunData, *, of: Callable[[LayerStatistics], Tensor]) -> Found:
    """Rank correlation of a number of each head with the head's layer."""
    heads = [of(layer) for layer in run.end]
    found = layer_trend([layer.tolist() for layer in heads])
    by_layer = tuple(float(layer.nanmean()) for layer in heads)
    return Found(found.rho, {"chance": found.chance}, found.rho > found.chance, by_layer)


def against_turned_heads(run: RunData, *, of: Callable[[Any], Any], lower: bool) -> Found:
    """Mean of a number over layers, to be below or above both the start's and that of heads turned at random."""
    by_layer = tuple(float(of(layer)) for layer in run.end)
    value, start = statistics.fmean(by_layer), statistics.fmean(of(layer) for layer in run.start)
    draws = torch.stack([of(layer) for layer in run.turned]).mean(0)
    chance = float(torch.quantile(draws, 1 - LEVEL if lower else LEVEL))
    meets = value < min(start, chance) if lower else value > max(start, chance)
    return Found(value, {"at the start": start, "chance": chance}, meets, by_layer)


def mirror(run: RunData) -> Found:
    """How far heads have left-right partners beyond up-down ones."""
    profiles = [layer.profile for layer in run.end]
    found, before = mirror_symmetry(profiles), mirror_symmetry([layer.profile for layer in run.start])
    value = found.left_right - found.up_down
    beside = {"left-right": found.left_right, "up-down": found.up_down}
    beside |= {"at the start": before.left_right - before.up_down, "chance": found.chance}
    by_layer = tuple(float(mirror_partners(profile, 1)[0].mean()) for profile in profiles)
    return Found(value, beside, value > found.chance, by_layer)


def elongation(run: RunData) -> Found:
    """Rank correlation of the condition number of a head's Gaussian with the head's layer."""
    models = run.trained().model, run.initial()
    now, before = ([condition_numbers(layer) for layer in attention_layers(model).values()] for model in models)
    found = layer_trend([layer.tolist() for layer in now])
    median, start = (statistics.median(torch.cat(layers).tolist()) for layers in (now, before))
    beside = {"chance": found.chance, "median condition number": median, "at the start": start}
    by_layer = tuple(statistics.median(layer.tolist()) for layer in now)
    return Found(found.rho, beside, found.rho > found.chance and median > start, by_layer)


def gain(run: RunData, over: RunData) -> Found:
    """Difference of the test accuracies of two models, of the epochs chosen on held-out images."""
    value, other = _score(run, "chosen"), _score(over, "chosen")
    return Found(value - other, {run.name: value, over.name: other})


def dip(pruned: RunData, source: RunData) -> Found:
    """Test accuracy right after pruning, minus that before; by layer the number of removed heads."""
    before, after = _score(source, "last"), _score(pruned, "start")
    heads = zip(source.model.heads_per_layer, pruned.model.heads_per_layer, strict=True)
    removed = tuple(float(every - kept) for every, kept in heads)
    return Found(after - before, {"before": before, "pruned": after}, after < before, removed)


def recovery(pruned: RunData, source: RunData) -> Found:
    """Test accuracy of the pruned model after further training, minus that of the unpruned one."""
    before, later = _score(source, "last"), _score(pruned, "last")
    return Found(later - before, {"before": before, "trained on": later}, later - before >= -RECOVERED)


def _score(run: RunData, state: str) -> float:
    score = run.score(state)
    if score is None:
        fix = "Call attnconv reproduce again: it measures what is missing."
        raise ValueError(bad("run", f"must have the test accuracy of its {state} weights", run.folder.path, fix))
    return score


def _fixed_shifts(name: str, layers: tuple[int, int], paper: str) -> Claim:
    """Figures 4 to 7."""
    each = "each has a head at a fixed shift, and the model more than at its start"
    return Claim(
        f"fixed shifts: {name.replace('-', ' + ')}",
        (name,),
        paper,
        f"share of all heads with at least {100 * LEAST_MASS:g} % on one shift and a constancy of {LEAST_CONSTANCY:g}",
        f"layers {layers[0]} and {layers[1]}: {each}",
        partial(fixed_shifts, layers=layers),
        unit="share",
        by_layer="share of the heads at a fixed shift",
        layer_unit="share",
    )


def _no_gain(key: str, name: str, paper: str, measured: str) -> Claim:
    """A model that is no better than `quadratic`."""
    criterion = f"{100 * LEVEL:g} % interval over seeds (at least two) stays below a gain of {100 * MARGIN:g} points"
    return Claim(key, (name, "quadratic"), paper, measured, criterion, gain, unit="points", no_gain=True)


_CHANCE = f"rank correlation with the layer above the {100 * LEVEL:g} % quantile of heads shuffled over layers"
_SPREAD = (  # Figures 4 and 14
    Claim(
        "centres: 9 heads",
        ("quadratic",),
        "Early layers attend near the query; later layers put centres of attention farther away.",
        "rank correlation of a head's layer with the distance of its mean centre of attention",
        _CHANCE,
        partial(trend, of=lambda layer: layer.centre.norm(dim=1)),
        by_layer="distance of the mean centre of attention from the query, mean over heads, in positions",
    ),
    Claim(
        "overlap: 9 heads",
        ("quadratic",),
        "Heads of a layer do not overlap.",
        "mean cosine between the mean maps of two heads of a layer",
        f"below the start, and below the {100 * (1 - LEVEL):g} % quantile of heads turned at random",
        partial(against_turned_heads, of=attrgetter("redundancy"), lower=True),
        by_layer="mean cosine between two heads",
    ),
    Claim(
        "coverage: 9 heads",
        ("quadratic",),
        "Heads spread so as to cover the image.",
        "mean attention that distinct heads put on the taps of a 3 x 3 kernel (the audit's coverage)",
        f"above the start, and above the {100 * LEVEL:g} % quantile of heads turned at random",
        partial(against_turned_heads, of=attrgetter("coverage"), lower=False),
        unit="share",
        by_layer="coverage",
        layer_unit="share",
    ),
)
CLAIMS: tuple[Claim, ...] = (
    _fixed_shifts("quadratic", (1, 2), "Heads of the first two layers narrow down to places near the query."),
    _fixed_shifts(
        "learned",
        (1, 2),
        "Without content, some heads of the first two layers learn to attend one pixel at a fixed shift.",
    ),
    _fixed_shifts(
        CONTENT, (2, 3), "With content too, some heads of layers 2 and 3 keep a fixed shift as the query moves."
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
        partial(trend, of=attrgetter("distance")),
        by_layer="mean distance between query and key, in positions",
    ),
    Claim(
        "mirror images",
        ("learned",),
        "Some heads of the learned encoding attend patterns that are symmetric from left to right.",
        "mean cosine of each head's mirror image with the head most like it, left-right minus up-down",
        f"above the {100 * LEVEL:g} % quantile of exchanging the two mirrors by chance",
        mirror,
        by_layer="mean cosine with the left-right partner",
    ),
    Claim(
        "content",
        (CONTENT,),
        "Positions rule in early layers, content in later ones.",
        "rank correlation of a head's layer with its share of content",
        _CHANCE,
        partial(trend, of=attrgetter("content_share")),
        by_layer="share of content, mean over heads",
        layer_unit="share",
    ),
    Claim(
        "ellipses",
        (SOURCE,),
        "Heads that may be ellipses become so, most of all in later layers.",
        "rank correlation of a head's layer with the condition number of its covariance",
        f"{_CHANCE}; and the median condition number above the start's",
        elongation,
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
        dip,
        unit="points",
        by_layer="heads taken out",
    ),
    Claim(
        "recovery after pruning",
        (PRUNED, SOURCE),
        "Training on with a smaller rate brings the accuracy back.",
        "test accuracy after training on minus that before pruning",
        f"at most {100 * RECOVERED:g} points below",
        recovery,
        unit="points",
    ),
    _no_gain(
        "no gain from attention dropout",
        DROPPED,
        "Said nowhere: the paper's code drops attention probabilities with rate 0.1, the presets here do not.",
        "test accuracy with rate 0.1 minus that with 0",
    ),
)


@final
@dataclass(frozen=True)
class Observation:
    """A claim, measured."""

    claim: Claim
    found: Mapping[int, Found]  # by seed, in increasing order
    problems: tuple[str, ...] = ()  # why numbers are missing

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(found.value for found in self.found.values())

    @property
    def verdict(self) -> Verdict:
        if self.claim.no_gain:
            return no_gain(self.values)
        return vote([found.meets for found in self.found.values()])


def vote(meets: Sequence[bool | None]) -> Verdict:
    """Judge by votes of the seeds; None is a seed that cannot say."""
    if not meets or None in meets or len(set(meets)) > 1:
        return "cannot be said"
    return "holds" if meets[0] else "not seen"


def no_gain(differences: Sequence[float]) -> Verdict:
    """Judge whether differences of accuracy, one for each seed, are no gain."""
    count = len(differences)
    if count < 2:
        return "cannot be said"
    quantile = float(student.ppf((1 + LEVEL) / 2, count - 1))
    mean, error = statistics.fmean(differences), quantile * statistics.stdev(differences) / math.sqrt(count)
    if mean + error < MARGIN:
        return "holds"
    return "does not hold" if mean - error > 0 else "cannot be said"


def observe(runs: Runs, claims: Sequence[Claim] = CLAIMS) -> list[Observation]:
    """Measure claims in the runs that are complete."""
    complete = {
        name: {run.settings.train.seed: run for run in several if run.result and run.folder.last_weights.is_file()}
        for name, several in runs.items()
    }
    return [_observe(claim, complete) for claim in claims]


def _observe(claim: Claim, runs: Mapping[str, Mapping[int, RunData]]) -> Observation:
    if absent := [name for name in claim.models if not runs.get(name)]:
        return Observation(claim, {}, (f"no complete run of {', '.join(absent)}",))
    common = set.intersection(*(set(runs[name]) for name in claim.models))
    if not common:
        return Observation(claim, {}, (f"no seed with complete runs of {', '.join(claim.models)}",))
    found: dict[int, Found] = {}
    problems = []
    for seed in sorted(common):
        try:
            found[seed] = claim.measure(*(runs[name][seed] for name in claim.models))
        except (OSError, ValueError) as error:
            problems.append(f"seed {seed}: {error}")
    return Observation(claim, found, tuple(problems))


def table_of_observations(observations: Sequence[Observation]) -> PaperTable:
    """One row for each claim."""
    columns = ("observation", "the paper says", "measured", "here", "beside it", "runs", "holds where", "verdict")
    rows = []
    for one in observations:
        claim, seeds = one.claim, ", ".join(map(str, one.found))
        known = f"{'seed' if len(one.found) == 1 else 'seeds'} {seeds}" if seeds else "none"
        runs, here, beside = f"{', '.join(claim.models)}; {known}", formatted(one.values, claim.unit), _beside(one)
        rows.append((claim.key, claim.paper, claim.measured, here, beside, runs, claim.criterion, one.verdict))
    table = Table("The paper's observations, in numbers: mean and deviation over seeds", columns, tuple(rows))
    return PaperTable(table, _values(observations))


def _beside(one: Observation) -> str:
    """What the number is compared with; a difference of accuracies is compared with accuracies."""
    unit: Unit = "share" if one.claim.unit == "points" else one.claim.unit
    names = dict.fromkeys(name for found in one.found.values() for name in found.beside)
    parts = (f"{name} {formatted([found.beside[name] for found in one.found.values()], unit)}" for name in names)
    return "; ".join(parts) or "-"


def table_of_layers(observations: Sequence[Observation]) -> PaperTable:
    """The observations by layer."""
    rows = []
    for one in observations:
        if one.claim.by_layer and one.found:
            layers = zip(*(found.layers for found in one.found.values()), strict=True)
            cells = (formatted(layer, one.claim.layer_unit) for layer in layers)
            rows.append([one.claim.key, one.claim.by_layer, *cells])
    width = max(map(len, rows), default=2)
    columns = ("observation", "shown", *(f"layer {number}" for number in range(1, width - 1)))
    table = Table("The observations by layer", columns, tuple((*row, *["-"] * (width - len(row))) for row in rows))
    return PaperTable(table, _values(observations))


def _values(observations: Sequence[Observation]) -> dict[str, Any]:
    rows = [
        {
            "observation": one.claim.key,
            **{name: getattr(one.claim, name) for name in ("paper", "measured", "criterion", "models", "by_layer")},
            "verdict": one.verdict,
            "mean": statistics.fmean(one.values) if one.values else None,
            "deviation": statistics.stdev(one.values) if len(one.values) > 1 else None,
            "seeds": {str(seed): asdict(found) for seed, found in one.found.items()},
            "problems": one.problems,
        }
        for one in observations
    ]
    return {"level": LEVEL, "margin": MARGIN, "rows": rows}
