"""What a run leaves behind, and how it is read back. No torch is needed for any of it.

    settings.json     all settings, the run's name, and what it ran on: versions, commit, device, command
    metrics.jsonl     one line per epoch and split: step, epoch, split, loss, accuracy, lr, seconds
    heads.jsonl       centres and covariances of all heads, at the start (epoch 0) and after every epoch
    checkpoints/      last.safetensors, best.safetensors (weights), state.ckpt (what a resume needs), and
                      start.safetensors where the run did not begin with fresh parameters
    result.json       accuracy on the test set of the last epoch, of the epoch chosen on held-out images, and of the
                      weights that a pruned model began with (`start`)
    tensorboard/      the same curves for TensorBoard
    report/           figures and tables, written by ``attnconv report``
    .writer           while a process writes here: which one (see ``attnconv.training.run_lock``)

Epochs are counted by how many are complete: 1 is the end of the first one.
"""

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypedDict

from attnconv._util.atomic_write import PARTIAL, cannot_write, write_atomically
from attnconv._util.errors import bad
from attnconv._util.json_files import read_json
from attnconv.training.settings import RunSettings
from attnconv.training.settings_json import fits, from_plain, to_plain

FORMAT = 1
LOCK = ".writer"  # see `attnconv.training.run_lock`

# Patterns of what a run leaves, below its folder, and of what one leaves that is killed before its settings are there.
_OWN = (
    "settings.json",
    "metrics.jsonl",
    "heads.jsonl",
    "result.json",
    "checkpoints/last.safetensors",
    "checkpoints/best.safetensors",
    "checkpoints/start.safetensors",
    "checkpoints/state.ckpt",
    "tensorboard/events.out.tfevents.*",
    "report/index.html",
    "report/figures/figure-*.png",
    "report/figures/figure-*.svg",
)
_BEFORE = ("checkpoints/start.safetensors",)


class MetricsLine(TypedDict):
    """One line of ``metrics.jsonl``.

    ``lr`` is the learning rate of the epoch's last step, ``seconds`` the time spent in training so far.
    """

    step: int
    epoch: int
    split: str
    loss: float
    accuracy: float
    lr: float
    seconds: float


class LayerHeads(TypedDict):
    """Heads of one layer: its name, centres (heads, axes) and covariances (heads, axes, axes), in positions."""

    name: str
    centres: list[list[float]]
    covariance: list[list[list[float]]]


class HeadsLine(TypedDict):
    """One line of ``heads.jsonl``; a model without heads that have a centre has an empty list of layers."""

    epoch: int
    layers: list[LayerHeads]


