"""Files of a run folder. This module does not import torch.

    settings.json     all settings, the run's identifier, a checksum of its images, and its environment: versions,
                      commit, device, command
    metrics.jsonl     one line per epoch and split: step, epoch, split, loss, accuracy, lr, seconds
    heads.jsonl       centres and covariances of all heads, initially (epoch 0) and after every epoch
    checkpoints/      last.safetensors, best.safetensors (weights of the epoch with the highest validation accuracy, the
                      latest in case of a tie), state.ckpt (the training state, for resuming), and start.safetensors
                      (the initial weights, if they were given)
    result.json       metrics of the last epoch, of the epoch with the highest validation accuracy (`best`), and of
                      given initial weights (`start`)
    report/           figures and tables, written by `attnconv report`
    .writer           lock and identifier of the process that writes to the folder; it remains if the process is killed

Epochs are numbers of completed epochs: epoch 1 is the state after the first epoch.
"""

import csv
import io
import json
import os
import platform
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypedDict, final

import msgspec

from attnconv._util.atomic_write import PARTIAL, cannot_write, write_atomically
from attnconv._util.errors import bad
from attnconv._util.file_lock import locked
from attnconv._util.processes import is_first_process
from attnconv._util.settings import plain, read
from attnconv.training.settings import RunSettings

FORMAT = 1

_DRAWN = ("report/index.html", "report/figures/figure-*.png", "report/figures/figure-*.svg")  # files of a report


class MetricsLine(TypedDict):
    """One line of `metrics.jsonl`: `lr` is the last learning rate, `seconds` the training time so far."""

    step: int
    epoch: int
    split: str
    loss: float
    accuracy: float
    lr: float
    seconds: float


class LayerHeads(TypedDict):
    """Heads of one layer: name, centres (heads, axes) in positions, covariances (heads, axes, axes) in positions^2."""

    name: str
    centres: list[list[float]]
    covariance: list[list[list[float]]]


class HeadsLine(TypedDict):
    """One line of `heads.jsonl`. The list of layers is empty if no heads have centres."""

    epoch: int
    layers: list[LayerHeads]


