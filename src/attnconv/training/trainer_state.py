"""The trainer's own state on disk: written in one step, checked as a whole, read without executing anything.

attnconv state 1 sha256 HEX   a line with the checksum of all that follows
what torch.save wrote         a dictionary; under `run` it names its run and holds that run's settings
"""

import hashlib
import io
import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
from lightning.pytorch.plugins.io import CheckpointIO

from attnconv._util.atomic_write import write_atomically
from attnconv._util.errors import bad

_HEAD = b"attnconv state 1 sha256 "


@final
class AtomicIO(CheckpointIO):
    """How Lightning writes and reads ``state.ckpt``.

    A file is either the new state or the one before it, whatever happens during the save. Reading goes through torch's
    weights-only unpickler, which knows tensors and plain values and calls nothing.
    """

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Replace the file by a new state.

        Raises:
            OSError: if it cannot be written; the state before it is as it was.
        """
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        write_atomically(Path(path), sealed(buffer.getvalue()))

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = "cpu",  # always the CPU; Lightning moves tensors on from there
        weights_only: bool | None = None,  # always true
    ) -> dict[str, Any]:
        """Read a state. See ``read_state``."""
        return read_state(Path(path))

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a state."""
        Path(path).unlink(missing_ok=True)


def sealed(content: bytes) -> bytes:
    """Content behind a line with its checksum."""
    return _HEAD + hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def read_state(path: Path) -> dict[str, Any]:
    """The trainer's state, of tensors and plain values only.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if one bit of it is not as it was written, or it holds anything but tensors and plain values (none
            of which is executed).
    """
    if not path.is_file():
        raise FileNotFoundError(bad("state", "must be a file that a run wrote", f"nothing at {path}"))
    fix = "Restore the file, or start the run anew in another folder; its weights files can still be read."
    file = path.read_bytes()
    content = file.partition(b"\n")[2]
    if sealed(content) != file:
        got = "a damaged or truncated file" if file.startswith(_HEAD) else "a file without a checksum"
        raise ValueError(bad("state", "must match its checksum", got, fix, origin=str(path)))
    try:
        with warnings.catch_warnings():  # torch asks for bug reports about pickles that are not its own
            warnings.simplefilter("ignore", UserWarning)
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        got = "something else in it; none of it was executed"
        raise ValueError(bad("state", "must hold tensors and plain values only", got, fix, origin=str(path))) from error
    except (
        RuntimeError,
        EOFError,
        OSError,
        LookupError,
        AttributeError,
        TypeError,
        ValueError,
    ) as error:  # its unpickler
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(bad("state", "must be a whole file that torch wrote", first, fix, origin=str(path))) from error
    if not isinstance(state, Mapping):
        raise ValueError(bad("state", "must hold the trainer's state", type(state).__name__, fix, origin=str(path)))
    return dict(state)
