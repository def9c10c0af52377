"""The official CIFAR archives ("python version"): a tar.gz of pickles, or the folder that it unpacks to.

Every file is recognised by its checksum before it is opened, and opened by an unpickler that can run nothing. The
archive is read as a stream: no file of it is ever written to disk, so no name in it can reach outside a folder.
"""

import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt
import torch

from attnconv._util.errors import bad
from attnconv.data.decoded_cache import Tensors, file_digest
from attnconv.data.download import Remote
from attnconv.data.restricted_unpickler import read_pickle

PIXELS = (3, 32, 32)


@dataclass(frozen=True)
class Member:
    """One pickle of the archive: its name, its MD5 as published, and how many images it holds."""

    name: str
    md5: str
    rows: int


@dataclass(frozen=True)
class Official:
    """An archive: where it is, the folder inside it, and its pickles in order."""

    remote: Remote
    folder: str
    train: tuple[Member, ...]
    test: tuple[Member, ...]

    @property
    def archive(self) -> str:
        """Name of the archive's file."""
        return self.remote.url.rpartition("/")[2]

    @property
    def members(self) -> tuple[Member, ...]:
        """All pickles that hold images."""
        return (*self.train, *self.test)


def check_archive(path: Path, official: Official) -> str:
    """Compare an archive with the published one.

    Args:
        path: the file.
        official: what it must be.

    Returns:
        Its checksum, which says what is in it.

    Raises:
        ValueError: if its size or checksum is another.
    """
    expected, size = official.remote, path.stat().st_size
    fix = f"Remove it and fetch {expected.url} again."
    if size != expected.size:
        state = "It is half downloaded. " if size < expected.size else ""
        raise ValueError(bad(str(path), f"must have {expected.size:,} bytes", f"{size:,}", state + fix))
    if (got := file_digest(path)) != expected.sha256:
        raise ValueError(bad(str(path), f"must have the SHA-256 {expected.sha256}", got, fix))
    return expected.sha256


def check_folder(folder: Path, official: Official) -> str:
    """Compare an unpacked archive with the published one.

    Args:
        folder: the folder that holds the pickles.
        official: what they must be.

    Returns:
        Their checksums, which say what is in them.

    Raises:
        ValueError: if a pickle is missing or another.
    """
    fix = f"Unpack {official.archive} again."
    missing = [member.name for member in official.members if not (folder / member.name).is_file()]
    if missing:
        names = ", ".join(member.name for member in official.members)
        raise ValueError(bad(str(folder), f"must hold {names}", f"a folder without {', '.join(missing)}", fix))
    for member in official.members:
        if (got := file_digest(folder / member.name, "md5")) != member.md5:
            raise ValueError(bad(str(folder / member.name), f"must have the MD5 {member.md5}", got, fix))
    return " ".join(member.md5 for member in official.members)


def read_archive(path: Path, official: Official, labels: str) -> Tensors:
    """Read images and labels out of the archive.

    Args:
        path: the archive.
        official: what is in it.
        labels: which labels, a key of the pickles (``labels``, ``fine_labels``, ``coarse_labels``).

    Returns:
        ``train_images``, ``train_labels``, ``test_images``, ``test_labels``.

    Raises:
        ValueError: if the archive is damaged, has a name that leaves its folder, or lacks a pickle; or a pickle does
            not hold what it should.
    """
    wanted = {f"{official.folder}/{member.name}": member for member in official.members}
    parts: dict[str, tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]] = {}
    try:
        for name, content in _files(path):
            if (member := wanted.get(name)) is not None:
                parts[member.name] = _read_member(content, f"{path}/{name}", member, labels)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        fix = f"The file is damaged: fetch {official.remote.url} again."
        raise ValueError(bad(str(path), "must be a whole tar.gz archive", str(error), fix)) from error
    missing = [member.name for member in official.members if member.name not in parts]
    if missing:
        raise ValueError(bad(str(path), f"must hold {official.folder}/{missing[0]}", "an archive without it"))
    return _assemble(parts, official)


def read_folder(folder: Path, official: Official, labels: str) -> Tensors:
    """Read images and labels out of the unpacked archive; arguments, results and errors as in `read_archive`."""
    parts = {}
    for member in official.members:
        path = folder / member.name
        parts[member.name] = _read_member(path.read_bytes(), str(path), member, labels)
    return _assemble(parts, official)


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the ordinary files of an archive, one after another."""
    with tarfile.open(path, "r:gz") as archive:
        for entry in archive:
            name = PurePosixPath(entry.name)
            if name.is_absolute() or ".." in name.parts:
                fix = "Nothing was written. Fetch the archive again from the data set's home."
                raise ValueError(bad(str(path), "must hold no name outside its folder", repr(entry.name), fix))
            file = archive.extractfile(entry) if entry.isreg() else None
            if file is not None:
                yield str(name), file.read()


def _read_member(
    pickle: bytes, path: str, member: Member, labels: str
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    content = read_pickle(pickle, path)
    for key in ("data", labels):
        if key not in content:
            raise ValueError(bad(path, f"must hold {key!r}", f"a dictionary of {', '.join(sorted(content))}"))
    images, numbers = content["data"], content[labels]
    shape = (member.rows, int(np.prod(PIXELS)))
    if not isinstance(images, np.ndarray) or images.shape != shape:
        got = images.shape if isinstance(images, np.ndarray) else type(images).__name__
        raise ValueError(bad(path, f"must hold pixels of the shape {shape} in 'data'", got))
    if not isinstance(numbers, list) or len(numbers) != member.rows or any(type(n) is not int for n in numbers):
        got = f"{len(numbers)} values" if isinstance(numbers, list) else type(numbers).__name__
        raise ValueError(bad(path, f"must hold {member.rows} integers in {labels!r}", got))
    return images.reshape(-1, *PIXELS), np.asarray(numbers, np.int64)


def _assemble(parts: dict[str, tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]], official: Official) -> Tensors:
    tensors = {}
    for split, members in (("train", official.train), ("test", official.test)):
        tensors[f"{split}_images"] = torch.from_numpy(np.concatenate([parts[member.name][0] for member in members]))
        tensors[f"{split}_labels"] = torch.from_numpy(np.concatenate([parts[member.name][1] for member in members]))
    return tensors
