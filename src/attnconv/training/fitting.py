"""A run from its settings to its folder: check, load, build, train, measure. Reads top to bottom.

Lightning moves the loop, the processes and the precision; what one step computes is in ``module``, what is kept of it
in ``recorder``. A run that was killed at any moment continues with ``resume=True`` and ends, on a CPU with as many
threads, with the same weights bit for bit.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import nn

from attnconv._util.atomic_write import write_atomically
from attnconv._util.errors import bad
from attnconv.data.image_set import ImageSet, Splits
from attnconv.data.load_splits import load as load_data
from attnconv.models.model_loader import checkpoint_file, load as load_model
from attnconv.models.settings import ResNetSettings
from attnconv.training.batch_loaders import EpochBatches, evaluation_batches
from attnconv.training.determinism import numerics
from attnconv.training.environment import environment
from attnconv.training.initial_model import first_model, measure
from attnconv.training.lightning_module import TrainingModule
from attnconv.training.process_rank import is_first_process
from attnconv.training.progress_bars import Watcher, downloading
from attnconv.training.run_checks import check_folder, check_start, data_problems, machine_problems
from attnconv.training.run_folder import RunFolder, write_json
from attnconv.training.run_lock import writing
from attnconv.training.run_recorder import Recorder, stopped
from attnconv.training.settings import RunSettings, SettingsError, problems
from attnconv.training.trainer_state import AtomicIO, read_state

_TERMINATED = 128 + 15  # status of a process that SIGTERM ended
_PRECISIONS: Mapping[str, Any] = {"32": "32-true", "bf16": "bf16-mixed", "64": "64-true"}


def fit(
    settings: RunSettings,
    run_dir: str | Path,
    *,
    resume: bool = False,
    start_from: str | Path | None = None,
    progress: bool = True,
    command: Sequence[str] = (),
) -> RunFolder:
    """Train a model and leave everything about it in a folder.

    With several devices Lightning starts the calling script once more for each of them; what comes after ``fit`` then
    runs in every process, and only the first one finds the folder complete.

    Args:
        settings: of the run.
        run_dir: its folder: new or empty, or with ``resume`` one that holds a run of the same settings.
        resume: continue after the last complete epoch of the run in the folder; begin where there is none.
        start_from: checkpoint, or run folder, whose weights to begin with in place of fresh parameters; its model has
            the settings' shapes. The run keeps a copy, and a resumed run does not look at the original.
        progress: show a bar (on a terminal) or a line per epoch on standard error.
        command: words to remember as what started the run.

    Returns:
        The run's folder.

    Raises:
        SettingsError: if anything is wrong with the settings, naming all of it; nothing was done.
        ValueError: if another process writes to the folder, it holds something else, its state is damaged or of another
            run, or the weights to begin with are not those of such a model.
        OSError: if the data are not there, or the folder cannot be written; what was saved before stays good.
        DivergedError: if the loss is no longer finite; the last good checkpoint stays.
        KeyboardInterrupt: at Ctrl-C; the last complete epoch is kept.
        SystemExit: at SIGTERM likewise, with status 143.
    """
    wrong = problems(settings) or machine_problems(settings)
    if wrong:
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
    """From the data to the result, in a folder that is held for writing and can take the run."""
    with downloading(shown=shown) as report:
        data = load_data(settings.data, progress=report)
    wrong = data_problems(settings, data)
    if wrong:
        raise SettingsError(wrong)
    watcher = Watcher(settings.train.epochs, len(data.train) // settings.train.batch_size, shown=shown)
    recorder = Recorder(folder, data.classes, watcher)
    with numerics(settings):
        trainer = make_trainer(settings, folder, recorder)
        device = trainer.strategy.root_device
        if trainer.is_global_zero:
            if start_from is not None:
                _keep_start(folder, Path(start_from))
            _prepare(folder, settings, environment(command, device), watcher)
        train_model(settings, data, trainer, folder)
        if trainer.is_global_zero:
            result = _measure(settings, data, recorder, device)
            write_json(folder.result_file, result)
            watcher.say(_sentence(result))


def make_trainer(settings: RunSettings, folder: RunFolder, callback: Callback) -> Trainer:
    """Lightning's trainer for these settings.

    Args:
        settings: of the run.
        folder: of the run; Lightning itself writes nothing there.
        callback: what keeps the run: the recorder, or what only looks at it.
    """
    train = settings.train
    return Trainer(
        accelerator=train.accelerator,
        devices=train.devices,
        num_nodes=train.nodes,
        strategy="ddp" if train.devices * train.nodes > 1 else "auto",
        precision=_PRECISIONS[train.precision],
        max_epochs=train.epochs,
        accumulate_grad_batches=train.accumulate,
        gradient_clip_val=settings.optim.clip,
        plugins=[AtomicIO()],
        callbacks=[callback],
        default_root_dir=str(folder.path),
        logger=False,
        enable_checkpointing=isinstance(callback, Checkpoint),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )


def _keep_start(folder: RunFolder, source: Path) -> None:
    """Copy the weights to begin with, before the folder counts as a run: a kill in between leaves none without them."""
    if not folder.exists():
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        write_atomically(folder.start_weights, checkpoint_file(source).read_bytes())


def _prepare(folder: RunFolder, settings: RunSettings, environment: Mapping[str, Any], watcher: Watcher) -> None:
    """Make the folder, or bring it back to the end of the last complete epoch."""
    if not folder.exists():
        folder.begin(settings, environment)
    if not folder.state_file.is_file():
        folder.rewind(-1)
        return
    epoch = complete_epochs(folder.state_file)
    folder.rewind(epoch)
    watcher.say(f"Resuming the run in {folder.path} after epoch {epoch} of {settings.train.epochs}.")


def complete_epochs(state_file: Path) -> int:
    """How many epochs were complete when a trainer's state was written.

    Raises:
        ValueError: if the file is not a trainer's state.
    """
    epoch = read_state(state_file).get("epoch")
    if not isinstance(epoch, int):
        raise ValueError(bad("state", "must say its epoch", repr(epoch), origin=str(state_file)))
    return epoch + 1


def train_model(settings: RunSettings, data: Splits, trainer: Trainer, folder: RunFolder) -> None:
    """Train from what the folder holds: a trainer's state, weights to begin with or nothing, to the trainer's end."""
    train = settings.train
    model = first_model(folder, settings)
    if isinstance(settings.model, ResNetSettings):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # it does take it alone
    measured: dict[str, ImageSet] = {"validation": data.validation, "test": data.test}
    splits = [name for name in measured if len(measured[name]) and (name != "test" or train.test_curve)]
    batches = EpochBatches(data.train, train, trainer)
    module = TrainingModule(
        model,
        settings,
        mean=data.mean,
        std=data.std,
        steps_per_epoch=len(batches) // train.accumulate,
        splits=splits,
    )
    if train.compile:
        model.compile()
    state = folder.state_file
    loaders = [evaluation_batches(measured[name], train, trainer) for name in splits]
    try:
        trainer.fit(module, batches, loaders or None, ckpt_path=str(state) if state.is_file() else None)
    except SystemExit as end:  # what Lightning makes of Ctrl-C (status 1) and of SIGTERM (status 0)
        if isinstance(end.__context__, KeyboardInterrupt):
            raise type(end.__context__)(stopped(folder)) from None
        raise SystemExit(_TERMINATED) from None


def _measure(settings: RunSettings, data: Splits, recorder: Recorder, device: torch.device) -> dict[str, Any]:
    """Scores of the last epoch and of the one chosen on held-out images, from the weights files."""
    folder = recorder.folder
    files = {"last": (settings.train.epochs, folder.last_weights)}
    if recorder.best[0]:
        files["best"] = (recorder.best[0], folder.best_weights)
    result: dict[str, Any] = {"seconds": round(recorder.seconds, 1)}
    for name, (epoch, path) in files.items():
        model: nn.Module = load_model(path).model
        result["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        result[name] = {"epoch": epoch, **measure(model, settings, data, device)}
    return result


def _sentence(result: Mapping[str, Any]) -> str:
    """What came out, in one line: on the test set or, where there is none, on the held-out images."""
    split = "test" if "test" in result["last"] else "validation"
    words = {"last": "after the last epoch", "best": "at the epoch chosen on held-out images"}
    parts = [
        f"{result[name][split]['accuracy']:.2%} {text} ({result[name]['epoch']})"
        for name, text in words.items()
        if split in result.get(name, {})
    ]
    return f"{split} accuracy: " + (", ".join(parts) or "no images to measure")