@final
class RunFolder:
    """A run folder, with the paths of its files."""

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        self.settings_file = path / "settings.json"
        self.metrics_file = path / "metrics.jsonl"
        self.heads_file = path / "heads.jsonl"
        self.result_file = path / "result.json"
        self.checkpoints = path / "checkpoints"
        self.state_file = self.checkpoints / "state.ckpt"
        self.last_weights = self.checkpoints / "last.safetensors"
        self.best_weights = self.checkpoints / "best.safetensors"
        self.start_weights = self.checkpoints / "start.safetensors"
        self.report = path / "report"
        self.lock_file = path / ".writer"

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    def exists(self) -> bool:
        """Return whether the folder contains a run."""
        return self.settings_file.is_file()

    def record(self) -> dict[str, Any]:
        """Read `settings.json`; raise `ValueError` if the folder contains no run or the file is invalid."""
        if not self.exists():
            fix = "Pass a run folder written by `attnconv train`, such as runs/quadratic-digits."
            raise ValueError(bad("run", "must be a folder that contains settings.json", str(self.path), fix))
        record = _read_map(self.settings_file)
        if record.get("format") != FORMAT:
            fix = "Use the version of attnconv that wrote the file."
            raise ValueError(bad(f"{self.settings_file}: format", f"must be {FORMAT}", repr(record.get("format")), fix))
        return record

    def settings(self) -> RunSettings:
        """Read the run's settings; raise `ValueError` if the folder contains no run or the settings are invalid."""
        values = self.record().get("settings")
        if not isinstance(values, Mapping):
            raise ValueError(bad(f"{self.settings_file}: settings", "must map group names to settings", repr(values)))
        settings: RunSettings = read(RunSettings, values, origin=f"from {self.settings_file}")
        return settings

    def begin(self, settings: RunSettings, environment: Mapping[str, Any]) -> None:
        """Create the folder and write `settings.json` with the settings and the `environment` of the run."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        # The identifier links the state to its run: runs with equal settings may have different initial weights.
        values = {"format": FORMAT, "run": secrets.token_hex(8), "settings": plain(settings)}
        write_json(self.settings_file, {**values, **environment})

    def metrics(self) -> list[MetricsLine]:
        """Read `metrics.jsonl`, which is empty until the first epoch is complete."""
        return list(_lines(self.metrics_file, MetricsLine))

    def heads(self) -> list[HeadsLine]:
        """Read `heads.jsonl`: epochs 0, 1, ..., up to the last complete epoch."""
        return list(_lines(self.heads_file, HeadsLine))

    def result(self) -> dict[str, Any] | None:
        """Read `result.json`; return None until the run is complete."""
        return _read_map(self.result_file) if self.result_file.is_file() else None

    def rewind(self, epoch: int) -> None:
        """Remove the records after an epoch (all if it is -1), an incomplete last line, and the result."""
        for file, kind in ((self.metrics_file, MetricsLine), (self.heads_file, HeadsLine)):
            if file.is_file():
                kept = (line for line in _lines(file, kind) if line["epoch"] <= epoch)
                write_text(file, "".join(map(_text, kept)))
        self.result_file.unlink(missing_ok=True)
        for leftover in self.path.rglob(PARTIAL):
            leftover.unlink(missing_ok=True)

    @staticmethod
    def holding(path: Path) -> "RunFolder | None":
        """Return the run that contains a path: its folder, a file in it, or a checkpoint; None if there is no run."""
        path = path.resolve()
        folders = (RunFolder(folder) for folder in (path, path.parent, path.parent.parent))
        return next((folder for folder in folders if path.exists() and folder.exists()), None)

    def is_empty(self) -> bool:
        """Return whether the folder is missing, or contains only the lock file."""
        return not self.path.exists() or all(path == self.lock_file for path in self.path.iterdir())

    def foreign_files(self) -> list[Path]:
        """List files that do not belong to the run or, if settings.json does not exist yet, to the start of a run."""
        own = {self.lock_file, self.start_weights, *self.path.rglob(PARTIAL)}
        if self.exists():
            own |= set(vars(self).values()) - {self.checkpoints, self.report}
            own |= {path for pattern in _DRAWN for path in self.path.glob(pattern)}
        files = (path for path in self.path.rglob("*") if path.is_symlink() or not path.is_dir())
        return sorted(path for path in files if path not in own)


def choose_epochs(epochs: Sequence[int], count: int) -> list[int]:
    """Select at most `count` epochs (if 1, the last) in geometric steps, since heads move most at the start."""
    if len(epochs) <= count:
        return list(epochs)
    places = [len(epochs) - 1] if count == 1 else [0]
    for rank in range(1, count):
        places.append(max(places[-1] + 1, round(len(epochs) ** (rank / (count - 1)) - 1)))
    return [epochs[place] for place in places]


@contextmanager
def writing(folder: RunFolder) -> Iterator[None]:
    """Lock a run folder for writing; create it if it does not exist, and remove it on exit if it is empty.

    Raises `ValueError` if another process is writing to the folder. With torchrun, only the first process locks it.
    Readers need no lock, since files are replaced atomically.
    """
    if not is_first_process():
        yield
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(locked(folder.lock_file))
        except BlockingIOError:
            fix = "Wait until it ends, or pass a different folder."
            got = f"{folder.path}, to which {_holder(folder.lock_file)} writes"
            raise ValueError(bad("run_dir", "must be a folder that no other process writes to", got, fix)) from None
        except FileExistsError:
            raise ValueError(bad("run_dir", "must be a folder", f"the file {folder.path}")) from None
        with suppress(OSError):  # if the disk is full, the lock is valid without the identifier
            file.truncate(0)
            file.write(f"{os.getpid()} {platform.node()}\n".encode())
        try:
            yield
        finally:
            if not file.closed:  # it is closed in a forked process
                with suppress(OSError):  # Windows cannot remove an open file
                    folder.lock_file.unlink()
                with suppress(OSError):
                    folder.path.rmdir()


def _holder(file: Path) -> str:
    """Describe the process that owns the lock, as far as the file identifies it."""
    try:
        process, _, machine = file.read_text(encoding="utf-8").strip().partition(" ")
    except (OSError, ValueError):
        process = machine = ""
    if not process.isdigit():
        return "another process"
    return f"process {process}" + ("" if machine == platform.node() else f" on {machine}")


def append_line(file: Path, line: Mapping[str, Any]) -> None:
    """Append one JSON line to a file. If this raises `OSError`, the earlier lines are unchanged."""
    text = _text(line)
    try:
        with file.open("a", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise cannot_write(file, len(text), error, "Its earlier lines are unchanged.") from error


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Replace a file with indented JSON atomically."""
    write_text(file, json.dumps(values, indent=2, allow_nan=False) + "\n")


def write_text(file: Path, text: str) -> None:
    """Replace a text file atomically."""
    write_atomically(file, text.encode())


def write_csv(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace a CSV file atomically; the columns are all names in the rows."""
    table = io.StringIO()
    writer = csv.DictWriter(table, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(file, table.getvalue())


def _text(line: Mapping[str, Any]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"


def _read_map(file: Path) -> dict[str, Any]:
    """Read an untrusted JSON file that must contain an object."""
    try:
        values = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(bad(str(file), "must be JSON", str(error))) from error
    if not isinstance(values, dict):
        raise ValueError(bad(str(file), "must be a JSON object", type(values).__name__))
    return values


def _lines(file: Path, kind: type) -> Iterator[Any]:
    """Yield the complete lines of a file; only the last line can be incomplete, if a process was killed."""
    content = file.read_bytes() if file.is_file() else b""
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            yield msgspec.json.decode(line, type=kind)
        except (ValueError, RecursionError) as error:
            where, got = f"{file}, line {number}", repr(line[:60].decode("utf-8", "replace"))
            requirement = f"must be a JSON object with the keys {', '.join(kind.__annotations__)}"
            raise ValueError(bad(where, requirement, got, "Remove the line, or restore the file.")) from error
