"""Tables 1 to 4 of the paper, with the paper's numbers and those of runs.

Test accuracies are those of the epoch chosen on validation images, or of the last epoch without such images; the paper
chose epochs on the test set. The paper's FLOP count omits the products of attention probabilities and values.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, TypeAlias, final

from jaxtyping import Bool
from torch import Tensor

from attnconv.inspect.head_statistics import LayerStatistics
from attnconv.models.operation_counts import flops_all, flops_paper, parameters
from attnconv.models.preset_tables import Table
from attnconv.models.presets import PRESETS
from attnconv.models.settings import AttentionSettings, ModelSettings
from attnconv.paper.training_plan import PAPER_MODELS
from attnconv.report.run_data import RunData
from attnconv.training.recipes import recipe

Runs: TypeAlias = Mapping[str, Sequence[RunData]]  # by model name, one run per seed
Unit: TypeAlias = Literal["share", "points", "number", "minutes", "fraction"]
MAGNITUDES = 1000.0  # ratio of maximum to minimum above which a range is shown instead of a mean
LEAST_MASS, LEAST_CONSTANCY = 0.5, 0.9  # minimum `shift_mass` and `constancy` of a head at a fixed shift
_COUNTS = {"parameters": parameters, "flops_paper_way": flops_paper, "flops_everything": flops_all}

# Appendix E of the paper: 2, 4, 1, 2, 6 and 0 of the nine heads of each layer are pruned in the generalised model.
PRUNED = AttentionSettings(encoding="quadratic-generalized", heads=(7, 5, 8, 7, 3, 9))
# Table 2 of the paper: hyperparameter, printed value, and the corresponding setting in this library.
PAPER_TABLE_2: Sequence[tuple[str, str, str]] = (
    ("number of layers", "6", "model.layers"),
    ("number of heads", "9", "model.heads_per_layer"),
    ("hidden dimension", "400", "model.width"),
    ("intermediate dimension", "512", "model.mlp_width"),
    ("invertible pooling width (pixels)", "2", "model.downsampling"),
    ("dropout probability", "0.1", "model.dropout"),
    ("layer normalization epsilon", "1e-12", "model.norm_epsilon"),
    ("number of epochs", "300", "train.epochs"),
    ("batch size", "100", "train.batch_size"),
    ("learning rate", "0.1", "optim.learning_rate"),
    ("weight decay", "0.0001", "optim.weight_decay"),
    ("momentum", "0.9", "optim.momentum"),
    ("cosine decay", "yes", "schedule.name"),
    ("linear warm up ratio", "0.05", "schedule.warmup"),
)

# Table 3 of the paper: model, kind of positional encoding, whether it is relative, and this library's equivalents.
ENCODINGS_OF: Sequence[tuple[str, str, bool, tuple[str, ...]]] = (
    ("Vaswani et al. (2017)", "sinusoids", False, ("absolute-sinusoidal",)),
    ("Radford et al. (2018)", "learned", False, ("absolute-learned",)),
    ("Devlin et al. (2018)", "learned", False, ("absolute-learned",)),
    ("Dai et al. (2019)", "sinusoids", True, ("sinusoidal",)),
    ("Yang et al. (2019)", "sinusoids", True, ("sinusoidal",)),
    ("Bello et al. (2019)", "learned", True, ("learned-content",)),
    ("Ramachandran et al. (2019)", "learned", True, ("learned-content",)),
    ("the paper", "learned, quadratic", True, ("learned", "learned-content", "quadratic", "quadratic-generalized")),
)


@final
@dataclass(frozen=True)
class PaperTable:
    """A formatted table, and its values for a JSON file."""

    table: Table
    values: Mapping[str, Any]


def formatted(values: Sequence[float], unit: Unit) -> str:
    """Format mean and sample standard deviation, or the range if magnitudes differ; a dash if there are no values."""
    if not values:
        return "-"
    least, largest = min(values), max(values)
    if unit == "number" and 0 < least * MAGNITUDES < largest:
        return f"{_in_unit(least, unit)} to {_in_unit(largest, unit)}"
    scale, ending = {"share": (100, " %"), "points": (100, " points")}.get(unit, (1, ""))
    mean = scale * statistics.fmean(values)
    sign = "+" if unit == "points" and mean > 0 else ""
    spread = ""
    if len(values) > 1 and all(map(math.isfinite, values)):
        spread = f" ± {_in_unit(scale * statistics.stdev(values), unit)}"
    return f"{sign}{_in_unit(mean, unit)}{spread}{ending}"


def _in_unit(value: float, unit: Unit) -> str:
    if not math.isfinite(value):
        return "infinite" if math.isinf(value) else "unknown"
    if unit == "number":
        return f"{value:.3g}" if abs(value) >= 10 else f"{value:.2f}"
    digits = {"points": 2, "fraction": 3}.get(unit, 1)
    return f"{value:.{digits}f}"


def accuracies(runs: Sequence[RunData]) -> list[float]:
    """Return the test accuracy (0 to 1) of each complete run with test images."""
    return [score for run in runs if (score := run.score("chosen")) is not None]


def table_of_accuracy(runs: Runs, number: int) -> PaperTable:
    """Return Table 1 or 4: accuracy, parameters and FLOPs of each model, in the paper and in the runs."""
    names = [name for name, model in PAPER_MODELS.items() if number == 4 or model.table_1]
    entries, rows = zip(*(_accuracy(name, runs.get(name, ())) for name in names), strict=True)
    data = list(dict.fromkeys(run.settings.data.name for name in names for run in runs.get(name, ())))
    on = ", ".join(data) or "cifar10"
    shown = {1: f"Test accuracy on {on} and model sizes", 4: f"Number of parameters and accuracy on {on} per model"}
    title = f"Table {number}: {shown[number]}. SA: self-attention; ±: sample standard deviation over runs"
    columns = (
        "Models",
        "accuracy (0 to 1), paper",
        "accuracy (0 to 1), here",
        "preset and runs, here",
        "parameters, paper",
        "parameters, here",
        "FLOPs per image, paper",
        "FLOPs per image, here (as in the paper)",
        "FLOPs per image, here (total)",
    )
    return PaperTable(Table(title, columns, rows), {"data": data, "rows": entries})


def _accuracy(name: str, runs: Sequence[RunData]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return one model's entry in Tables 1 and 4, as values and as cells."""
    model, here = PAPER_MODELS[name], None
    ours, made, size, *flops = ["-"] * 5
    if runs:
        found, settings, counts = accuracies(runs), runs[0].settings, _counts(runs[0].settings.model)
        here = {
            "preset": settings.preset,
            "epochs": settings.train.epochs,
            "seeds": [run.settings.train.seed for run in runs if run.score("chosen") is not None],
            "accuracies": found,
            "accuracy": statistics.fmean(found) if found else None,
            "deviation": statistics.stdev(found) if len(found) > 1 else None,
            **counts,
        }
        ours = formatted(found, "fraction")
        made = f"{settings.preset}, {len(found)} {'run' if len(found) == 1 else 'runs'}{'' if found else ' complete'}"
        size, *flops = (f"{count:,}" for count in counts.values())
    printed = formatted([model.accuracy] if model.accuracy else [], "fraction")
    paper = {"accuracy": model.accuracy, "parameters": model.parameters, "flops": model.flops}
    values = {"model": model.title, "name": name, "paper": paper, "here": here}
    return values, (model.title, printed, ours, made, model.parameters, size, model.flops, *flops)


