"""Observations of the paper: the claim, its measurement for each seed, and whether it holds.

The criteria were fixed before the results were known, except for the fixed shifts of one run of `quadratic-small`.
Chance levels are 95 % quantiles (`inspect.null_models.LEVEL`) over random changes of the run's heads.

    votes      a claim holds if every seed meets its criterion, and is not seen if no seed does
    no gain    with d the mean difference over seeds and e half the width of its 95 % confidence interval (Student's
               t): the claim holds if d + e < `MARGIN`, and does not hold if d - e > 0

All other cases are undecided: seeds that disagree, missing runs, or a single seed for a difference between models.
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
from attnconv.training.fitting import starting_model

Verdict: TypeAlias = Literal["holds", "not seen", "does not hold", "undecided"]

MARGIN = 0.005  # smallest difference in accuracy (0 to 1) that counts as a gain
RECOVERED = 0.005  # largest loss of accuracy (0 to 1) with which a pruned model counts as recovered


@final
@dataclass(frozen=True)
class Found:
    """Measured value of a claim for one seed."""

    value: float
    beside: Mapping[str, float]  # reference values by name
    meets: bool | None = None  # whether it meets the claim's criterion; None if one seed cannot decide
    layers: tuple[float, ...] = ()  # values by layer, described by `Claim.by_layer`


@final
@dataclass(frozen=True)
class Claim:
    """One observation of the paper, and how it is tested."""

    key: str
    models: tuple[str, ...]  # models whose runs are needed
    paper: str  # the paper's statement, paraphrased
    measured: str  # what is measured
    criterion: str  # for one seed, or for all seeds together if `no_gain`
    measure: Callable[..., Found]  # called with one run per model, all with the same seed
    unit: Unit = "number"  # a share is a fraction of 1 and printed in percent; points are differences of shares
    by_layer: str = ""  # description of `Found.layers`; empty if there are none
    layer_unit: Unit = "number"
    no_gain: bool = False  # whether the claim is that a difference in accuracy is not a gain


def fixed_shifts(run: RunData, *, layers: tuple[int, ...]) -> Found:
    """Compute the share of heads at a fixed shift; the criterion requires such a head in each of the given layers."""
    now, before = ([at_fixed_shift(layer).double() for layer in found] for found in (run.end, run.start))
    value, start = (float(torch.cat(heads).mean()) for heads in (now, before))
    by_layer = tuple(float(heads.mean()) for heads in now)
    meets = value > start and all(share > 0 for layer, share in enumerate(by_layer) if layer in layers)
    return Found(value, {"at the start": start}, meets if len(by_layer) > max(layers) else None, by_layer)


def trend(run: RunData, *, of: Callable[[LayerStatistics], Tensor]) -> Found:
    """Compute the rank correlation between a statistic of heads and their layers."""
    heads = [of(layer) for layer in run.end]
    found = layer_trend([layer.tolist() for layer in heads])
    by_layer = tuple(float(layer.nanmean()) for layer in heads)
    return Found(found.rho, {"chance": found.chance}, found.rho > found.chance, by_layer)


def against_turned_heads(run: RunData, *, of: Callable[[Any], Any], lower: bool) -> Found:
    """Compare a statistic's mean over layers with its initial value and with that of randomly turned heads."""
    by_layer = tuple(float(of(layer)) for layer in run.end)
    value, start = statistics.fmean(by_layer), statistics.fmean(of(layer) for layer in run.start)
    draws = torch.stack([of(layer) for layer in run.turned]).mean(0)
    chance = float(torch.quantile(draws, 1 - LEVEL if lower else LEVEL))
    meets = value < min(start, chance) if lower else value > max(start, chance)
    return Found(value, {"at the start": start, "chance": chance}, meets, by_layer)


