"""Tables 1 to 4 of the paper, its numbers beside those of runs.

Accuracies are on the test set, of the epoch chosen on held-out images where some were held out, else of the last; over
several seeds their mean and sample deviation. The paper chose its epochs on the test set. Counts are exact and of the
model that the run trained, which need not have the paper's size; the paper's way of counting FLOPs leaves out the
products of attention and image.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from attnconv.models.operation_counts import flops_all, flops_paper, parameters
from attnconv.models.preset_tables import Table, pruned_settings, table_2
from attnconv.models.presets import PRESETS
from attnconv.models.settings import AttentionSettings
from attnconv.paper.models import PAPER_MODELS, PaperModel
from attnconv.paper.number_format import spoken
from attnconv.training.recipes import recipe, table_rows
from attnconv.training.run_folder import RunFolder
from attnconv.training.settings import RunSettings

_COLUMNS = (
    "Models",
    "accuracy, paper",
    "accuracy, here",
    "here: preset, runs",
    "# of params, paper",
    "# of params, here",
    "# of FLOPS, paper",
    "# of FLOPS, here, paper's way",
    "# of FLOPS, here, everything",
)

# Table 2 of the paper, as printed.
PAPER_TABLE_2: Mapping[str, str] = {
    "number of layers": "6",
    "number of heads": "9",
    "hidden dimension": "400",
    "intermediate dimension": "512",
    "invertible pooling width": "2",
    "dropout probability": "0.1",
    "layer normalization epsilon": "1e-12",
    "number of epochs": "300",
    "batch size": "100",
    "learning rate": "0.1",
    "weight decay": "0.0001",
    "momentum": "0.9",
    "cosine decay": "yes",
    "linear warm up ratio": "0.05",
}

# Table 3 of the paper: model, kind of positional encoding, whether relative; and the encodings here of that kind.
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
    """One table: as people read it, and its numbers as plain values for JSON.

    Attributes:
        table: Texts.
        values: What `table-N.json` holds.
    """

    table: Table
    values: Mapping[str, Any]


def accuracies(runs: Sequence[RunFolder]) -> list[float]:
    """Test accuracy of each run that is complete and has test images: of the chosen epoch, else of the last."""
    results = [result for run in runs if (result := run.result()) is not None]
    return _accuracies(result.get("best") or result["last"] for result in results)


def table_of_accuracy(runs: Mapping[str, Sequence[RunFolder]], number: int) -> PaperTable:
    """Table 1 or 4: accuracy, parameters and FLOPs of each model, the paper's beside ours.

    Args:
        runs: Model, as in `PAPER_MODELS` -> its runs, one per seed, the same model in each.
        number: 1 or 4. Table 4 has Table 1's rows, the generalised and pruned models, and here the one with 16 heads.

    Returns:
        The table; a model without a complete run shows dashes.
    """
    chosen = [model for model in PAPER_MODELS.values() if number == 4 or model.table_1]
    entries = [_entry(model, runs.get(model.name, ())) for model in chosen]
    title = {
        1: "Table 1: Test accuracy on {} and model sizes. SA stands for self-attention",
        4: "Table 4: Number of parameters and accuracy on {} per model. SA stands for self-attention",
    }[number]
    data = dict.fromkeys(run.settings().data.name for model in chosen for run in runs.get(model.name, ()))
    table = Table(title.format(", ".join(data) or "cifar10"), _COLUMNS, tuple(_texts(entry) for entry in entries))
    return PaperTable(table, {"data": list(data), "rows": entries})


def table_of_trainings(runs: Mapping[str, Sequence[RunFolder]]) -> PaperTable:
    """How each model came to its accuracy: of the last epoch and of the one chosen on held-out images, time and device.

    Args:
        runs: As in `table_of_accuracy`.

    Returns:
        The table, with a row for each model that has a complete run.
    """
    entries = [_training(model, done) for model in PAPER_MODELS.values() if (done := _complete(runs, model.name))]
    columns = ("Models", "runs", "last epoch", "epoch chosen on held-out images", "epochs", "minutes each", "device")
    rows = tuple(
        (
            entry["model"],
            str(len(entry["seeds"])),
            spoken(entry["last"], "share"),
            spoken(entry["chosen"], "share"),
            str(entry["epochs"]),
            spoken(entry["minutes"], "minutes"),
            "; ".join(entry["devices"]),
        )
        for entry in entries
    )
    title = "Test accuracy of the last epoch and of the chosen one, and what training took"
    return PaperTable(Table(title, columns, rows), {"rows": entries})


def _complete(runs: Mapping[str, Sequence[RunFolder]], name: str) -> list[RunFolder]:
    return [run for run in runs.get(name, ()) if run.result() is not None]


def _training(model: PaperModel, runs: Sequence[RunFolder]) -> dict[str, Any]:
    results = [result for run in runs if (result := run.result()) is not None]
    records = [run.record() for run in runs]
    return {
        "model": model.title,
        "name": model.name,
        "seeds": [run.settings().train.seed for run in runs],
        "epochs": runs[0].settings().train.epochs,
        "last": _accuracies(result["last"] for result in results),
        "chosen": _accuracies(result.get("best") or {} for result in results),
        "minutes": [result["seconds"] / 60 for result in results],
        "devices": list(dict.fromkeys(_device(record) for record in records)),
    }


def _accuracies(scores: Iterable[Mapping[str, Any]]) -> list[float]:
    """On test images, where there are any."""
    return [float(score["test"]["accuracy"]) for score in scores if "test" in score]


def _device(record: Mapping[str, Any]) -> str:
    """Device, threads where they are known and it is a CPU, and precision, as a run's record has them."""
    device = str(record.get("device", "unknown"))
    threads = f", threads: {record['threads']}" if device.startswith("cpu") and "threads" in record else ""
    return f"{device}{threads}, {record['settings']['train']['precision']}"


