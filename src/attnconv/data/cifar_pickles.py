"""The official CIFAR archives ("python version"): a tar.gz of pickles, or the folder that it unpacks to.

Every file is compared with the published checksum before it is opened, so only the published pickles are read. Even so
the unpickler imports nothing: a stub takes the place of every class that a pickle names, and keeps an array's bytes. It
also does not depend on how a release of NumPy reads arrays that Python 2 pickled.
"""

import io
import pickle
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnconv._util.errors import bad
from attnconv.data.decoded_cache import Tensors, file_digest
from attnconv.data.download import Remote

PIXELS = (3, 32, 32)


@dataclass(frozen=True)
class Official:
    """An archive: where it is, the folder inside it, and the MD5 of each pickle by its name, in order."""

    remote: Remote
    folder: str
    train: dict[str, str]
    test: dict[str, str]

    @property
    def archive(self) -> str:
        """Name of the archive's file."""
        return self.remote.url.rpartition("/")[2]

    @property
    def pickles(self) -> dict[str, str]:
        """All pickles that hold images."""
        return self.train | self.test


def check_pickles(path: Path, official: Official) -> str:
    """Compare an archive, or the folder that it unpacks to, with the published one.

    Returns:
        The checksums.

    Raises:
        ValueError: if the archive has another size or checksum, or a pickle of the folder is missing or differs.
    """
    if path.is_dir():
        return _check_folder(path, official)
    expected, size = official.remote, path.stat().st_size
    fix = f"Remove it and fetch {expected.url} again."
    if size != expected.size:
        state = "It is half downloaded. " if size < expected.size else ""
        raise ValueError(bad(str(path), f"must have {expected.size:,} bytes", f"{size:,}", state + fix))
    if (got := file_digest(path)) != expected.sha256:
        raise ValueError(bad(str(path), f"must have the SHA-256 {expected.sha256}", got, fix))
    return expected.sha256


def _check_folder(folder: Path, official: Official) -> str:
    fix = f"Unpack {official.archive} again."
    missing = [name for name in official.pickles if not (folder / name).is_file()]
    if missing:
        got = f"a folder without {', '.join(missing)}"
        raise ValueError(bad(str(folder), f"must hold {', '.join(official.pickles)}", got, fix))
    for name, md5 in official.pickles.items():
        if (got := file_digest(folder / name, "md5")) != md5:
            raise ValueError(bad(str(folder / name), f"must have the MD5 {md5}", got, fix))
    return " ".join(official.pickles.values())


def read_pickles(path: Path, official: Official, labels: str) -> Tensors:
    """Read images and labels out of a checked archive, in memory, or out of a checked folder.

    Args:
        path: the archive, or the folder that it unpacks to.
        official: what is in it.
        labels: which labels, a key of the pickles (``labels``, ``fine_labels``, ``coarse_labels``).

    Returns:
        ``train_images``, ``train_labels``, ``test_images``, ``test_labels``.
    """
    if path.is_dir():
        contents = {name: (path / name).read_bytes() for name in official.pickles}
    else:
        with tarfile.open(path, "r|gz") as archive:
            files = {
                entry.name: file.read() for entry in archive if entry.isreg() and (file := archive.extractfile(entry))
            }
        contents = {name: files[f"{official.folder}/{name}"] for name in official.pickles}
    tensors = {}
    for split, names in (("train", official.train), ("test", official.test)):
        parts = [unpickle(contents[name]) for name in names]
        pixels = [np.frombuffer(part[b"data"].state[4], np.uint8) for part in parts]
        tensors[f"{split}_images"] = torch.from_numpy(np.concatenate(pixels)).view(-1, *PIXELS)
        tensors[f"{split}_labels"] = torch.tensor([label for part in parts for label in part[labels.encode()]])
    return tensors


class _Stub:
    """Stands for any class or function that a pickle names; keeps its state, which of an array ends in its bytes."""

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
