"""Weights files: tensors and a description of them in one safetensors file, which cannot execute anything.

The header's map of strings describes the tensors:

    format            what the file is: "attnconv" (a checkpoint) or "attnconv-recast" (a recast network)
    format_version    "1"
    attnconv_version  the version that wrote it
    everything else   JSON
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

import attnconv
from attnconv._util.atomic_write import write_atomically
from attnconv._util.errors import bad

FORMAT_VERSION = "1"
PICKLE_SUFFIXES = (".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".bin", ".th", ".tar")
_PICKLE_STARTS = (b"PK\x03\x04", *(bytes([0x80, version]) for version in range(6)))  # a zip of one, or its protocol


@dataclass(frozen=True)
class WeightsFile:
    """The contents of a weights file."""

    source: str
    metadata: Mapping[str, str]
    tensors: dict[str, Tensor]

    def value(self, name: str, *kinds: type) -> Any:
        """Decode an entry of the header, which must be JSON of one of these types."""
        text = self.metadata.get(name, "")
        with contextlib.suppress(ValueError, RecursionError):
            if type(value := json.loads(text)) in kinds:
                return value
        requirement = f"must hold JSON of type {' or '.join(kind.__name__ for kind in kinds)} under {name!r}"
        raise ValueError(bad("checkpoint", requirement, repr(text), origin=self.source))


def read_weights(path: Path) -> WeightsFile:
    """Read a safetensors file, with tensors on the CPU; pickles are rejected unread, with the way to convert them."""
    if not path.is_file():
        got = f"the folder {path}" if path.is_dir() else f"nothing at {path}"
        raise FileNotFoundError(bad("checkpoint", "must be a file", got))
    try:
        with safetensors.safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a dict
            return WeightsFile(str(path), file.metadata() or {}, tensors)
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(_refusal(path, str(error))) from error


def _refusal(path: Path, error: str) -> str:
    """Explain why a file is not a weights file, and what to do."""
    with path.open("rb") as file:
        is_pickle = file.read(4).startswith(_PICKLE_STARTS) or path.suffix.lower() in PICKLE_SUFFIXES
    if not is_pickle:
        fix = "If it was cut off while it was copied or downloaded, fetch it again."
        return bad("checkpoint", "must be a whole safetensors file", error, fix, origin=str(path))
    fix = (
        "Convert a torch.save file whose layers are those of a preset with "
        f"`model.load_state_dict(torch.load({path.name!r}, weights_only=True))` and "
        "`attnconv.models.save_weights('weights.safetensors', model, settings)`."
    )
    if beside := sorted(other for other in path.parent.glob("*.safetensors") if other != path):
        fix = f"Next to it is {beside[0]}; name that, or the run folder."
    requirement = "must be a safetensors file, for a pickle can execute anything"
    return bad("checkpoint", requirement, "a pickle, which was not read", fix, origin=str(path))


def check_version(file: WeightsFile) -> None:
    """Reject files of another version of the format."""
    version, writer = file.metadata.get("format_version"), file.metadata.get("attnconv_version", "unknown")
    if version != FORMAT_VERSION:
        fix = f"It was written by attnconv {writer}; read it with that version."
        requirement = f"must have format version {FORMAT_VERSION}"
        raise ValueError(bad("checkpoint", requirement, repr(version), fix, origin=file.source))


def weights_content(tensors: Mapping[str, Tensor], form: str, description: Mapping[str, Any]) -> bytes:
    """The bytes of a weights file with JSON values in its header; equal contents are equal bytes."""
    metadata = {name: json.dumps(value) for name, value in description.items()}
    metadata |= {"format": form, "format_version": FORMAT_VERSION, "attnconv_version": attnconv.__version__}
    content = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
    # safetensors orders the map of strings differently in each process: it is sorted here.
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def write_weights(path: str | Path, content: bytes) -> None:
    """Write a weights file atomically; missing folders are created."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