def _entry(model: PaperModel, runs: Sequence[RunFolder]) -> dict[str, Any]:
    found = accuracies(runs)
    settings = runs[0].settings() if runs else None
    here: dict[str, Any] | None = None
    if settings is not None:
        here = {
            "preset": settings.preset,
            "epochs": settings.train.epochs,
            "seeds": [run.settings().train.seed for run in runs],
            "accuracies": found,
            "accuracy": statistics.fmean(found) if found else None,
            "deviation": statistics.stdev(found) if len(found) > 1 else None,
            "parameters": parameters(settings.model),
            "flops_paper_way": flops_paper(settings.model),
            "flops_everything": flops_all(settings.model),
        }
    paper = {"accuracy": model.accuracy, "parameters": model.parameters, "flops": model.flops}
    return {"model": model.title, "name": model.name, "paper": paper, "here": here}


def _texts(entry: Mapping[str, Any]) -> tuple[str, ...]:
    paper, here = entry["paper"], entry["here"]
    printed = "-" if paper["accuracy"] is None else f"{paper['accuracy']:.3f}"
    if here is None:
        return (entry["model"], printed, "-", "-", paper["parameters"], "-", paper["flops"], "-", "-")
    ours = "-" if here["accuracy"] is None else f"{here['accuracy']:.3f}"
    if here["deviation"] is not None:
        ours += f" ± {here['deviation']:.3f}"
    counts = (f"{here[name]:,}" for name in ("parameters", "flops_paper_way", "flops_everything"))
    size, way, everything = counts
    count = len(here["accuracies"])
    runs = f"{here['preset']}, {count} {'run' if count == 1 else 'runs'}" + ("" if count else " complete")
    return (entry["model"], printed, ours, runs, paper["parameters"], size, paper["flops"], way, everything)


def table_of_hyper_parameters(settings: RunSettings | None = None) -> PaperTable:
    """Table 2: what the paper prints, what the preset `quadratic` and its recipe hold, and what a run had.

    Args:
        settings: Of a run of an attention model; None leaves its column out.
    """
    columns = {"paper": dict(PAPER_TABLE_2), "preset quadratic": _hyper_parameters(recipe("quadratic"))}
    if settings is not None:
        columns["the run here"] = _hyper_parameters(settings)
    rows = tuple((name, *(values[name] for values in columns.values())) for name in PAPER_TABLE_2)
    title = "Table 2: Self-attention network parameters"
    return PaperTable(Table(title, ("Hyper-parameters", *columns), rows), columns)


def _hyper_parameters(settings: RunSettings) -> dict[str, str]:
    model = settings.model
    assert isinstance(model, AttentionSettings)
    return {row[0]: row[1] for row in table_2(model, training=table_rows(settings)).rows}


def table_of_encodings() -> PaperTable:
    """Table 3: the positional encodings of other models, and which of this library's are of that kind.

    Example:
        >>> table_of_encodings().table.rows[3]
        ('Dai et al. (2019)', 'sinusoids', 'yes', 'sinusoidal')
    """
    rows = tuple(
        (model, kind, "yes" if relative else "no", ", ".join(names)) for model, kind, relative, names in ENCODINGS_OF
    )
    title = "Table 3: Types of positional encoding used by transformers for text and images"
    columns = ("Model", "type of positional encoding", "relative", "encodings here")
    values = [
        {"model": model, "kind": kind, "relative": relative, "here": list(names)}
        for model, kind, relative, names in ENCODINGS_OF
    ]
    return PaperTable(Table(title, columns, rows), {"rows": values})


def table_of_counts() -> PaperTable:
    """The exact counts of the presets of the paper's size, which need no run.

    Example:
        >>> table_of_counts().table.rows[1][:4]
        ('SA quadratic emb.', '12.1M', '12,086,844', '6.2B')
    """
    entries, rows = [], []
    for model in PAPER_MODELS.values():
        settings = PRESETS.get(model.name, pruned_settings())
        size, way, everything = parameters(settings), flops_paper(settings), flops_all(settings)
        entries.append(
            {"model": model.title, "parameters": size, "flops_paper_way": way, "flops_everything": everything}
        )
        rows.append((model.title, model.parameters, f"{size:,}", model.flops, f"{way:,}", f"{everything:,}"))
    columns = ("Models", "# of params, paper", "counted", "# of FLOPS, paper", "paper's way", "everything counted")
    title = "Tables 1 and 4: the paper's sizes, and those of the presets counted exactly"
    return PaperTable(Table(title, columns, tuple(rows)), {"rows": entries})
