"""A run from its settings to its folder: check, load, build, train, measure.

The training is in `loop`, its record in `run_recorder`. A run that was killed at any time continues with
`resume=True` and ends, on a CPU with as many threads, with the same weights bit for bit.
"""

import atexit
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnconv._util.atomic_write import write_atomically
from attnconv._util.errors import bad
from attnconv.data.image_set import Splits
from attnconv.data.load_splits import load_data
from attnconv.models.checkpoint import load_weights, read_checkpoint
from attnconv.models.classifiers import build
from attnconv.models.model_loader import checkpoint_file, load as load_model
from attnconv.training.environment import environment
from attnconv.training.evaluation import device_of, evaluate
from attnconv.training.loop import TrainingLoop, numerics
from attnconv.training.processes import is_first_process, world_size
from attnconv.training.progress_bars import TrainingProgress, downloading
from attnconv.training.run_checks import check_folder, check_start, data_problems, machine_problems
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
    """Train a model and write everything about it to a folder.

    Where torchrun has started several processes, each calls `fit`, the first one writes, and all return once the folder
    is complete.

    Args:
        settings: Settings of the run.
        run_dir: Folder of the run: new or empty, or with `resume` one that holds a run of the same settings.
        resume: Continue after the last complete epoch of the run in the folder; begin where there is none.
        start_from: Checkpoint or run folder with the initial weights; None for fresh parameters. The run keeps a copy.
        progress: Show a bar (on a terminal) or a line per epoch on standard error.
        command: The command line that started the run, for its record.

    Returns:
        The run's folder.

    Raises:
        SettingsError: Settings are wrong; the message lists all of them, and nothing was done.
        ValueError: Another process writes to the folder, it holds something else, its state is damaged or of another
            run, or the initial weights are not those of such a model.
        OSError: The data are not there, or the folder cannot be written; what was saved before stays valid.
        DivergedError: The loss is no longer finite; the last good checkpoint stays.
        KeyboardInterrupt: At Ctrl-C; the last complete epoch is kept.
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
    """From the data to the result, in a folder that is locked and can hold the run."""
    with downloading(shown=shown) as report:
        data = load_data(settings.data, progress=report)
    if wrong := data_problems(settings, data):
        raise SettingsError(wrong)
    device = device_of(settings.train.accelerator)
    if world_size() > 1 and not torch.distributed.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(torch.distributed.destroy_process_group)
    progress = TrainingProgress(settings.train.epochs, len(data.train) // settings.train.batch_size, shown=shown)
    try:
        with numerics(device), closing(progress):
            if is_first_process():  # make the folder, or bring it back to the end of the last complete epoch
                if not folder.exists():
                    folder.checkpoints.mkdir(parents=True, exist_ok=True)
                    if start_from is not None:  # before the folder counts as a run, which a kill could leave without
                        write_atomically(folder.start_weights, checkpoint_file(Path(start_from)).read_bytes())
                    folder.begin(settings, environment(command, device))
                folder.rewind(read_state(folder.state_file)["epoch"] if folder.state_file.is_file() else -1)
            recorder = _train(settings, folder, data, device, progress)
            if is_first_process():
                result = _measure(settings, folder, data, device, recorder)
                write_json(folder.result_file, result)
                progress.say(_summary(result))
            if world_size() > 1:
                torch.distributed.barrier()
    except KeyboardInterrupt as stop:
        kept = f"Stopped. The last complete epoch is kept in {folder.path}; resume=True continues."
        raise type(stop)(kept) from None


def _train(
    settings: RunSettings, folder: RunFolder, data: Splits, device: torch.device, progress: TrainingProgress
) -> Recorder:
    """Train to the last epoch, from the folder's training state if it has one."""
    loop = TrainingLoop(settings, first_model(folder, settings), data, device)
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
    """Metrics of the last epoch, the one chosen on held-out images and given initial weights, read from their files."""
    files = {"last": (settings.train.epochs, folder.last_weights)}
    if recorder.best[0]:
        files["best"] = (recorder.best[0], folder.best_weights)
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
    """The result in one line: on the test set or, where there is none, on the held-out images."""
    split = "test" if "test" in result["last"] else "validation"
    words = {"last": "after the last epoch", "best": "at the epoch chosen on held-out images"}
    parts = [
        f"{result[name][split]['accuracy']:.2%} {text} ({result[name]['epoch']})"
        for name, text in words.items()
        if split in result.get(name, {})
    ]
    return f"{split} accuracy: " + (", ".join(parts) or "no images to measure")


def first_model(folder: RunFolder, settings: RunSettings) -> nn.Module:
    """The model before the first step; the global generator is left as the training needs it.

    Fresh parameters are a function of the seed and the settings, so that a run keeps no copy of them; of given initial
    weights it does.
    """
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
