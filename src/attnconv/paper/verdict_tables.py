"""The answers to the paper's observations as tables and as plain values."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from attnconv.inspect.layer_trends import LEVEL
from attnconv.models.preset_tables import Table
from attnconv.paper.claim_measures import Found
from attnconv.paper.claims import MARGIN
from attnconv.paper.number_format import Unit, spoken
from attnconv.paper.verdicts import Observation


def table_of_observations(observations: Sequence[Observation]) -> Table:
    """One row for each observation: what the paper says, our number, what it is compared with, the verdict."""
    columns = ("observation", "the paper says", "measured", "here", "beside it", "runs", "holds where", "verdict")
    rows = tuple(
        (
            one.question.key,
            one.question.paper,
            one.question.measured,
            spoken(one.values, one.question.unit),
            _beside(one),
            _runs(one),
            one.question.criterion,
            one.verdict,
        )
        for one in observations
    )
    return Table("The paper's observations, in numbers: mean and deviation over seeds", columns, rows)


def table_of_layers(observations: Sequence[Observation]) -> Table:
    """The same by layer, as means over seeds with their deviation."""
    shown = [one for one in observations if one.question.by_layer and one.found]
    depth = max((len(found.layers) for one in shown for found in one.found.values()), default=0)
    rows = []
    for one in shown:
        layers = zip(*(found.layers for found in one.found.values()), strict=True)
        cells = [spoken(layer, one.question.layer_unit) for layer in layers]
        rows.append((one.question.key, one.question.by_layer, *cells, *["-"] * (depth - len(cells))))
    numbers = (f"layer {number}" for number in range(1, depth + 1))
    return Table("The observations by layer", ("observation", "shown", *numbers), tuple(rows))


def values_of_observations(observations: Sequence[Observation]) -> dict[str, Any]:
    """Everything as plain values for JSON; a number that is not finite becomes None."""
    rows = []
    for one in observations:
        question, values = one.question, one.values
        rows.append(
            {
                "observation": question.key,
                "paper": question.paper,
                "measured": question.measured,
                "criterion": question.criterion,
                "models": list(question.models),
                "by_layer": question.by_layer,
                "verdict": one.verdict,
                "mean": _finite(statistics.fmean(values)) if values else None,
                "deviation": _finite(statistics.stdev(values)) if len(values) > 1 else None,
                "seeds": {str(seed): _plain(found) for seed, found in one.found.items()},
                "problems": list(one.problems),
            }
        )
    return {"level": LEVEL, "margin": MARGIN, "rows": rows}


def _plain(found: Found) -> dict[str, Any]:
    return {
        "value": _finite(found.value),
        "beside": {name: _finite(value) for name, value in found.beside.items()},
        "meets": found.meets,
        "layers": [_finite(value) for value in found.layers],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _beside(one: Observation) -> str:
    """What the number is compared with; of a difference of accuracies these are accuracies themselves."""
    unit: Unit = "share" if one.question.unit == "points" else one.question.unit
    names = dict.fromkeys(name for found in one.found.values() for name in found.beside)
    parts = (f"{name} {spoken([found.beside[name] for found in one.found.values()], unit)}" for name in names)
    return "; ".join(parts) or "-"


def _runs(one: Observation) -> str:
    words = ", ".join(one.question.models)
    if one.found:
        return f"{words}; {'seed' if len(one.found) == 1 else 'seeds'} {', '.join(map(str, one.found))}"
    return f"{words}; none"
