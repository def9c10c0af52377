"""CIFAR-10 and CIFAR-100 (A. Krizhevsky, 2009), in any of the three formats in which they are distributed.

The folder `root` is searched for the following formats, in this order:

1. the official archive, `cifar-10-python.tar.gz`;
2. its unpacked files, `cifar-10-batches-py/data_batch_1` and so on, or the same files directly in `root`;
3. parquet files in the layout of the Hugging Face hub, `train-*.parquet` and `test-*.parquet`, in `root` or in a
   subfolder `data`, `plain_text` or with the name of the data set.

If none is found, the archive is downloaded from the website of the data set. Formats 1 and 2 give the same images in
the same order; format 3 keeps the order of the parquet files. Official files are verified against their published
checksums before they are opened, and the unpickler does not import anything.

A download is written to `NAME.part` next to the archive until its size and SHA-256 are correct. Interrupted downloads
are resumed. Processes that download the same file wait for each other.
"""

import hashlib
import http.client
import io
import os
import pickle
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnconv._util.errors import bad
from attnconv._util.file_lock import locked
from attnconv.data.image_set import ImageSet
from attnconv.data.settings import DataSettings

_PIECE = 1 << 18
_TIMEOUT = 15.0  # seconds without a response before a request fails
_ATTEMPTS = 3  # maximum number of consecutive requests without new bytes

Progress = Callable[[int, int], None]  # called with (bytes received, total bytes)

_CIFAR100 = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can "
    "castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin "
    "elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster "
    "man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck "
    "pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk "
    "skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger "
    "tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)


@dataclass(frozen=True)
class Remote:
    """File to download: URL, size in bytes and hexadecimal SHA-256."""

    url: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Cifar:
    """Description of one of the two data sets."""

    title: str
    archive: Remote
    folder: str
    train: dict[str, str]  # MD5 of each pickle by name, in order
    test: dict[str, str]
    labels: str  # column of the labels in parquet files; the key in pickles has an additional s
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    paper_std: tuple[float, ...] | None = None  # mean over images of each image's standard deviation
    rows: dict[str, int] = field(default_factory=lambda: {"train": 50_000, "test": 10_000})


_HOME = "https://www.cs.toronto.edu/~kriz/"

