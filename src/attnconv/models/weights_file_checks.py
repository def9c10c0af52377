"""Is this file what it says? The looks at a weights file that need no tensor, before anything is loaded.

A safetensors file is 8 bytes (the length of the header, little-endian), a JSON header (name -> dtype, shape and place
of each tensor, plus `__metadata__`, a map of strings), and the tensors' bytes. Nothing in it can be executed. A pickle,
which is what `torch.save` writes, can: it is refused unread, with the way to convert it.
"""

import json
from pathlib import Path
from typing import Any, NoReturn

from attnconv._util.errors import bad
from attnconv._util.json_files import read_json

MAX_HEADER = 100_000_000  # bytes; the format's own limit
PICKLE_SUFFIXES = (".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".bin", ".th", ".tar")


def read_metadata(path: Path) -> dict[str, str]:
    """The header's map of strings, after the whole file has been held against its header.

    Args:
        path: a file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is a pickle (of which nothing is unpickled), no safetensors file, or shorter or longer than
            its header says.
    """
    if not path.is_file():
        got = f"the folder {path}" if path.is_dir() else f"nothing at {path}"
        raise FileNotFoundError(bad("checkpoint", "must be a file", got))
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        _refuse_pickle(path, start)
        length = int.from_bytes(start, "little")
        if size < 8:
            _refuse(path, "must be a whole safetensors file", f"{size} bytes, less than the 8 of its first number")
        if length > MAX_HEADER or file.read(1) not in (b"{", b""):
            _refuse(path, "must be a safetensors file", f"a file that begins with {start!r}", _fix(path))
        if size < 8 + length:
            _refuse_truncated(path, size, 8 + length)
        file.seek(8)
        header = _parse(path, file.read(length))
    return _checked_metadata(path, header, size=size, data_start=8 + length)


def in_order(content: bytes) -> bytes:
    """A safetensors file with its map of strings in alphabetical order: equal contents are then equal bytes.

    Args:
        content: what `safetensors.torch.save` gives, whose map is in another order each time.
    """
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = read_json(text)
    except ValueError as error:  # wrong JSON, or bytes that are not UTF-8
        _refuse(path, "must be a safetensors file", f"a header that is no JSON ({error})")
    if not isinstance(header, dict):
        _refuse(path, "must be a safetensors file", f"a header that is a {type(header).__name__}, not a map")
    return header


def _checked_metadata(path: Path, header: dict[str, Any], *, size: int, data_start: int) -> dict[str, str]:
    metadata = header.pop("__metadata__", {})
    try:
        expected = data_start + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (TypeError, KeyError, IndexError, ValueError):
        _refuse(path, "must be a safetensors file", "a header whose entries do not say where their tensors lie")
    if size < expected:
        _refuse_truncated(path, size, expected)
    if size > expected:
        _refuse(path, f"must hold the {expected} bytes that its header lists", f"{size} bytes")
    if not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
        _refuse(path, "must be a safetensors file", "a header whose __metadata__ is no map of strings")
    return metadata


def _refuse_pickle(path: Path, start: bytes) -> None:
    is_zip = start.startswith(b"PK\x03\x04")  # torch.save since 1.6 zips a pickle with the tensors' bytes
    is_pickle = len(start) > 1 and start[0] == 0x80 and start[1] <= 5  # opcode PROTO and its version
    if not is_zip and not is_pickle and path.suffix.lower() not in PICKLE_SUFFIXES:
        return
    if is_zip:
        kind = "a zip archive, as torch.save writes it around a pickle"
    elif is_pickle:
        kind = "a pickle"
    else:
        kind = f"a file named *{path.suffix}"
    requirement = "must be a safetensors file, for a pickle can execute anything"
    _refuse(path, requirement, f"{kind}; none of it was read", _fix(path))


def _fix(path: Path) -> str:
    beside = sorted(other for other in path.parent.glob("*.safetensors") if other != path)
    if beside:
        return f"Beside it lies {beside[0]}; name that, or the run folder."
    return (
        "Convert a torch.save file whose layers are those of a preset with "
        f"`model.load_state_dict(torch.load({path.name!r}, weights_only=True))` and "
        "`attnconv.models.save_weights('weights.safetensors', model, settings)`."
    )


def _refuse_truncated(path: Path, size: int, expected: int) -> NoReturn:
    fix = "It was cut off while it was copied or downloaded; fetch it again, or use another checkpoint of the run."
    _refuse(path, f"must hold the {expected} bytes that its header promises", f"{size} bytes", fix)


def _refuse(path: Path, requirement: str, got: str, fix: str = "") -> NoReturn:
    raise ValueError(bad("checkpoint", requirement, got, fix, origin=str(path)))
