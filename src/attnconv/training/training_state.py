"""The training state on disk: replaced in one step, checked as a whole, read without executing anything.

attnconv state 1 sha256 HEX   a line with the checksum of all that follows
what torch.save wrote         a dictionary; under `run` it names its run and holds that run's settings
"""

import hashlib
import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from attnconv._util.atomic_write import write_atomically
from attnconv._util.errors import bad

_HEAD = b"attnconv state 1 sha256 "
_TORN = (RuntimeError, EOFError, OSError, LookupError, AttributeError, TypeError, ValueError)  # of torch's unpickler


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Replace a state by a new one in one step."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    write_atomically(path, sealed(buffer.getvalue()))


def sealed(content: bytes) -> bytes:
    """Content behind a line with its checksum."""
    return _HEAD + hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def read_state(path: Path) -> dict[str, Any]:
    """Read a state of tensors and plain values only; raises `ValueError` if a bit of it is not as it was written."""
    if not path.is_file():
        raise FileNotFoundError(bad("state", "must be a file that a run wrote", f"nothing at {path}"))
    file = path.read_bytes()
    content = file.partition(b"\n")[2]
    if sealed(content) != file:
        got = "a damaged or truncated file" if file.startswith(_HEAD) else "a file without a checksum"
        raise _refused("must match its checksum", got, path)
    try:
        with warnings.catch_warnings():  # torch asks for bug reports about pickles that are not its own
            warnings.simplefilter("ignore", UserWarning)
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        got = "something else in it; none of it was executed"
        raise _refused("must hold tensors and plain values only", got, path) from error
    except _TORN as error:
        got = str(error).strip().partition("\n")[0] or type(error).__name__
        raise _refused("must be a whole file that torch wrote", got, path) from error
    if not isinstance(state, Mapping):
        raise _refused("must hold a training state", type(state).__name__, path)
    return dict(state)


def _refused(requirement: str, got: str, path: Path) -> ValueError:
    fix = "Restore the file, or start the run anew in another folder; its weights files can still be read."
    return ValueError(bad("state", requirement, got, fix, origin=str(path)))
