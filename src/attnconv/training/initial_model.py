"""The model before the first step of a run, and its scores.

Fresh parameters are a function of the seed and the settings, so a run keeps no copy of them; a run with given initial
weights (a pruned model) does. Its scores are in `result.json` under `start`.
"""

from dataclasses import replace

import torch
from torch import nn

from attnconv._util.errors import bad
from attnconv.data.load_splits import load as load_data
from attnconv.models.checkpoint import load_weights, read_checkpoint
from attnconv.models.classifiers import build
from attnconv.models.model_loader import load as load_model
from attnconv.training.determinism import numerics
from attnconv.training.evaluation import device_of, measure
from attnconv.training.head_records import head_record
from attnconv.training.run_folder import RunFolder, write_json
from attnconv.training.run_lock import writing
from attnconv.training.settings import RunSettings


def first_model(folder: RunFolder, settings: RunSettings) -> nn.Module:
    """The initial model of a run. The global generator is left as the training needs it."""
    torch.manual_seed(settings.train.seed)
    model = build(settings.model)
    if folder.start_weights.is_file():  # with several processes the first one's parameters are sent to all
        load_weights(model, read_checkpoint(folder.start_weights))
    return model


def starting_model(run: RunFolder) -> nn.Module:
    """The initial model of a finished or running training; random numbers stay as they are.

    Raises `ValueError` where this version draws other weights from the seed than `heads.jsonl` records.
    """
    with torch.random.fork_rng(devices=[]):
        model = first_model(run, run.settings())
    recorded = [layer["centres"] for line in run.heads() if line["epoch"] == 0 for layer in line["layers"]]
    made = [layer["centres"] for layer in head_record(model, 0)["layers"]]
    for now, then in zip(made, recorded, strict=False):  # nothing may be recorded
        if not torch.allclose(torch.tensor(now), torch.tensor(then), atol=1e-5):
            fix = "Read it with the version of attnconv that wrote it."
            raise ValueError(bad("run", "must begin as its heads.jsonl says", f"other centres in {run.path}", fix))
    return model.eval()


def measure_start(run: RunFolder) -> None:
    """Write the scores of given initial weights into a complete run's `result.json`, once. Nothing is downloaded."""
    result = run.result()
    if result is None or "start" in result or not run.start_weights.is_file():
        return
    settings = run.settings()
    with writing(run):
        data = load_data(replace(settings.data, download=False))
        model = load_model(run.start_weights).model
        device = device_of(settings.train.accelerator)
        with numerics(device):
            result["start"] = {"epoch": 0, **measure(model, settings, data, device)}
        write_json(run.result_file, result)
