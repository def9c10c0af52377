"""Train a model from its settings and write a run folder.

A run that was interrupted at any time can be resumed with `resume=True`. On a CPU with the same number of threads, its
final weights are then bit for bit those of an uninterrupted run.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnconv._util.atomic_write import write_atomically
from attnconv._util.errors import bad
from attnconv._util.processes import begin_group, is_first_process, world_size
from attnconv.data.image_set import Splits
from attnconv.data.load_splits import load_data
from attnconv.models.checkpoint import load_weights, read_checkpoint
from attnconv.models.classifiers import build
from attnconv.models.model_loader import checkpoint_file, load as load_model
from attnconv.training.environment import environment
from attnconv.training.evaluation import device_of, dtype_of, evaluate, on_device
from attnconv.training.loop import TrainingLoop, numerics
from attnconv.training.progress_bars import TrainingProgress, downloading
from attnconv.training.run_checks import check_folder, check_images, check_start, data_problems, machine_problems
from attnconv.training.run_folder import RunFolder, write_json, writing
from attnconv.training.run_recorder import Recorder, head_record, read_state
from attnconv.training.settings import RunSettings, SettingsError, problems


def fit(
    settings: RunSettings,
    run_dir: str | Path,
    *,
    resume: bool = False,
    start_from: str | Path | None = None,
    progress: bool = True,
    command: Sequence[str] = (),
) -> RunFolder:
    """Train a model, write its settings, metrics, head centres and checkpoints to a run folder, and return the folder.

    With several processes started by torchrun, all processes call `fit`, the first process writes, and all return when
    the folder is complete.

    Args:
        settings: Settings of the run.
        run_dir: Run folder, which must be new or empty. With `resume`, it may contain a run with the same settings.
        resume: Resume the run in the folder from its last checkpoint; if the folder contains no run, start a new one.
        start_from: Weights file or run folder with the initial weights, which are copied to the new run folder. None
            starts from random weights.
        progress: Show progress on standard error, as a bar on a terminal and otherwise as one line per epoch.
        command: Command line that started the run, as words; it is stored in settings.json.

    Raises:
        SettingsError: If settings are invalid. The message lists all of them, and nothing is written.
        ValueError: If another process is writing to the folder, the folder contains other files, its training state is
            damaged or belongs to a different run, the data set is missing, or the initial weights do not fit the model.
        OSError: If a required file is missing, or the folder is not writable. Existing files remain valid.
        DivergedError: If the loss is no longer finite. The last valid checkpoint is kept.
        KeyboardInterrupt: If the run was interrupted by Ctrl-C. The last checkpoint is kept.
    """
    if wrong := problems(settings) or machine_problems(settings):
        raise SettingsError(wrong)
    folder = RunFolder(Path(run_dir))
    with writing(folder):
        check_folder(folder, settings, resume=resume)
        check_start(folder, settings, start_from)
        _fit(settings, folder, start_from, shown=progress and is_first_process(), command=command)
    return folder


def _fit(
    settings: RunSettings, folder: RunFolder, start_from: str | Path | None, *, shown: bool, command: Sequence[str]
) -> None:
    """Load the data, train and evaluate in a folder that has been checked and locked."""
    with downloading(shown=shown) as report:
        data = load_data(settings.data, image_size=settings.model.image_size, progress=report)
    if wrong := data_problems(settings, data):
        raise SettingsError(wrong)
    device = device_of(settings.train.accelerator)
    begin_group(device)
    progress = TrainingProgress(settings.train.epochs, len(data.train) // settings.train.batch_size, shown=shown)
    try:
        with numerics(device), closing(progress):
            if is_first_process():  # create the folder, or reset it to the last complete epoch
                if not folder.exists():
                    folder.checkpoints.mkdir(parents=True, exist_ok=True)
                    if start_from is not None:  # before settings.json, so that no run lacks its initial weights
                        write_atomically(folder.start_weights, checkpoint_file(Path(start_from)).read_bytes())
                    used = {"used_precision": on_device(settings.train.precision, device)}
                    folder.begin(settings, environment(command, device) | used | {"image_checksum": data.checksum()})
                check_images(folder, data)
                folder.rewind(read_state(folder.state_file)["epoch"] if folder.state_file.is_file() else -1)
            recorder = _train(settings, folder, data, device, progress)
            if is_first_process():
                result = _measure(settings, folder, data, device, recorder)
                write_json(folder.result_file, result)
                progress.say(_summary(result))
            if world_size() > 1:
                torch.distributed.barrier()
    except KeyboardInterrupt as stop:
        kept = f"Stopped. The last checkpoint is kept in {folder.path}; resume=True continues the run."
        raise type(stop)(kept) from None


def _train(
    settings: RunSettings, folder: RunFolder, data: Splits, device: torch.device, progress: TrainingProgress
) -> Recorder:
    """Train until the last epoch, starting from the training state in the folder if there is one."""
    loop = TrainingLoop(settings, first_model(folder, settings), data, device)
    parameters = sum(parameter.numel() for parameter in loop.model.parameters())
    sets = f"{len(data.train):,} training, {len(data.validation):,} validation and {len(data.test):,} test images"
    progress.say(f"Device {device}, {parameters:,} parameters, {sets}.")
    if on_device(settings.train.precision, device) != settings.train.precision:
        progress.say("Precision 32 instead of bf16, since the device has no instructions for bfloat16.")
    state = read_state(folder.state_file) if folder.state_file.is_file() else {}
    if state:
        loop.load_state(state)
        progress.say(f"Resuming the run in {folder.path} after epoch {loop.epoch} of {settings.train.epochs}.")
    recorder = Recorder(folder, loop, progress, state)
    progress.begin(loop.epoch)
    while loop.epoch < settings.train.epochs:
        loop.train_epoch(recorder.after_step)
        recorder.after_epoch(loop.evaluate())
    progress.close()
    return recorder


def _measure(
    settings: RunSettings, folder: RunFolder, data: Splits, device: torch.device, recorder: Recorder
) -> dict[str, Any]:
    files = {"last": (settings.train.epochs, folder.last_weights)}
    if recorder.best[0]:
        # A repeated epoch can differ on a GPU, so the file may be from another epoch than the recorder's.
        files["best"] = (read_checkpoint(folder.best_weights).extra["epoch"], folder.best_weights)
    if folder.start_weights.is_file():
        files["start"] = (0, folder.start_weights)
    sets = {"validation": data.validation, "test": data.test}
    about: dict[str, Any] = {"mean": data.mean, "std": data.std, "device": device}
    about |= {"batch_size": settings.train.eval_batch_size, "precision": settings.train.precision}
    result: dict[str, Any] = {"seconds": round(recorder.seconds, 1)}
    for name, (epoch, path) in files.items():
        model: nn.Module = load_model(path).model
        result["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        metrics = {split: asdict(evaluate(model, images, **about)) for split, images in sets.items() if len(images)}
        result[name] = {"epoch": epoch, **metrics}
    return result


def _summary(result: Mapping[str, Any]) -> str:
    """Summarise the result in one line, for the test set or, if it is empty, for the validation set."""
    split = "test" if "test" in result["last"] else "validation"
    words = {"last": "after the last epoch", "best": "after the epoch selected on the validation set"}
    found = [(result[name], text) for name, text in words.items() if split in result.get(name, {})]
    parts = [f"{weights[split]['accuracy']:.2%} {text} ({weights['epoch']})" for weights, text in found]
    return f"{split} accuracy: " + (", ".join(parts) or "no images to evaluate")


def first_model(folder: RunFolder, settings: RunSettings) -> nn.Module:
    """Build the model with its initial weights, and seed torch's global generator for the training.

    Random initial weights are a function of the seed and the settings and need not be stored. Weights passed as
    `start_from` are loaded from the run folder.
    """
    torch.manual_seed(settings.train.seed)
    model = build(settings.model)
    if folder.start_weights.is_file():  # needed only by the first process, whose parameters the others receive
        model.to(dtype_of(settings.train.precision))
        load_weights(model, read_checkpoint(folder.start_weights))
    return model


def starting_model(run: RunFolder) -> nn.Module:
    """Build the initial model of a run, without changing the state of torch's global generator.

    Raises `ValueError` if its centres differ from those in `heads.jsonl`, which may be from a different version.
    """
    with torch.random.fork_rng(devices=[]):
        model = first_model(run, run.settings())
    recorded = [layer["centres"] for line in run.heads() if line["epoch"] == 0 for layer in line["layers"]]
    made = [layer["centres"] for layer in head_record(model, 0)["layers"]]
    for now, then in zip(made, recorded, strict=False):  # the record may be empty
        if not torch.allclose(torch.tensor(now), torch.tensor(then), atol=1e-5):
            got, fix = f"different centres for {run.path}", "Use the version of attnconv that wrote the run."
            raise ValueError(bad("run", "must have the initial centres that its heads.jsonl records", got, fix))
    return model.eval()