CIFARS = {
    "cifar10": Cifar(
        title="CIFAR-10",
        archive=Remote(
            f"{_HOME}cifar-10-python.tar.gz",
            170_498_071,
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        ),
        folder="cifar-10-batches-py",
        train={
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        },
        test={"test_batch": "40351d587109b95175f43aff81a1287e"},
        labels="label",
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        paper_std=(0.2023, 0.1994, 0.2010),
    ),
    "cifar100": Cifar(
        title="CIFAR-100",
        archive=Remote(
            f"{_HOME}cifar-100-python.tar.gz",
            169_001_437,
            "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        ),
        folder="cifar-100-python",
        train={"train": "16019d7e3df5f24257cddd939b257f8d"},
        test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        labels="fine_label",
        classes=tuple(_CIFAR100.split()),
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}


def read_cifar(
    facts: Cifar, settings: DataSettings, *, progress: Progress | None = None
) -> tuple[dict[str, ImageSet], str]:
    """Find, verify and read the sets `train` and `test`; return them and a description of their source."""
    root = Path(settings.root).expanduser()
    if (found := _read(facts, root, settings)) is None:
        _download(facts, root, download=settings.download, progress=progress)
        found = _read(facts, root, settings)
        assert found is not None, "the downloaded archive must be in the folder"
    sets, form = found
    source = f"{facts.title} from {form}"
    for split, images in sets.items():
        least, most = (int(bound) for bound in images.labels.aminmax())
        if not 0 <= least <= most < len(facts.classes):
            requirement = f"must have labels from 0 to {len(facts.classes) - 1} in {split}"
            raise ValueError(bad(source, requirement, f"{least} to {most}"))
    return sets, source


def _read(facts: Cifar, root: Path, settings: DataSettings) -> tuple[dict[str, ImageSet], str] | None:
    """Read the first format that is found and return it with its name; return None if there is none."""
    archive, folder = root / facts.archive.name, root / facts.folder
    if not folder.is_dir() and (root.name == facts.folder or any((root / name).is_file() for name in facts.test)):
        folder = root
    for path, form in ((archive, "official archive"), (folder, "unpacked official archive")):
        if path.exists():
            return read_archive(path, facts), f"the {form} {path.name}"
    from attnconv.data.hub_parquet import read_parquet  # pyarrow takes half a second to import

    for place in ("", "data", "plain_text", settings.name):
        if (sets := read_parquet(root / place, facts.labels, facts.rows)) is not None:
            return sets, "parquet files"
    return None


def _download(facts: Cifar, root: Path, *, download: bool, progress: Progress | None) -> None:
    """Download the archive, or raise an error that lists the files to provide."""
    archive, reason = facts.archive, "data.download is False"
    tried: OSError | None = None
    if download:
        try:
            fetch(archive, root / archive.name, progress=progress)
            return
        except OSError as error:  # also if the folder is not writable or the disk is full
            what = "failed" if isinstance(error, ConnectionError) else "could not be stored"
            tried, reason = error, f"the download {what}: {str(error).rstrip('.')}"
    fix = (
        f"Download {archive.url} ({archive.size:,} bytes, SHA-256 {archive.sha256}) to this folder, unpacked or not,"
        " add parquet files in the layout of the Hugging Face hub, or pass a different data.root."
    )
    got = f"none of {archive.name}, {facts.folder}, train-*.parquet in {root.absolute()}"
    raise ValueError(bad("data.root", f"must contain {facts.title}", got, fix, origin=reason)) from tried


def sha256_of(file: BufferedReader | FileIO) -> str:
    """Compute the SHA-256 of an open file from its start."""
    digest = hashlib.sha256()
    file.seek(0)
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


def fetch(remote: Remote, target: Path, *, progress: Progress | None = None) -> None:
    """Download a file unless it exists. After a `ConnectionError`, the next call resumes the download."""
    part = target.with_name(target.name + ".part")
    with locked(part, wait=True) as file:
        if not target.is_file():  # unless another process has downloaded it in the meantime
            _complete(remote, file, progress=progress)
    if target.is_file():
        part.unlink(missing_ok=True)
        return
    try:
        part.replace(target)
    except FileNotFoundError:  # another process was faster
        if not target.is_file():
            raise


def _complete(remote: Remote, file: FileIO, *, progress: Progress | None) -> None:
    """Download the missing bytes, with further requests as long as bytes arrive, and verify the file.

    The download is restarted once if the checksum is wrong or the server rejects the request to resume.
    """
    idle, again = 0, True
    while True:
        have = file.seek(0, os.SEEK_END)
        if have == remote.size:
            if (got := sha256_of(file)) == remote.sha256:
                os.fsync(file.fileno())
                return
            file.truncate(0)
            if not again:
                fix = "The download was damaged, or the file on the server has changed; the download was discarded."
                raise ValueError(bad(remote.url, f"must have the SHA-256 {remote.sha256}", got, fix))
            again = False
            continue
        reason = _append(remote, file, progress=progress)
        now = file.seek(0, os.SEEK_END)
        idle = 0 if now > have else idle + 1
        refused = isinstance(reason, urllib.error.HTTPError) and 400 <= reason.code < 500
        if refused and have > 0 and again:
            file.truncate(0)  # the server's file is shorter (416), or the server does not resume downloads
            again = False
        elif now != remote.size and (refused or idle >= _ATTEMPTS):
            got = f"{now:,} of {remote.size:,} bytes ({reason})"
            fix = "The next download will resume from here." if now else ""
            raise ConnectionError(bad(remote.url, "must send the complete file", got, fix))
        if idle:
            time.sleep(min(0.25 * 2**idle, 4.0))


def _append(remote: Remote, file: FileIO, *, progress: Progress | None) -> Exception | str:
    """Send one request for the rest of the file; return the reason for its end."""
    have = file.seek(0, os.SEEK_END)
    request = urllib.request.Request(remote.url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            if have and answer.status != http.client.PARTIAL_CONTENT:
                file.truncate(0)  # a server without range requests sends the whole file
                have = 0
            while piece := answer.read(min(_PIECE, remote.size - have)):
                file.write(piece)
                have += len(piece)
                if progress is not None:
                    progress(have, remote.size)
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # to release the connection
        return error
    return "the connection was closed"


def read_archive(path: Path, facts: Cifar) -> dict[str, ImageSet]:
    """Verify and read an archive or the folder of its unpacked files."""
    if path.is_dir():
        pickles, fix = facts.train | facts.test, f"Unpack {facts.archive.name} again."
        if missing := [name for name in pickles if not (path / name).is_file()]:
            got = f"a folder without {', '.join(missing)}"
            raise ValueError(bad(str(path), f"must contain {', '.join(pickles)}", got, fix))
        contents = {name: (path / name).read_bytes() for name in pickles}
        for name, md5 in pickles.items():
            # MD5 is used only to identify a known file, also on systems that disallow it for security.
            if (got := hashlib.md5(contents[name], usedforsecurity=False).hexdigest()) != md5:
                raise ValueError(bad(str(path / name), f"must have the MD5 {md5}", got, fix))
    else:
        with path.open("rb") as file:
            if (got := sha256_of(file)) != facts.archive.sha256:
                fix = f"Remove it and download {facts.archive.url} again."
                raise ValueError(bad(str(path), f"must have the SHA-256 {facts.archive.sha256}", got, fix))
        with tarfile.open(path, "r|gz") as archive:
            contents = {
                entry.name.removeprefix(f"{facts.folder}/"): content.read()
                for entry in archive
                if entry.isreg() and (content := archive.extractfile(entry))
            }
    sets = {}
    for split, names in (("train", facts.train), ("test", facts.test)):
        parts = [unpickle(contents[name]) for name in names]
        pixels = np.concatenate([np.frombuffer(part[b"data"].state[4], np.uint8) for part in parts])
        numbers = torch.tensor([label for part in parts for label in part[f"{facts.labels}s".encode()]])
        sets[split] = ImageSet(torch.from_numpy(pixels).view(-1, 3, 32, 32), numbers)
    return sets


class _Stub:
    """Placeholder for every class and function in a pickle; for arrays, the last entry of the state is their bytes."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Stub


def unpickle(content: bytes) -> Any:
    """Read a pickle of plain values and arrays, without importing or running any code."""
    return _Unpickler(io.BytesIO(content), encoding="bytes").load()
