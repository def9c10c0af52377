"""The official CIFAR archives: a tar.gz of pickles, or the folder that it unpacks to.

Every file is compared with its published checksum before it is opened. Even so the unpickler imports nothing.
"""

import hashlib
import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnconv._util.errors import bad
from attnconv.data.cifar_facts import Cifar
from attnconv.data.download import sha256_of
from attnconv.data.image_set import ImageSet


def read_archive(path: Path, facts: Cifar, labels: str) -> dict[str, ImageSet]:
    """Check and read the sets `train` and `test` of an archive, in memory, or of the folder that it unpacks to.

    `labels` is the key of the labels in the pickles: `labels`, `fine_labels` or `coarse_labels`.
    """
    contents = _of_folder(path, facts) if path.is_dir() else _of_archive(path, facts)
    sets = {}
    for split, names in (("train", facts.train), ("test", facts.test)):
        parts = [unpickle(contents[name]) for name in names]
        pixels = np.concatenate([np.frombuffer(part[b"data"].state[4], np.uint8) for part in parts])
        numbers = torch.tensor([label for part in parts for label in part[labels.encode()]])
        sets[split] = ImageSet(torch.from_numpy(pixels).view(-1, 3, 32, 32), numbers)
    return sets


def _of_archive(path: Path, facts: Cifar) -> dict[str, bytes]:
    """Contents of the pickles of an archive, by name."""
    expected, size = facts.archive, path.stat().st_size
    fix = f"Remove it and fetch {expected.url} again."
    if size != expected.size:
        state = "It is half downloaded. " if size < expected.size else ""
        raise ValueError(bad(str(path), f"must have {expected.size:,} bytes", f"{size:,}", state + fix))
    with path.open("rb") as file:
        if (got := sha256_of(file)) != expected.sha256:
            raise ValueError(bad(str(path), f"must have the SHA-256 {expected.sha256}", got, fix))
    with tarfile.open(path, "r|gz") as archive:
        return {
            entry.name.removeprefix(f"{facts.folder}/"): content.read()
            for entry in archive
            if entry.isreg() and (content := archive.extractfile(entry))
        }


def _of_folder(folder: Path, facts: Cifar) -> dict[str, bytes]:
    """Contents of the pickles of a folder, by name."""
    pickles, fix = facts.train | facts.test, f"Unpack {facts.archive.name} again."
    if missing := [name for name in pickles if not (folder / name).is_file()]:
        got = f"a folder without {', '.join(missing)}"
        raise ValueError(bad(str(folder), f"must hold {', '.join(pickles)}", got, fix))
    contents = {name: (folder / name).read_bytes() for name in pickles}
    for name, md5 in pickles.items():
        # Some systems forbid MD5 for security, but here it only recognises a known file.
        if (got := hashlib.md5(contents[name], usedforsecurity=False).hexdigest()) != md5:
            raise ValueError(bad(str(folder / name), f"must have the MD5 {md5}", got, fix))
    return contents


class _Stub:
    """Stub for any class or function that a pickle names; keeps its state, whose last entry is an array's bytes."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Stub


def unpickle(content: bytes) -> Any:
    """Read a pickle of plain values and arrays; no code that it names is imported or run."""
    return _Unpickler(io.BytesIO(content), encoding="bytes").load()
