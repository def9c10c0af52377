"""The paper's observations answered: each question of `QUESTIONS` seed by seed, and whether it holds.

    votes      it holds where every seed meets the criterion and is not seen where none does
    no gain    with d the mean difference over seeds and e half the width of its 95 % interval (Student's t):
               it holds where d + e is below `MARGIN`, else it does not hold where d - e is above 0

Everything else cannot be said: seeds that disagree, runs that are not there, one seed alone for a difference between
models. The paper trained each model once. Deviations are sample deviations over seeds.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from scipy.stats import t as student

from attnconv.inspect.layer_trends import LEVEL
from attnconv.paper.claim_measures import Found, MeasuredRun
from attnconv.paper.claims import MARGIN, QUESTIONS, Question

Verdict: TypeAlias = Literal["holds", "not seen", "does not hold", "cannot be said"]


@final
@dataclass(frozen=True)
class Observation:
    """A question answered.

    Attributes:
        question: The question.
        found: Seed -> its number, first seed first.
        problems: Why a number is missing, one sentence each.
    """

    question: Question
    found: Mapping[int, Found]
    problems: tuple[str, ...] = ()

    @property
    def values(self) -> tuple[float, ...]:
        """The numbers, one for each seed."""
        return tuple(found.value for found in self.found.values())

    @property
    def verdict(self) -> Verdict:
        """Whether the observation holds, by the module's rules."""
        if self.question.rule == "no gain":
            return no_gain(self.values)
        return vote([found.meets for found in self.found.values()])


def vote(meets: Sequence[bool | None]) -> Verdict:
    """What seeds say together; None is a seed that cannot say.

    Example:
        >>> vote([True, True]), vote([False]), vote([True, False]), vote([])
        ('holds', 'not seen', 'cannot be said', 'cannot be said')
    """
    if not meets or None in meets or len(set(meets)) > 1:
        return "cannot be said"
    return "holds" if meets[0] else "not seen"


def no_gain(differences: Sequence[float]) -> Verdict:
    """Whether differences of accuracy, one for each seed, show that there is no gain of `MARGIN`.

    Example:
        >>> no_gain([-0.001, 0.001, 0.0]), no_gain([0.02, 0.021, 0.019]), no_gain([0.02, -0.02]), no_gain([0.0])
        ('holds', 'does not hold', 'cannot be said', 'cannot be said')
    """
    count = len(differences)
    if count < 2:
        return "cannot be said"
    quantile = float(student.ppf((1 + LEVEL) / 2, count - 1))
    mean, error = statistics.fmean(differences), quantile * statistics.stdev(differences) / math.sqrt(count)
    if mean + error < MARGIN:
        return "holds"
    return "does not hold" if mean - error > 0 else "cannot be said"


def observe(runs: Mapping[str, Sequence[MeasuredRun]]) -> list[Observation]:
    """Answer every question from the runs that are complete.

    Args:
        runs: Model, as in `RUNS` and `EXTRA_RUNS` -> its runs, one for each seed.
    """
    seeds = {name: _by_seed(several) for name, several in runs.items()}
    return [_answer(question, seeds) for question in QUESTIONS]


def _by_seed(runs: Sequence[MeasuredRun]) -> dict[int, MeasuredRun]:
    complete = [one for one in runs if one.run.result() is not None and one.run.last_weights.is_file()]
    return {one.run.settings().train.seed: one for one in reversed(complete)}  # of equal seeds the first


def _answer(question: Question, seeds: Mapping[str, Mapping[int, MeasuredRun]]) -> Observation:
    found: dict[int, Found] = {}
    problems: list[str] = []
    if absent := [name for name in question.models if not seeds.get(name)]:
        return Observation(question, {}, (f"no complete run of {', '.join(absent)}",))
    common = set.intersection(*(set(seeds[name]) for name in question.models))
    for seed in sorted(common):
        try:
            found[seed] = question.measure({name: seeds[name][seed] for name in question.models})
        except (OSError, ValueError) as error:
            problems.append(f"seed {seed}: {error}")
    if not common:
        problems.append(f"no seed with complete runs of {', '.join(question.models)}")
    return Observation(question, found, tuple(problems))