@dataclass(frozen=True)
class RunFolder:
    """A run on disk.

    Attributes:
        path: the folder.
    """

    path: Path

    @property
    def settings_file(self) -> Path:
        return self.path / "settings.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def heads_file(self) -> Path:
        return self.path / "heads.jsonl"

    @property
    def result_file(self) -> Path:
        return self.path / "result.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def state_file(self) -> Path:
        """The trainer's own state after the last complete epoch."""
        return self.checkpoints / "state.ckpt"

    @property
    def last_weights(self) -> Path:
        """Weights after the last complete epoch."""
        return self.checkpoints / "last.safetensors"

    @property
    def best_weights(self) -> Path:
        """Weights of the epoch with the highest accuracy on held-out images; the latest of equals."""
        return self.checkpoints / "best.safetensors"

    @property
    def start_weights(self) -> Path:
        """Weights that the run begins with, if it does not begin with fresh parameters."""
        return self.checkpoints / "start.safetensors"

    @property
    def lock_file(self) -> Path:
        """What the one process that writes here holds."""
        return self.path / LOCK

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def report(self) -> Path:
        return self.path / "report"

    def exists(self) -> bool:
        """Whether a run has been started here."""
        return self.settings_file.is_file()

    def record(self) -> dict[str, Any]:
        """All of ``settings.json``: the settings and what they ran on.

        Raises:
            ValueError: if the folder holds no run, or the file is not legal.
        """
        if not self.exists():
            fix = "Name the folder that `attnconv train` wrote, such as runs/quadratic-digits."
            raise ValueError(bad("run", "must be a folder that holds settings.json", str(self.path), fix))
        try:
            record = read_json(self.settings_file.read_bytes())
        except ValueError as error:
            raise ValueError(bad(str(self.settings_file), "must be JSON", str(error))) from error
        version = record.get("format") if isinstance(record, dict) else None
        if version != FORMAT:
            fix = "Read it with the version of attnconv that wrote it."
            raise ValueError(bad(f"{self.settings_file}: format", f"must be {FORMAT}", repr(version), fix))
        return dict(record)

    def settings(self) -> RunSettings:
        """The run's settings.

        Raises:
            ValueError: if the folder holds no run, or anything in its settings is not legal.
        """
        record = self.record()
        values = record.get("settings")
        if not isinstance(values, Mapping):
            raise ValueError(bad(f"{self.settings_file}: settings", "must be groups of settings", repr(values)))
        return from_plain(values, origin=f"from {self.settings_file}")

    def begin(self, settings: RunSettings, environment: Mapping[str, Any]) -> None:
        """Make the folder and write ``settings.json``.

        Args:
            settings: of the run.
            environment: plain values about what it runs on; see ``attnconv.training.environment``.
        """
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        # The name ties the state to its run: another run of equal settings may have begun with other weights.
        values = {"format": FORMAT, "run": secrets.token_hex(8), "settings": to_plain(settings)}
        write_json(self.settings_file, {**values, **environment})

    def metrics(self) -> list[MetricsLine]:
        """All lines of ``metrics.jsonl``, in the order written; empty before the first epoch is complete."""
        return list(_lines(self.metrics_file, MetricsLine))

    def heads(self) -> list[HeadsLine]:
        """All lines of ``heads.jsonl``: epoch 0, 1, ..., as far as the run has come."""
        return list(_lines(self.heads_file, HeadsLine))

    def centres_history(self, layer: str) -> list[tuple[int, LayerHeads]]:
        """The heads of one layer over the epochs.

        Raises:
            ValueError: if the run has recorded no layer of that name.
        """
        history = [
            (line["epoch"], heads) for line in self.heads() for heads in line["layers"] if heads["name"] == layer
        ]
        if not history:
            known = dict.fromkeys(heads["name"] for line in self.heads() for heads in line["layers"])
            requirement = f"must be one of {', '.join(known) or 'no layers, as none has heads with a centre'}"
            raise ValueError(bad("layer", requirement, repr(layer)))
        return history

    def result(self) -> dict[str, Any] | None:
        """What ``result.json`` holds; None until the run is complete."""
        if not self.result_file.is_file():
            return None
        try:
            result = read_json(self.result_file.read_bytes())
        except ValueError as error:
            raise ValueError(bad(str(self.result_file), "must be JSON", str(error))) from error
        if not isinstance(result, dict):
            raise ValueError(bad(str(self.result_file), "must be a map", type(result).__name__))
        return result

    def rewind(self, epoch: int) -> None:
        """Drop what was recorded after an epoch: lines of later epochs, a torn last line, a result.

        Args:
            epoch: complete epochs to keep; -1 keeps nothing.
        """
        for file, kind in ((self.metrics_file, MetricsLine), (self.heads_file, HeadsLine)):
            if file.is_file():
                kept = [
                    json.dumps(line, allow_nan=False) + "\n" for line in _lines(file, kind) if line["epoch"] <= epoch
                ]
                write_text(file, "".join(kept))
        self.result_file.unlink(missing_ok=True)
        for litter in self.path.rglob(PARTIAL):  # of saves that a kill cut short
            litter.unlink(missing_ok=True)

    @staticmethod
    def holding(path: Path) -> "RunFolder | None":
        """The run that a path names: its folder, or a file in it or in its checkpoints; None if there is none."""
        folders = (RunFolder(folder) for folder in (path, path.parent, path.parent.parent))
        return next((folder for folder in folders if path.exists() and folder.exists()), None)

    def is_empty(self) -> bool:
        """Whether the folder is missing, or holds nothing but the lock of its writer."""
        return not self.path.exists() or all(path == self.lock_file for path in self.path.iterdir())

    def foreign_files(self) -> list[Path]:
        """Files in the folder that no run leaves there; without settings, none that was killed before it had them."""
        own = (LOCK, *(_OWN if self.exists() else _BEFORE))
        return sorted(
            path
            for path in self.path.rglob("*")
            if not (path.is_dir() and not path.is_symlink())
            and not path.match(PARTIAL)
            and not any(_matches(path.relative_to(self.path), pattern) for pattern in own)
        )

    def clear(self) -> None:
        """Remove the run's files, and folders that are empty then. Its lock stays."""
        foreign = {self.lock_file, *self.foreign_files()}
        for path in sorted(self.path.rglob("*"), reverse=True):  # what is in a folder before the folder
            if path.is_dir() and not path.is_symlink():
                with suppress(OSError):  # it holds other files
                    path.rmdir()
            elif path not in foreign:
                path.unlink()


def _matches(path: PurePath, pattern: str) -> bool:
    """Whether a path is as a pattern says, all of it."""
    return len(path.parts) == pattern.count("/") + 1 and path.match(pattern)


def append_line(file: Path, line: Mapping[str, Any]) -> None:
    """Add one JSON line to a file.

    Raises:
        OSError: if it cannot be written, with the file's name; the lines before it are as they were.
    """
    text = json.dumps(line, allow_nan=False) + "\n"
    try:
        with file.open("a", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise cannot_write(file, len(text), error, "Its earlier lines are unchanged.") from error


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Replace a file by indented JSON in one step."""
    write_text(file, json.dumps(values, indent=2, allow_nan=False) + "\n")


def write_text(file: Path, text: str) -> None:
    """Replace a text file in one step."""
    write_atomically(file, text.encode())


def _lines(file: Path, kind: type) -> Iterator[Any]:
    """The complete lines of a file, each of the kind; a kill can leave a torn one at the end, and only there."""
    if not file.is_file():
        return
    content = file.read_bytes()
    complete = content[: content.rfind(b"\n") + 1].splitlines()
    fix = "Remove the line, or restore the file."
    for number, line in enumerate(complete, start=1):
        where, got = f"{file}, line {number}", repr(line[:60].decode("utf-8", "replace"))
        try:
            values = read_json(line)
        except ValueError as error:
            raise ValueError(bad(where, "must be JSON", got, fix)) from error
        if not fits(values, kind):
            raise ValueError(bad(where, f"must be a map of {', '.join(kind.__annotations__)}", got, fix))
        yield values
