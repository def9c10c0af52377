"""A run from its settings to its folder: check, load, build, train, measure.

The training is in `loop`, its record in `run_recorder`. A run that was killed at any time continues with
`resume=True` and ends, on a CPU with as many threads, with the same weights bit for bit.
"""

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnconv._util.atomic_write import write_atomically
from attnconv.data.image_set import Splits
from attnconv.data.load_splits import load as load_data
from attnconv.models.model_loader import checkpoint_file, load as load_model
from attnconv.training.determinism import numerics
from attnconv.training.environment import environment
from attnconv.training.evaluation import device_of, measure
from attnconv.training.initial_model import first_model
from attnconv.training.loop import TrainingLoop
from attnconv.training.processes import connect, is_first_process, wait_for_all
from attnconv.training.progress_bars import TrainingProgress, downloading
from attnconv.training.run_checks import check_folder, check_start, data_problems, machine_problems
from attnconv.training.run_folder import RunFolder, write_json
from attnconv.training.run_lock import writing
from attnconv.training.run_recorder import Recorder
from attnconv.training.settings import RunSettings, SettingsError, problems
from attnconv.training.training_state import read_state


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
        SystemExit: At SIGTERM likewise, with status 143.
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
    connect(device)
    progress = TrainingProgress(settings.train.epochs, len(data.train) // settings.train.batch_size, shown=shown)
    with _stoppable(folder, progress), numerics(device):
        if is_first_process():
            _prepare(folder, settings, start_from, environment(command, device))
        recorder = _train(settings, folder, data, device, progress)
        if is_first_process():
            result = _measure(settings, folder, data, device, recorder)
            write_json(folder.result_file, result)
            progress.say(_summary(result))
        wait_for_all()


@contextmanager
def _stoppable(folder: RunFolder, progress: TrainingProgress) -> Iterator[None]:
    """Report how to continue at Ctrl-C and at SIGTERM, which exits unless the caller handles it."""
    stopped = f"Stopped. The last complete epoch is kept in {folder.path}; resume=True continues."

    def terminate(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    in_main = threading.current_thread() is threading.main_thread()  # only there may signals be handled
    handled = in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if handled:
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt as stop:
        raise type(stop)(stopped) from None
    except SystemExit:
        progress.close()
        progress.say(stopped)
        raise
    finally:
        progress.close()
        if handled:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _prepare(
    folder: RunFolder, settings: RunSettings, start_from: str | Path | None, environment: Mapping[str, Any]
) -> None:
    """Make the folder, or bring it back to the end of the last complete epoch."""
    if not folder.exists():
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        if start_from is not None:  # before the folder counts as a run, which a kill could leave without them
            write_atomically(folder.start_weights, checkpoint_file(Path(start_from)).read_bytes())
        folder.begin(settings, environment)
    folder.rewind(read_state(folder.state_file)["epoch"] if folder.state_file.is_file() else -1)


def _train(
    settings: RunSettings, folder: RunFolder, data: Splits, device: torch.device, progress: TrainingProgress
) -> Recorder:
    """Train to the last epoch, from the folder's training state if it has one."""
    loop = TrainingLoop(settings, first_model(folder, settings), data, device)
    state = read_state(folder.state_file) if folder.state_file.is_file() else {}
    if state:
        loop.load_state(state)
        progress.say(f"Resuming the run in {folder.path} after epoch {loop.epoch} of {settings.train.epochs}.")
    with closing(Recorder(folder, loop, data.classes, progress, state)) as recorder:
        progress.begin(loop.epoch)
        while loop.epoch < settings.train.epochs:
            loop.train_epoch(recorder.after_step)
            recorder.after_epoch(loop.evaluate())
        progress.close()
    return recorder


def _measure(
    settings: RunSettings, folder: RunFolder, data: Splits, device: torch.device, recorder: Recorder
) -> dict[str, Any]:
    """Scores of the last epoch and of the one chosen on held-out images, from the weights files."""
    files = {"last": (settings.train.epochs, folder.last_weights)}
    if recorder.best[0]:
        files["best"] = (recorder.best[0], folder.best_weights)
    result: dict[str, Any] = {"seconds": round(recorder.seconds, 1)}
    for name, (epoch, path) in files.items():
        model: nn.Module = load_model(path).model
        result["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        result[name] = {"epoch": epoch, **measure(model, settings, data, device)}
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
