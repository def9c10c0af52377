"""Write metrics, head centres, weights and the training state during training.

The training state is written last, and an epoch counts as complete only then. When a run is resumed, records of later
epochs are removed, and the epochs are repeated with bit-identical results. The state file is replaced atomically,
verified by a checksum, and read without executing code:

attnconv state 1 sha256 HEX   line with the checksum of the rest of the file
output of torch.save          dictionary, in which `run` contains the identifier and the settings of the run
"""

import hashlib
import io
import math
import pickle
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from attnconv._util.atomic_write import write_atomically
from attnconv._util.errors import bad
from attnconv._util.processes import is_first_process
from attnconv._util.settings import plain
from attnconv.encodings.base import Encoding
from attnconv.models.checkpoint import weights_bytes
from attnconv.training.evaluation import Metrics
from attnconv.training.loop import TrainingLoop
from attnconv.training.progress_bars import TrainingProgress
from attnconv.training.run_folder import HeadsLine, LayerHeads, MetricsLine, RunFolder, append_line

# Uniform heads have an infinite covariance, which JSON cannot represent. 1e12 is wider than any image.
WIDEST = 1e12
_HEAD = b"attnconv state 1 sha256 "
# Exceptions that torch's unpickler raises for other content.
_FOREIGN = (pickle.UnpicklingError, RuntimeError, EOFError, OSError, LookupError, AttributeError, TypeError, ValueError)


class DivergedError(ArithmeticError):
    """Error for a loss that is not finite. The run has stopped, and its last valid checkpoint is kept."""


@final
class Recorder:
    """Recorder of metrics, head centres, weights and the training state. It also stops the run if the loss diverges.

    `state` is the training state to resume from, or empty for a new run. `best` contains the epoch with the highest
    validation accuracy so far (the latest in case of a tie; 0 before the first validation) and this accuracy.
    """

    def __init__(
        self, folder: RunFolder, loop: TrainingLoop, progress: TrainingProgress, state: Mapping[str, Any]
    ) -> None:
        self._folder, self._loop, self._progress = folder, loop, progress
        self.best: tuple[int, float] = (state.get("best_epoch", 0), state.get("best_accuracy", -1.0))
        self.seconds: float = state.get("seconds", 0.0)
        self._clock = time.monotonic()
        self._writes = is_first_process()
        self._waiting: list[tuple[list[MetricsLine], HeadsLine]] = []
        self._best_weights: bytes | None = None
        if self._writes and loop.epoch == 0:
            append_line(folder.heads_file, head_record(loop.model, 0))

    def after_step(self) -> None:
        loop = self._loop
        self._progress.step(loop.step, loop.epoch + 1)
        if loop.step % loop.settings.train.log_every == 0:
            self._check_divergence(loop.train_metrics().loss, loop.epoch)

    def after_epoch(self, metrics: Mapping[str, Metrics]) -> None:
        """Record the results of an epoch, and write all recorded results if a checkpoint is due."""
        loop, epoch, train = self._loop, self._loop.epoch, self._loop.settings.train
        finite = all(bool(tensor.isfinite().all()) for tensor in loop.model.state_dict().values())
        losses = [result.loss for result in metrics.values()] + [0.0 if finite else math.nan]
        self._check_divergence(sum(losses), epoch - 1)
        now = time.monotonic()
        self.seconds, self._clock = self.seconds + now - self._clock, now
        improved = "validation" in metrics and metrics["validation"].accuracy >= self.best[1]
        if improved:
            self.best = (epoch, metrics["validation"].accuracy)
        due = epoch % train.checkpoint_every == 0 or epoch == train.epochs
        if not self._writes:
            return
        lines: list[MetricsLine] = [
            {
                "step": loop.step,
                "epoch": epoch,
                "split": split,
                "loss": result.loss,
                "accuracy": result.accuracy,
                "lr": loop.learning_rate,
                "seconds": round(self.seconds, 3),
            }
            for split, result in metrics.items()
        ]
        self._waiting.append((lines, head_record(loop.model, epoch)))
        self._progress.epoch(lines)
        if improved or due:
            accuracy = {split: result.accuracy for split, result in metrics.items()}
            extra = {"preset": loop.settings.preset, "epoch": epoch, "accuracy": accuracy}
            weights = weights_bytes(loop.model, loop.settings.model, loop.about, extra)
            self._best_weights = weights if improved else self._best_weights
            if due:
                self._write(weights)

    def _write(self, weights: bytes) -> None:
        for lines, heads in self._waiting:
            for line in lines:
                append_line(self._folder.metrics_file, line)
            append_line(self._folder.heads_file, heads)
        write_atomically(self._folder.last_weights, weights)
        if self._best_weights is not None:
            write_atomically(self._folder.best_weights, self._best_weights)
        self._waiting, self._best_weights = [], None
        run = {"name": self._folder.record().get("run"), "settings": plain(self._loop.settings)}
        best = {"best_epoch": self.best[0], "best_accuracy": self.best[1]}
        save_state(self._folder.state_file, {**self._loop.state(), **best, "seconds": self.seconds, "run": run})

    def _check_divergence(self, loss: float, complete: int) -> None:
        if abs(loss) < float("inf"):  # false for NaN
            return
        every, rate = self._loop.settings.train.checkpoint_every, self._loop.learning_rate
        last = complete // every * every
        kept = f"The weights of epoch {last} are in {self._folder.last_weights}." if last else "No weights were saved."
        got = f"{loss} at step {self._loop.step} (epoch {complete + 1}, learning rate {rate:g})"
        fix = f"Lower optim.learning_rate, raise schedule.warmup, or set optim.clip. {kept}"
        raise DivergedError(bad("loss", "must remain finite", got, fix))


def head_record(model: nn.Module, epoch: int) -> HeadsLine:
    """Create a line of `heads.jsonl` with all layers that have Gaussian heads, for the paper's Figure 3."""
    layers: list[LayerHeads] = []
    for path, module in model.named_modules():
        if isinstance(module, Encoding) and (heads := module.gaussians()) is not None:
            values, vectors = torch.linalg.eigh(heads.precision)
            covariance = vectors @ torch.diag_embed(1 / values.clamp(min=1 / WIDEST)) @ vectors.mT
            centres = heads.centres.detach().double().cpu().tolist()
            name = path.removesuffix(".encoding")
            layers.append({"name": name, "centres": centres, "covariance": covariance.tolist()})
    return {"epoch": epoch, "layers": layers}


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a training state atomically."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    write_atomically(path, sealed(buffer.getvalue()))


def sealed(content: bytes) -> bytes:
    """Prepend a line with the checksum to the content."""
    return _HEAD + hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def read_state(path: Path) -> dict[str, Any]:
    """Read a training state of tensors and plain values; raise `ValueError` if the checksum is wrong."""
    if not path.is_file():
        raise FileNotFoundError(bad("state", "must be an existing training state", f"no file {path}"))
    fix = "Restore the file, or start a new run in a different folder. The weights files are still valid."
    file = path.read_bytes()
    content = file.partition(b"\n")[2]
    if sealed(content) != file:
        got = "a damaged or truncated file" if file.startswith(_HEAD) else "a file without a checksum"
        raise ValueError(bad("state", "must match its checksum", got, fix, origin=str(path)))
    try:
        with warnings.catch_warnings():  # torch warns about pickles from other sources
            warnings.simplefilter("ignore", UserWarning)
            return dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
    except _FOREIGN as error:
        requirement, got = "must be a dictionary of tensors and plain values", "other content, which was not executed"
        raise ValueError(bad("state", requirement, got, fix, origin=str(path))) from error