def _counts(model: ModelSettings) -> dict[str, int]:
    return {name: count(model) for name, count in _COUNTS.items()}


def table_of_trainings(runs: Runs) -> PaperTable:
    """Return test accuracies of the last and the chosen epoch, training times and devices of all complete runs."""
    entries, rows = [], []
    for name, model in PAPER_MODELS.items():
        done = [run for run in runs.get(name, ()) if run.result]
        if not done:
            continue
        last, chosen = ([run.score(state) for run in done] for state in ("last", "best"))
        minutes: dict[str, list[float]] = {}
        for run in done:
            minutes.setdefault(_device(run.folder.record()), []).append(run.result["seconds"] / 60)
        entry: dict[str, Any] = {
            "model": model.title,
            "name": name,
            "seeds": [run.settings.train.seed for run in done],
            "epochs": done[0].settings.train.epochs,
            "last": [value for value in last if value is not None],
            "chosen": [value for value in chosen if value is not None],
            "minutes": minutes,
        }
        accuracy = (formatted(entry[epoch], "share") for epoch in ("last", "chosen"))
        times = "; ".join(formatted(found, "minutes") for found in minutes.values())
        entries.append(entry)
        rows.append((model.title, str(len(done)), *accuracy, str(entry["epochs"]), times, "; ".join(minutes)))
    accuracies = ("last epoch", "epoch chosen by validation")
    columns = ("Models", "runs", *accuracies, "epochs", "minutes per run, by device", "device")
    title = "Test accuracy of the last and the chosen epoch, and training time; ±: sample standard deviation over runs"
    return PaperTable(Table(title, columns, tuple(rows)), {"rows": entries})


