"""The claims, measured in runs and judged seed by seed.

    votes      a claim holds where every seed meets its criterion and is not seen where none does
    no gain    with d the mean difference over seeds and e half the width of its 95 % interval (Student's t):
               it holds where d + e is below `MARGIN`, else it does not hold where d - e is above 0

Nothing else can be said: seeds that disagree, missing runs, only one seed for a difference between models.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, final

from scipy.stats import t as student

from attnconv.inspect.null_models import LEVEL
from attnconv.models.preset_tables import Table
from attnconv.paper.claims import CLAIMS, MARGIN, Claim
from attnconv.paper.finished_run import Runs, StudyRun
from attnconv.paper.measures import Found
from attnconv.paper.tables import PaperTable, Unit, formatted

Verdict: TypeAlias = Literal["holds", "not seen", "does not hold", "cannot be said"]


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


def _observe(claim: Claim, runs: Mapping[str, Mapping[int, StudyRun]]) -> Observation:
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
            rows.append(
                [one.claim.key, one.claim.by_layer, *(formatted(layer, one.claim.layer_unit) for layer in layers)]
            )
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