def mirror(run: RunData) -> Found:
    """Compute how much more left-right than up-down symmetry the heads have."""
    profiles = [layer.profile for layer in run.end]
    found, before = mirror_symmetry(profiles), mirror_symmetry([layer.profile for layer in run.start])
    value = found.left_right - found.up_down
    beside = {"left-right": found.left_right, "up-down": found.up_down}
    beside |= {"at the start": before.left_right - before.up_down, "chance": found.chance}
    by_layer = tuple(float(mirror_partners(profile, 1)[0].mean()) for profile in profiles)
    return Found(value, beside, value > found.chance, by_layer)


def elongation(run: RunData) -> Found:
    """Compute the rank correlation between the condition numbers of heads' covariances and their layers."""
    models = run.trained().model, starting_model(run.folder)
    now, before = ([condition_numbers(layer) for layer in attention_layers(model).values()] for model in models)
    found = layer_trend([layer.tolist() for layer in now])
    median, start = (statistics.median(torch.cat(layers).tolist()) for layers in (now, before))
    beside = {"chance": found.chance, "median condition number": median, "at the start": start}
    by_layer = tuple(statistics.median(layer.tolist()) for layer in now)
    return Found(found.rho, beside, found.rho > found.chance and median > start, by_layer)


def gain(run: RunData, over: RunData) -> Found:
    """Compute the difference in test accuracy between two models, at the epochs chosen on validation images."""
    value, other = _score(run, "chosen"), _score(over, "chosen")
    return Found(value - other, {run.name: value, over.name: other})


def dip(pruned: RunData, source: RunData) -> Found:
    """Compute the change in test accuracy directly after pruning, and the number of removed heads by layer."""
    before, after = _score(source, "last"), _score(pruned, "start")
    heads = zip(source.model.heads_per_layer, pruned.model.heads_per_layer, strict=True)
    removed = tuple(float(every - kept) for every, kept in heads)
    return Found(after - before, {"before": before, "pruned": after}, after < before, removed)


def recovery(pruned: RunData, source: RunData) -> Found:
    """Compute the test accuracy of the pruned model after further training minus that of the unpruned model."""
    before, later = _score(source, "last"), _score(pruned, "last")
    return Found(later - before, {"before": before, "fine-tuned": later}, later - before >= -RECOVERED)


def _score(run: RunData, state: str) -> float:
    score = run.score(state)
    if score is None:
        fix = "Run `attnconv reproduce` again; it adds missing results."
        raise ValueError(bad("run", f"must contain the test accuracy of its {state} weights", run.folder.path, fix))
    return score


def _fixed_shifts(name: str, layers: tuple[int, int], paper: str) -> Claim:
    """Return the claim of Figures 4 to 7 for one model."""
    each = "each has a head at a fixed shift, and the model has more of them than at initialisation"
    return Claim(
        f"fixed shifts: {name.replace('-', ' + ')}",
        (name,),
        paper,
        f"share of heads with {LEAST_MASS:.0%} of attention at one shift and constancy {LEAST_CONSTANCY:g}, or more",
        f"layers {layers[0]} and {layers[1]} (from 0): {each}",
        partial(fixed_shifts, layers=layers),
        unit="share",
        by_layer="share of the heads at a fixed shift",
        layer_unit="share",
    )


def _no_gain(key: str, name: str, paper: str, measured: str) -> Claim:
    """Return the claim that a model is not more accurate than `quadratic`."""
    criterion = f"{100 * LEVEL:g} % confidence interval over several seeds is below {100 * MARGIN:g} percentage points"
    return Claim(key, (name, "quadratic"), paper, measured, criterion, gain, unit="points", no_gain=True)


