"""CIFAR-10 and CIFAR-100 (A. Krizhevsky, 2009), in the three forms in which people have them.

In a folder ``root``, the first of these that is there is taken:

1. the official archive, ``cifar-10-python.tar.gz``;
2. what it unpacks to, ``cifar-10-batches-py/data_batch_1`` and so on, or those files in ``root`` itself;
3. parquet files in the layout of the Hugging Face hub, ``train-*.parquet`` and ``test-*.parquet``, in ``root`` or in a
   folder of it named ``data``, ``plain_text``, or like the data set.

If none is, the archive is fetched from the data set's home. 1 and 2 give the same images in the same order; the order
of 3 is that of the parquet files. Decoded images are kept in the user's cache folder, never beside the data.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from attnconv._util.errors import bad
from attnconv.data.cifar_class_names import CIFAR10, CIFAR100_COARSE, CIFAR100_FINE
from attnconv.data.cifar_pickles import Official, check_pickles, read_pickles
from attnconv.data.decoded_cache import Tensors, cache_folder, cached, key_of
from attnconv.data.download import Progress, Remote, fetch
from attnconv.data.hub_parquet import check_parquet, parquet_files, read_parquet
from attnconv.data.settings import DataSettings

_PARQUET_FOLDERS = ("data", "plain_text")


class Labels(NamedTuple):
    """One kind of labels: its column in the parquet files, and the classes."""

    column: str
    classes: tuple[str, ...]

    @property
    def key(self) -> str:
        """Their key in the official pickles."""
        return f"{self.column}s"


@dataclass(frozen=True)
class Cifar:
    """Facts about one of the two data sets.

    Args:
        name: its value of ``--data.name``.
        title: its name for readers.
        official: the archive.
        labels: the kinds of labels, by the value of ``--data.labels``.
        mean: mean of each channel over the training images, of pixels scaled to [0, 1].
        std: deviation of each channel, likewise.
        paper_std: what the paper divided by: the mean over images of each image's own deviation. None where the paper
            says nothing.
        rows: number of images of each split.
    """

    name: str
    title: str
    official: Official
    labels: dict[str, Labels]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    paper_std: tuple[float, ...] | None = None
    rows: dict[str, int] = field(default_factory=lambda: {"train": 50_000, "test": 10_000})


_HOME = "https://www.cs.toronto.edu/~kriz/"

CIFARS = {
    "cifar10": Cifar(
        name="cifar10",
        title="CIFAR-10",
        official=Official(
            Remote(
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
        ),
        labels={"fine": Labels("label", CIFAR10)},
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        paper_std=(0.2023, 0.1994, 0.2010),
    ),
    "cifar100": Cifar(
        name="cifar100",
        title="CIFAR-100",
        official=Official(
            Remote(
                f"{_HOME}cifar-100-python.tar.gz",
                169_001_437,
                "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
            ),
            folder="cifar-100-python",
            train={"train": "16019d7e3df5f24257cddd939b257f8d"},
            test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        ),
        labels={"fine": Labels("fine_label", CIFAR100_FINE), "coarse": Labels("coarse_label", CIFAR100_COARSE)},
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}


def read_cifar(facts: Cifar, settings: DataSettings, *, progress: Progress | None = None) -> tuple[Tensors, str]:
    """Find, check and read the data set.

    Args:
        facts: which of the two, an entry of `CIFARS`.
        settings: where it is, which labels, whether to download, where the cache is.
        progress: called while the archive is fetched.

    Returns:
        ``train_images``, ``train_labels``, ``test_images`` and ``test_labels``, and where they came from in words.

    Raises:
        ValueError: if the folder does not hold the data and they cannot be fetched, or what it holds is incomplete or
            damaged; the message names the file and what was expected.
    """
    root, labels = Path(settings.root).expanduser(), facts.labels[settings.labels]
    source = _find(facts, root, labels)
    if source is None:
        _download(facts, root, download=settings.download, progress=progress)
        source = _find(facts, root, labels)
        assert source is not None, "a download leaves the archive in the folder"
    key = key_of(facts.name, source.words, labels.key, source.check())
    tensors = cached(facts.name, key, source.read, folder=cache_folder(settings.cache))
    for split in ("train", "test"):
        least, most = (int(bound) for bound in tensors[f"{split}_labels"].aminmax())
        if not 0 <= least <= most < len(labels.classes):
            requirement = f"must have labels of 0 to {len(labels.classes) - 1} in {split}"
            raise ValueError(bad(f"{facts.title} from {source.words}", requirement, f"{least} to {most}"))
    return tensors, f"{facts.title} from {source.words}"


@dataclass(frozen=True)
class _Source:
    """One of the three forms, found: what it is in words, its checksum, and how it is read."""

    words: str
    check: Callable[[], str]
    read: Callable[[], Tensors]


def _find(facts: Cifar, root: Path, labels: Labels) -> _Source | None:
    official = facts.official
    folder = root / official.folder
    if not folder.is_dir() and (root.name == official.folder or any((root / name).is_file() for name in official.test)):
        folder = root
    for path, form in ((root / official.archive, "official archive"), (folder, "unpacked official archive")):
        if path.exists():
            check, read = partial(check_pickles, path, official), partial(read_pickles, path, official, labels.key)
            return _Source(f"the {form} {path.name}", check, read)
    for place in ("", *_PARQUET_FOLDERS, facts.name):
        if (files := parquet_files(root / place)) is not None:
            check, read = partial(check_parquet, files), partial(read_parquet, files, labels.column, facts.rows)
            return _Source(f"{sum(map(len, files.values()))} parquet files", check, read)
    return None


def _download(facts: Cifar, root: Path, *, download: bool, progress: Progress | None) -> None:
    """Fetch the archive, or say what to put where."""
    remote, archive = facts.official.remote, facts.official.archive
    looked = f"{archive}, {facts.official.folder}, train-*.parquet"
    tried: Exception | None = None
    reason = "--data.download is off"
    if download:
        try:
            fetch(remote, root / archive, progress=progress)
            return
        except ConnectionError as error:
            tried, reason = error, f"the download failed: {str(error).rstrip('.')}"
        except OSError as error:  # the folder cannot be made or written, or the disk is full
            tried, reason = error, f"the download could not be stored: {error}"
    fix = (
        f"Put {archive} ({remote.size:,} bytes, SHA-256 {remote.sha256}, from {remote.url}) into that folder,"
        " or what it unpacks to, or the parquet files of the hub's layout; or pass --data.root FOLDER."
    )
    got = f"none of {looked} in {root.absolute()}"
    raise ValueError(bad("--data.root", f"must hold {facts.title}", got, fix, origin=reason)) from tried