def _device(record: Mapping[str, Any]) -> str:
    """Format the device, the number of CPU threads if known, and the precision."""
    device = str(record.get("device", "unknown"))
    threads = f", threads: {record['threads']}" if device.startswith("cpu") and "threads" in record else ""
    return f"{device}{threads}, {record.get('used_precision', record['settings']['train']['precision'])}"


def table_of_hyper_parameters(run: RunData | None = None) -> PaperTable:
    """Return Table 2: hyperparameters in the paper, in the preset `quadratic`, and in a run."""
    columns = {"paper": {name: printed for name, printed, _ in PAPER_TABLE_2}}
    shown = {"preset quadratic": recipe("quadratic"), **({} if run is None else {"the run here": run.settings})}
    for column, settings in shown.items():
        columns[column] = {name: _setting(attrgetter(path)(settings)) for name, _, path in PAPER_TABLE_2}
    rows = tuple((name, *(values[name] for values in columns.values())) for name, *_ in PAPER_TABLE_2)
    title = "Table 2: Self-attention network parameters"
    return PaperTable(Table(title, ("Hyperparameters", *columns), rows), columns)


def _setting(value: Any) -> str:
    """Format a number, the heads of each layer or the name of a schedule as in Table 2."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value if len(set(value)) > 1 else value[:1]))
    if isinstance(value, str):
        return "yes" if value == "cosine" else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def table_of_encodings() -> PaperTable:
    """Return Table 3: positional encodings of other models, and the equivalent encodings in this library."""
    values = [dict(zip(("model", "kind", "relative", "here"), row, strict=True)) for row in ENCODINGS_OF]
    rows = tuple(
        (model, kind, "yes" if relative else "no", ", ".join(names)) for model, kind, relative, names in ENCODINGS_OF
    )
    title = "Table 3: Types of positional encoding used by transformers for text and images"
    columns = ("Model", "type of positional encoding", "relative", "equivalent encodings here")
    return PaperTable(Table(title, columns, rows), {"rows": values})


def table_of_counts() -> PaperTable:
    """Return exact numbers of parameters and FLOPs of the presets with the paper's sizes; no run is needed."""
    entries, rows = [], []
    for name, model in PAPER_MODELS.items():
        counts = _counts(PRESETS.get(name, PRUNED))
        size, way, everything = (f"{count:,}" for count in counts.values())
        entries.append({"model": model.title, **counts})
        rows.append((model.title, model.parameters, size, model.flops, way, everything))
    columns = (
        "Models",
        "parameters, paper",
        "parameters, exact",
        "FLOPs per image, paper",
        "FLOPs per image, exact (as in the paper)",
        "FLOPs per image, exact (total)",
    )
    title = "Tables 1 and 4: model sizes in the paper, and exact counts for the presets"
    return PaperTable(Table(title, columns, tuple(rows)), {"rows": entries})


def at_fixed_shift(layer: LayerStatistics) -> Bool[Tensor, "h"]:
    """Return whether each head has most of its attention at one shift, and a pattern nearly constant over queries."""
    return (layer.shift_mass >= LEAST_MASS) & (layer.constancy >= LEAST_CONSTANCY)


def table_of_fixed_shifts(models: Mapping[str, Sequence[LayerStatistics]]) -> PaperTable:
    """Return the table for the claim of Figure 6: the heads at a fixed shift in each layer, by model title."""
    rows, values = [], dict[str, list[dict[str, Any]]]()
    for title, layers in models.items():
        values[title] = []
        for number, layer in enumerate(layers):
            numbers = {"best_shift": layer.best_shift, "mass": layer.shift_mass, "constancy": layer.constancy}
            numbers["fixed"] = at_fixed_shift(layer)
            heads: list[dict[str, Any]] = [
                {"layer": number, "head": head, **{name: column[head].tolist() for name, column in numbers.items()}}
                for head in range(len(layer.constancy))
            ]
            values[title] += heads
            fixed = [head for head in heads if head["fixed"]]
            which = (f"head {head['head']} at {tuple(head['best_shift'])}: {head['mass']:.0%}" for head in fixed)
            rows.append((title, str(number), f"{len(fixed)} of {len(heads)}", "; ".join(which) or "none"))
    limits = f"at least {LEAST_MASS:.0%} of the attention at one shift, and a constancy of at least {LEAST_CONSTANCY:g}"
    columns = ("model", "layer, from 0", "heads at a fixed shift", "head (from 0) at shift: share of attention")
    table = Table(f"Heads at a fixed shift (row, column) in positions: {limits}", columns, tuple(rows))
    return PaperTable(table, {"least_mass": LEAST_MASS, "least_constancy": LEAST_CONSTANCY, "models": values})