_CHANCE = f"rank correlation above its {100 * LEVEL:g} % quantile for heads shuffled over layers"
_SPREAD = (  # Figures 4 and 14
    Claim(
        "centres: 9 heads",
        ("quadratic",),
        "Early layers attend near the query; centres of attention are farther away in later layers.",
        "rank correlation of a head's layer with the distance of its mean centre of attention from the query",
        _CHANCE,
        partial(trend, of=lambda layer: layer.centre.norm(dim=1)),
        by_layer="distance of the mean centre of attention from the query, mean over heads, in positions",
    ),
    Claim(
        "overlap: 9 heads",
        ("quadratic",),
        "The heads of a layer do not overlap.",
        "mean cosine between the shift profiles of two heads of a layer",
        f"below its initial value, and below the {100 * (1 - LEVEL):g} % quantile for randomly reflected heads",
        partial(against_turned_heads, of=attrgetter("redundancy"), lower=True),
        by_layer="mean cosine between two heads",
    ),
    Claim(
        "coverage: 9 heads",
        ("quadratic",),
        "Heads spread out to cover the image.",
        "mean attention of distinct heads to the taps of a centred 3 x 3 kernel (coverage)",
        f"above its initial value, and above the {100 * LEVEL:g} % quantile for randomly reflected heads",
        partial(against_turned_heads, of=attrgetter("coverage"), lower=False),
        unit="share",
        by_layer="coverage",
        layer_unit="share",
    ),
)
CLAIMS: tuple[Claim, ...] = (
    _fixed_shifts("quadratic", (0, 1), "Heads of the first two layers concentrate on positions near the query."),
    _fixed_shifts(
        "learned",
        (0, 1),
        "Without content, some heads of the first two layers learn to attend to a single position at a fixed shift.",
    ),
    _fixed_shifts(
        CONTENT,
        (1, 2),
        "With content as well, some heads of the second and third layers keep a fixed shift as the query moves.",
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
        "rank correlation of a head's layer with the head's mean distance between query and key",
        _CHANCE,
        partial(trend, of=attrgetter("distance")),
        by_layer="mean distance between query and key, in positions",
    ),
    Claim(
        "mirror images",
        ("learned",),
        "Some heads of the learned encoding attend to patterns with left-right symmetry.",
        "mean cosine between each head's mirror image and the most similar head, left-right minus up-down",
        f"above the {100 * LEVEL:g} % quantile with left-right and up-down exchanged at random",
        mirror,
        by_layer="mean cosine between left-right mirror image and most similar head",
    ),
    Claim(
        "content",
        (CONTENT,),
        "Positions dominate in early layers, content in later ones.",
        "rank correlation of a head's layer with its content share",
        _CHANCE,
        partial(trend, of=attrgetter("content_share")),
        by_layer="content share, mean over heads",
        layer_unit="share",
    ),
    Claim(
        "ellipses",
        (SOURCE,),
        "Heads with full covariances become elongated, especially in later layers.",
        "rank correlation of a head's layer with the condition number of its covariance",
        f"{_CHANCE}, and median condition number above its initial value",
        elongation,
        by_layer="median condition number",
    ),
    _no_gain(
        "no gain from ellipses",
        SOURCE,
        "Full covariances do not improve the accuracy.",
        "test accuracy of the generalised model minus that of the quadratic model",
    ),
    Claim(
        "dip after pruning",
        (PRUNED, SOURCE),
        "Removing degenerate heads reduces the accuracy slightly at first.",
        "test accuracy directly after pruning minus that before",
        "below 0",
        dip,
        unit="points",
        by_layer="number of removed heads",
    ),
    Claim(
        "recovery after pruning",
        (PRUNED, SOURCE),
        "Further training at a smaller learning rate restores the accuracy.",
        "test accuracy after further training minus that before pruning",
        f"at least {-100 * RECOVERED:g} percentage points",
        recovery,
        unit="points",
    ),
    _no_gain(
        "no gain from attention dropout",
        DROPPED,
        "Not in the paper: its code uses attention dropout with rate 0.1, but the presets here do not.",
        "test accuracy with attention dropout minus that without",
    ),
)


@final
@dataclass(frozen=True)
class Observation:
    """A claim and its measurements."""

    claim: Claim
    found: Mapping[int, Found]  # by seed, in ascending order
    problems: tuple[str, ...] = ()  # reasons for missing measurements

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(found.value for found in self.found.values())

    @property
    def verdict(self) -> Verdict:
        if self.claim.no_gain:
            return no_gain(self.values)
        return vote([found.meets for found in self.found.values()])


