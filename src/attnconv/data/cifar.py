"""CIFAR-10 and CIFAR-100 (A. Krizhevsky, 2009), in any of the three forms in which they are distributed.

In a folder `root`, the first of these that is there is read:

1. the official archive, `cifar-10-python.tar.gz`;
2. what it unpacks to, `cifar-10-batches-py/data_batch_1` and so on, or those files in `root` itself;
3. parquet files in the layout of the Hugging Face hub, `train-*.parquet` and `test-*.parquet`, in `root` or in a
   folder of it named `data`, `plain_text`, or like the data set.

If none is, the archive is downloaded from the data set's home. 1 and 2 give the same images in the same order; the
order of 3 is that of the parquet files. Every official file is compared with its published checksum before it is
opened. Even so the unpickler imports nothing.

Bytes of a download go to `NAME.part` beside the archive until size and SHA-256 are right. A download that broke off, in
this process or an earlier one, continues from there. Processes that download the same file wait for each other.
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
_TIMEOUT = 15.0  # seconds without an answer before a request is given up
_ATTEMPTS = 3  # requests in a row that may bring no new byte

Progress = Callable[[int, int], None]  # of the bytes that are there and the bytes that the file will have

_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

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
    """A file to download: its URL, its size in bytes and its SHA-256, hexadecimal."""

    url: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """Name of the file."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Cifar:
    """Facts about one of the two data sets."""

    title: str
    archive: Remote
    folder: str
    train: dict[str, str]  # the MD5 of each pickle by its name, in order
    test: dict[str, str]
    labels: str  # their column in parquet files; in the pickles: with an s
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    paper_std: tuple[float, ...] | None = None  # the mean over images of each image's own deviation
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
        classes=_CIFAR10,
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
    """Find, check and read the sets `train` and `test`, and name their source."""
    root = Path(settings.root).expanduser()
    if (found := _read(facts, root, settings)) is None:
        _download(facts, root, download=settings.download, progress=progress)
        found = _read(facts, root, settings)
        assert found is not None, "a download leaves the archive in the folder"
    sets, form = found
    source = f"{facts.title} from {form}"
    for split, images in sets.items():
        least, most = (int(bound) for bound in images.labels.aminmax())
        if not 0 <= least <= most < len(facts.classes):
            requirement = f"must have labels of 0 to {len(facts.classes) - 1} in {split}"
            raise ValueError(bad(source, requirement, f"{least} to {most}"))
    return sets, source


def _read(facts: Cifar, root: Path, settings: DataSettings) -> tuple[dict[str, ImageSet], str] | None:
    """Read the first form that is there, and name it; None if there is none."""
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
    """Download the archive, or say what to put where."""
    archive, reason = facts.archive, "data.download is off"
    tried: OSError | None = None
    if download:
        try:
            fetch(archive, root / archive.name, progress=progress)
            return
        except OSError as error:  # also where the folder cannot be made or written, or the disk is full
            what = "failed" if isinstance(error, ConnectionError) else "could not be stored"
            tried, reason = error, f"the download {what}: {str(error).rstrip('.')}"
    fix = (
        f"Put {archive.name} ({archive.size:,} bytes, SHA-256 {archive.sha256}, from {archive.url}) into that folder,"
        " or what it unpacks to, or the parquet files of the hub's layout; or pass another data.root."
    )
    got = f"none of {archive.name}, {facts.folder}, train-*.parquet in {root.absolute()}"
    raise ValueError(bad("data.root", f"must hold {facts.title}", got, fix, origin=reason)) from tried


def sha256_of(file: BufferedReader | FileIO) -> str:
    """Checksum of an open file, from its beginning."""
    digest = hashlib.sha256()
    file.seek(0)
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


def fetch(remote: Remote, target: Path, *, progress: Progress | None = None) -> None:
    """Download a file unless it is there. What arrives before a `ConnectionError` is kept for the next time."""
    part = target.with_name(target.name + ".part")
    with locked(part, wait=True) as file:
        if not target.is_file():  # else another process downloaded it while this one waited
            _complete(remote, file, progress=progress)
    if target.is_file():
        part.unlink(missing_ok=True)
        return
    try:
        part.replace(target)
    except FileNotFoundError:  # a process that waited was faster
        if not target.is_file():
            raise


def _complete(remote: Remote, file: FileIO, *, progress: Progress | None) -> None:
    """Append what is missing, in as many requests as it takes while each brings something, and verify the whole.

    Starts again once if the whole is wrong, or if the server does not continue what is here.
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
                fix = "The download was damaged, or the file has changed at its home; it was discarded."
                raise ValueError(bad(remote.url, f"must have the SHA-256 {remote.sha256}", got, fix))
            again = False
            continue
        reason = _append(remote, file, progress=progress)
        now = file.seek(0, os.SEEK_END)
        idle = 0 if now > have else idle + 1
        refused = isinstance(reason, urllib.error.HTTPError) and 400 <= reason.code < 500
        if refused and have > 0 and again:
            file.truncate(0)  # the server has less than what is here (416), or will not resume
            again = False
        elif now != remote.size and (refused or idle >= _ATTEMPTS):
            got = f"{now:,} of {remote.size:,} bytes ({reason})"
            fix = "What has arrived is kept, and the next download continues from there." if now else ""
            raise ConnectionError(bad(remote.url, "must be within reach", got, fix))
        if idle:
            time.sleep(min(0.25 * 2**idle, 4.0))


def _append(remote: Remote, file: FileIO, *, progress: Progress | None) -> Exception | str:
    """Send one request for the rest of the file; returns what ended it."""
    have = file.seek(0, os.SEEK_END)
    request = urllib.request.Request(remote.url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            if have and answer.status != http.client.PARTIAL_CONTENT:
                file.truncate(0)  # a server without ranges sends the file from its beginning
                have = 0
            while piece := answer.read(min(_PIECE, remote.size - have)):
                file.write(piece)
                have += len(piece)
                if progress is not None:
                    progress(have, remote.size)
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        return error
    return "the connection was closed"


def read_archive(path: Path, facts: Cifar) -> dict[str, ImageSet]:
    """Check and read an archive or the folder that it unpacks to."""
    if path.is_dir():
        pickles, fix = facts.train | facts.test, f"Unpack {facts.archive.name} again."
        if missing := [name for name in pickles if not (path / name).is_file()]:
            got = f"a folder without {', '.join(missing)}"
            raise ValueError(bad(str(path), f"must hold {', '.join(pickles)}", got, fix))
        contents = {name: (path / name).read_bytes() for name in pickles}
        for name, md5 in pickles.items():
            # Some systems forbid MD5 for security, but here it only recognises a known file.
            if (got := hashlib.md5(contents[name], usedforsecurity=False).hexdigest()) != md5:
                raise ValueError(bad(str(path / name), f"must have the MD5 {md5}", got, fix))
    else:
        with path.open("rb") as file:
            if (got := sha256_of(file)) != facts.archive.sha256:
                fix = f"Remove it and fetch {facts.archive.url} again."
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
