"""What is kept of a run while it trains: a Lightning callback that writes the run folder.

After every epoch, or every few, in this order: lines of metrics and heads, weights, and last the trainer's state. The
state is what makes an epoch count. A kill before it is written leaves the one before; whatever was already written of
lost epochs is dropped when the run is resumed, and they are computed again, with the same bits.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from attnconv._util.atomic_write import write_atomically
from attnconv._util.errors import bad
from attnconv.models.checkpoint import weights_bytes
from attnconv.training.evaluation import Score
from attnconv.training.head_records import head_record
from attnconv.training.lightning_module import TrainingModule
from attnconv.training.progress_bars import Watcher
from attnconv.training.run_folder import HeadsLine, MetricsLine, RunFolder, append_line
from attnconv.training.settings_json import to_plain

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class DivergedError(ArithmeticError):
    """The loss is no longer a finite number; the run has stopped and its last good checkpoint is kept."""


@final
class Recorder(Checkpoint):
    """Writes metrics, heads, weights and state; stops a run that diverges.

    Args:
        folder: of the run; only the first process writes to it.
        classes: names of the classes, for the weights files.
        watcher: what a person sees.

    Attributes:
        best: the epoch with the highest accuracy on held-out images so far, the latest of equals (its learning rate was
            lower), and that accuracy; epoch 0 is none yet.
        seconds: spent in training by this run, over all of its resumptions.
    """

    def __init__(self, folder: RunFolder, classes: tuple[str, ...], watcher: Watcher) -> None:
        super().__init__()
        self.folder = folder
        self.classes = classes
        self.watcher = watcher
        self.best: tuple[int, float] = (0, -1.0)
        self.seconds = 0.0
        self._clock = 0.0
        self._board: "SummaryWriter | None" = None
        self._waiting: list[tuple[list[MetricsLine], HeadsLine]] = []
        self._best_weights: bytes | None = None

    def state_dict(self) -> dict[str, Any]:
        """What the trainer's state keeps of this callback, in plain values."""
        return {"best_epoch": self.best[0], "best_accuracy": self.best[1], "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = (int(state_dict["best_epoch"]), float(state_dict["best_accuracy"]))
        self.seconds = float(state_dict["seconds"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = _ours(pl_module)
        self._clock = time.monotonic()
        if not trainer.is_global_zero:
            return
        self.watcher.begin(trainer.current_epoch)
        if trainer.current_epoch == 0:
            append_line(self.folder.heads_file, head_record(module.model, 0))
        if module.settings.train.tensorboard:
            from torch.utils.tensorboard.writer import SummaryWriter  # takes a second: only where it is used

            with self._curves_may_fail():
                self._board = SummaryWriter(str(self.folder.tensorboard), purge_step=trainer.global_step + 1)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module = _ours(pl_module)
        train = module.settings.train
        if (batch_idx + 1) % train.accumulate:
            return
        if trainer.is_global_zero:
            self.watcher.step(trainer.global_step, trainer.current_epoch + 1)
        if trainer.global_step % train.log_every == 0:
            point = module.take("window")
            self._refuse_divergence(point, trainer, module)
            self._draw(
                {"train/loss of steps": point.loss, "learning rate": _rate(trainer, module)}, trainer.global_step
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = _ours(pl_module)
        scores = {split: module.take(split) for split in ("train", *module.splits)}
        self._refuse_divergence(scores["train"], trainer, module)
        now = time.monotonic()
        self.seconds += now - self._clock
        self._clock = now
        epoch = trainer.current_epoch + 1
        improved = "validation" in scores and scores["validation"].accuracy >= self.best[1]
        if improved:
            self.best = (epoch, scores["validation"].accuracy)
        due = _due(epoch, module)
        if trainer.is_global_zero:
            self._note(module, self._lines(scores, trainer, module, epoch), epoch)
            if improved or due:
                weights = self._weights(module, scores, epoch)
                self._best_weights = weights if improved else self._best_weights
                if due:
                    self._write(weights)
        if due:
            trainer.save_checkpoint(self.folder.state_file)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()
        if isinstance(exception, SystemExit) and trainer.is_global_zero:  # SIGTERM; Ctrl-C says it as an exception
            self.watcher.say(stopped(self.folder))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Tie the trainer's state to its run."""
        if trainer.is_global_zero:
            settings = to_plain(_ours(pl_module).settings)
            checkpoint["run"] = {"name": self.folder.record().get("run"), "settings": settings}

    def _lines(
        self, scores: dict[str, Score], trainer: Trainer, module: TrainingModule, epoch: int
    ) -> list[MetricsLine]:
        rate = _rate(trainer, module)
        return [
            {
                "step": trainer.global_step,
                "epoch": epoch,
                "split": split,
                "loss": result.loss,
                "accuracy": result.accuracy,
                "lr": rate,
                "seconds": round(self.seconds, 3),
            }
            for split, result in scores.items()
        ]

    def _note(self, module: TrainingModule, lines: list[MetricsLine], epoch: int) -> None:
        """An epoch's lines, for the next time that something is written; the curves are shown at once."""
        self._waiting.append((lines, head_record(module.model, epoch)))
        for line in lines:
            values = {f"{line['split']}/{name}": line[name] for name in ("loss", "accuracy")}
            self._draw(values, line["step"], flush=True)
        self.watcher.epoch(lines)

    def _weights(self, module: TrainingModule, scores: dict[str, Score], epoch: int) -> bytes:
        accuracy = {split: result.accuracy for split, result in scores.items()}
        extra = {"preset": module.settings.preset, "epoch": epoch, "accuracy": accuracy}
        return weights_bytes(
            module.model,
            module.settings.model,
            classes=self.classes,
            mean=module.mean,
            std=module.std,
            extra=extra,
        )

    def _write(self, weights: bytes) -> None:
        """All that was noted since the last time, the weights of now, and the best ones where they are new."""
        for lines, heads in self._waiting:
            for line in lines:
                append_line(self.folder.metrics_file, line)
            append_line(self.folder.heads_file, heads)
        write_atomically(self.folder.last_weights, weights)
        if self._best_weights is not None:
            write_atomically(self.folder.best_weights, self._best_weights)
        self._waiting, self._best_weights = [], None

    def _refuse_divergence(self, point: Score, trainer: Trainer, module: TrainingModule) -> None:
        if abs(point.loss) < float("inf"):  # false for NaN
            return
        epoch, every = trainer.current_epoch, module.settings.train.checkpoint_every
        last = epoch // every * every
        kept = f"The weights of epoch {last} are kept in {self.folder.last_weights}." if last else "None were kept."
        got = (
            f"{point.loss} at step {trainer.global_step} (epoch {epoch + 1}, learning rate {_rate(trainer, module):g})"
        )
        fix = f"Lower --optim.learning-rate, raise --schedule.warmup, or set --optim.clip. {kept}"
        raise DivergedError(bad("loss", "must stay a finite number", got, fix))

    def _draw(self, values: Mapping[str, float], step: int, *, flush: bool = False) -> None:
        """Points of TensorBoard's curves, where there are any."""
        if self._board is None:
            return
        with self._curves_may_fail():
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
            if flush:
                self._board.flush()

    @contextmanager
    def _curves_may_fail(self) -> Iterator[None]:
        """The same numbers are in `metrics.jsonl`: where the curves cannot be written, the run goes on without them."""
        try:
            yield
        except OSError as error:
            self._board = None
            text = f"TensorBoard: no curves in {self.folder.tensorboard} from now on ({error.strerror or error})."
            self.watcher.say(text)

    def _close(self) -> None:
        self.watcher.end()
        if self._board is not None:
            with self._curves_may_fail():
                self._board.close()
            self._board = None


def stopped(folder: RunFolder) -> str:
    """What is said when a training ends before its time."""
    return f"Stopped. The last complete epoch is kept in {folder.path}; --resume continues."


def _rate(trainer: Trainer, module: TrainingModule) -> float:
    """The learning rate of the last optimiser step."""
    return module.settings.optim.learning_rate * module.rate_factor(max(0, trainer.global_step - 1))


def _due(epoch: int, module: TrainingModule) -> bool:
    """Whether something is written after an epoch, counted from 1."""
    train = module.settings.train
    return epoch % train.checkpoint_every == 0 or epoch == train.epochs


def _ours(module: LightningModule) -> TrainingModule:
    assert isinstance(module, TrainingModule)  # fit builds both
    return module