def vote(meets: Sequence[bool | None]) -> Verdict:
    """Return the verdict from the votes of the seeds; None stands for a seed that cannot decide."""
    if not meets or None in meets or len(set(meets)) > 1:
        return "undecided"
    return "holds" if meets[0] else "not seen"


def no_gain(differences: Sequence[float]) -> Verdict:
    """Return the verdict on the claim that differences in accuracy, one per seed, are not a gain."""
    count = len(differences)
    if count < 2:
        return "undecided"
    quantile = float(student.ppf((1 + LEVEL) / 2, count - 1))
    mean, error = statistics.fmean(differences), quantile * statistics.stdev(differences) / math.sqrt(count)
    if mean + error < MARGIN:
        return "holds"
    return "does not hold" if mean - error > 0 else "undecided"


def observe(runs: Runs, claims: Sequence[Claim] = CLAIMS) -> list[Observation]:
    """Measure the claims on all complete runs."""
    complete = {
        name: {run.settings.train.seed: run for run in several if run.result and run.folder.last_weights.is_file()}
        for name, several in runs.items()
    }
    observations = []
    for claim in claims:
        seeds = [set(complete.get(name, ())) for name in claim.models]
        absent = [name for name in claim.models if not complete.get(name)]
        found, problems = dict[int, Found](), [f"no complete run of {', '.join(absent)}"] if absent else []
        for seed in sorted(set.intersection(*seeds)):
            try:
                found[seed] = claim.measure(*(complete[name][seed] for name in claim.models))
            except (OSError, ValueError) as error:
                problems.append(f"seed {seed}: {error}")
        if not found and not problems:
            problems = [f"no seed with complete runs of {', '.join(claim.models)}"]
        observations.append(Observation(claim, found, tuple(problems)))
    return observations


def table_of_observations(observations: Sequence[Observation]) -> PaperTable:
    """Return the table of observations, with one row per claim."""
    columns = ("observation", "the paper says", "measured", "here", "for comparison", "runs", "criterion", "verdict")
    rows = []
    for one in observations:
        claim, seeds = one.claim, ", ".join(map(str, one.found))
        known = f"{'seed' if len(one.found) == 1 else 'seeds'} {seeds}" if seeds else "none"
        runs, here, beside = f"{', '.join(claim.models)}; {known}", formatted(one.values, claim.unit), _beside(one)
        rows.append((claim.key, claim.paper, claim.measured, here, beside, runs, claim.criterion, one.verdict))
    table = Table("The paper's observations: mean ± sample standard deviation over seeds", columns, tuple(rows))
    return PaperTable(table, _values(observations))


def _beside(one: Observation) -> str:
    """Format the reference values; those of differences in accuracy are accuracies."""
    unit: Unit = "share" if one.claim.unit == "points" else one.claim.unit
    names = dict.fromkeys(name for found in one.found.values() for name in found.beside)
    parts = (f"{name} {formatted([found.beside[name] for found in one.found.values()], unit)}" for name in names)
    return "; ".join(parts) or "-"


def table_of_layers(observations: Sequence[Observation]) -> PaperTable:
    """Return the table of observations by layer."""
    rows = []
    for one in observations:
        if one.claim.by_layer and one.found:
            layers = zip(*(found.layers for found in one.found.values()), strict=True)
            cells = (formatted(layer, one.claim.layer_unit) for layer in layers)
            rows.append([one.claim.key, one.claim.by_layer, *cells])
    width = max(map(len, rows), default=2)
    columns = ("observation", "shown", *(f"layer {number}" for number in range(width - 2)))
    title = "The observations by layer (numbered from 0): mean ± sample standard deviation over seeds"
    table = Table(title, columns, tuple((*row, *["-"] * (width - len(row))) for row in rows))
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
