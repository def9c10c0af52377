"""Model card of an upload: Markdown with metadata for the hub, written from the records of a run.

What is not recorded is left out, and metrics are listed only if they were recorded for the epoch of the weights. The
text is in `model_card.md`.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template
from typing import Any

from attnconv._util.errors import bad
from attnconv._util.settings import flat, plain
from attnconv._util.value_checks import is_real
from attnconv.models.checkpoint import RECAST, read_weights
from attnconv.models.model_loader import load

_ON_HUB = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}  # names of data sets on the hub
_OF_THE_MACHINE = ("root", "download", "cache")  # data settings without effect on the model


def model_card(repo: str, folder: Path, weights: Path, licence: str) -> str:
    """Return the card of a weights file and of the records in its folder; raise the errors of `load`."""
    loaded, header = load(weights), read_weights(weights).metadata
    extra = _map(json.loads(header.get("extra", "{}")))
    run, result = (_read(folder / name) for name in ("settings.json", "result.json"))
    settings, metrics = _map(run.get("settings")), _metrics(extra, result)
    tensors = list(loaded.model.parameters())
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    records = {"preset": extra.get("preset"), **settings, "model": loaded.settings and plain(loaded.settings)}
    if header.get("format") == RECAST:
        records["convolutions replaced with attention"] = f"alpha={header['alpha']}, only={header['only']}"
    records |= {"epoch of the weights": extra.get("epoch"), "given initial weights": result.get("start")}
    records |= {name: run.get(name) for name in ("versions", "commit", "device", "threads")}
    records["precision on this device"] = run.get("used_precision")
    values = {
        "repo": repo,
        "name": repo.partition("/")[2],
        "metadata": _metadata(repo, _map(settings.get("data")), metrics, licence),
        "parameters": f"{sum(tensor.numel() for tensor in tensors):,}",
        "dtype": dtype,
        "results": _results(metrics),
        "records": "\n".join(_rows({**records, "seconds of training": result.get("seconds")})),
        "limits": "\n".join(_limits(loaded.classes, metrics, dtype)),
        "licence": licence,
    }
    return Template(Path(__file__).with_suffix(".md").read_text(encoding="utf-8")).substitute(values)


def _metrics(extra: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the metrics of each split that were recorded for the epoch of the weights."""
    epochs = (_map(result.get(name)) for name in ("last", "best", "start"))
    found = next((line for line in epochs if line.get("epoch", -1) == extra.get("epoch")), None)
    if found is None:
        found = {split: {"accuracy": value} for split, value in _map(extra.get("accuracy")).items()}
    return {split: values for split, values in found.items() if is_real(_map(values).get("accuracy"))}


def _metadata(repo: str, data: Mapping[str, Any], metrics: Mapping[str, Any], licence: str) -> str:
    """Return the metadata as YAML, of which JSON is a part, with the test accuracy if it and the data are recorded."""
    tags = ["attnconv", "pytorch", "self-attention"]
    task, name = "image-classification", str(data.get("name"))
    values: dict[str, Any] = {"library_name": "attnconv", "license": licence, "pipeline_tag": task, "tags": tags}
    if name in _ON_HUB:
        values["datasets"] = [_ON_HUB[name]]
    if "test" in metrics and "name" in data:
        labels = f" ({data['labels']} labels)" if name == "cifar100" and "labels" in data else ""
        source = {"type": _ON_HUB.get(name, name), "name": name + labels, "split": "test"}
        found = [{"type": "accuracy", "value": metrics["test"]["accuracy"]}]
        results = [{"task": {"type": task}, "dataset": source, "metrics": found}]
        values |= {"metrics": ["accuracy"], "model-index": [{"name": repo.partition("/")[2], "results": results}]}
    return "\n".join(f"{key}: {json.dumps(value)}" for key, value in values.items())


def _results(metrics: Mapping[str, Any]) -> str:
    if not metrics:
        return "No evaluation of these weights is recorded."
    rows = [f"| {split} | {line['accuracy']:.2%} | {line.get('images', '')} |" for split, line in metrics.items()]
    return "\n".join(
        ["Accuracy recorded by the training run:", "", "| split | accuracy | images |", "|---|---|---|", *rows]
    )


def _rows(records: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rows of a table with all values that are not None."""
    yield "| | |\n|---|---|"
    for name, value in records.items():
        parts = flat(value).items() if isinstance(value, Mapping) else ()
        text = ", ".join(f"{key}={part}" for key, part in parts if part is not None and key not in _OF_THE_MACHINE)
        if text or value is not None:
            yield f"| {name} | {text or value} |"


def _limits(classes: tuple[str, ...], metrics: Mapping[str, Any], dtype: str) -> Iterator[str]:
    yield "- Results on other data, and their variation over seeds, are not recorded."
    if classes:
        yield f"- The model distinguishes only these classes: {', '.join(classes)}."
    if metrics and dtype in ("float16", "bfloat16"):
        yield f"- The results were recorded in training, and not measured again with the {dtype} weights."


def _read(file: Path) -> Mapping[str, Any]:
    """Read a JSON object; return an empty one if the file does not exist."""
    try:
        return _map(json.loads(file.read_bytes()) if file.is_file() else {})
    except ValueError as error:
        raise ValueError(bad(str(file), "must be JSON", str(error))) from error


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
