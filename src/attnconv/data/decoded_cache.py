"""Decoded images on disk, so that a data set is unpacked once.

One safetensors file per entry in the user's cache folder, named by a key of everything that its content depends on (the
checksums of the sources, how they were decoded, the format's version). The file carries the checksum of its tensors; an
entry that is truncated, damaged or of another key is decoded again and replaced. Writing is atomic, so processes that
start together do not disturb each other, and a full disk costs time, never data.
"""

import contextlib
import hashlib
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from attnconv._util.cache_folder import user_cache

_LOG = logging.getLogger(__name__)
_FORMAT = "attnconv-images-1"

Tensors = dict[str, Tensor]


def cache_folder(setting: str) -> Path | None:
    """The folder that ``--data.cache`` means: None for "off", the user's cache folder for "auto", else the path.

    The user's cache folder is ``$XDG_CACHE_HOME/attnconv``, or ``~/.cache/attnconv``.
    """
    if setting == "off":
        return None
    return user_cache() if setting == "auto" else Path(setting).expanduser()


def key_of(*parts: str) -> str:
    """A short name for everything that an entry depends on, names of files included, which need not be UTF-8."""
    return hashlib.sha256("\0".join((_FORMAT, *parts)).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """Checksum of a file's content in hexadecimal digits, read in pieces (2 to 3 GB/s)."""
    with path.open("rb") as file:
        return stream_digest(file, algorithm)


def stream_digest(file: BinaryIO, algorithm: str = "sha256") -> str:
    """Checksum of an open file, from its beginning."""
    # usedforsecurity=False: md5 only recognises a known file here, and some systems forbid it otherwise.
    digest = hashlib.new(algorithm, usedforsecurity=False)
    file.seek(0)
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


def cached(name: str, key: str, decode: Callable[[], Tensors], *, folder: Path | None) -> Tensors:
    """The tensors of ``decode()``, from the cache if it has them, else decoded and kept there.

    Args:
        name: what they are, the beginning of the file's name.
        key: what they depend on, from `key_of`.
        decode: makes the tensors; called at most once.
        folder: where the cache is; None decodes every time. A folder that cannot be written is passed over.

    Returns:
        The tensors by name, on the CPU.
    """
    if folder is None:
        return decode()
    path = folder / f"{name}-{key}.safetensors"
    tensors = _read(path, key)
    if tensors is None:
        tensors = decode()
        _write(path, key, tensors)
    return tensors


def _read(path: Path, key: str) -> Tensors | None:
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # A copy, because the file is mapped into memory and may be replaced by another process.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        _LOG.warning("%s is damaged and will be made again: %s", path, error)
        return None
    if metadata.get("key") != key or metadata.get("checksum") != _checksum(tensors):
        _LOG.warning("%s is damaged and will be made again: its checksum does not fit", path)
        return None
    return tensors


def _write(path: Path, key: str, tensors: Tensors) -> None:
    metadata = {"key": key, "checksum": _checksum(tensors)}
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        _LOG.warning("decoded images are not kept, since %s cannot be written: %s", path.parent, error)
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _checksum(tensors: Tensors) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
