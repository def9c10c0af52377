"""Read CIFAR-10 or CIFAR-100 from any of the three forms in which people have them.

In a folder `root`, the first of these that is there is read:

1. the official archive, `cifar-10-python.tar.gz`;
2. what it unpacks to, `cifar-10-batches-py/data_batch_1` and so on, or those files in `root` itself;
3. parquet files in the layout of the Hugging Face hub, `train-*.parquet` and `test-*.parquet`, in `root` or in a
   folder of it named `data`, `plain_text`, or like the data set.

If none is, the archive is downloaded from the data set's home. 1 and 2 give the same images in the same order; the
order of 3 is that of the parquet files.
"""

from pathlib import Path

from attnconv._util.errors import bad
from attnconv.data.cifar_archive import read_archive
from attnconv.data.cifar_facts import Cifar
from attnconv.data.download import Progress, fetch
from attnconv.data.hub_parquet import read_parquet
from attnconv.data.image_set import ImageSet
from attnconv.data.settings import DataSettings


def read_cifar(
    facts: Cifar, settings: DataSettings, *, progress: Progress | None = None
) -> tuple[dict[str, ImageSet], str]:
    """Find, check and read the sets `train` and `test`, and name their source.

    Raises `ValueError` for missing, incomplete or damaged files, with the file's name and what was expected.
    """
    root = Path(settings.root).expanduser()
    found = _read(facts, root, settings)
    if found is None:
        _download(facts, root, download=settings.download, progress=progress)
        found = _read(facts, root, settings)
        assert found is not None, "a download leaves the archive in the folder"
    sets, form = found
    source, classes = f"{facts.title} from {form}", facts.labels[settings.labels].classes
    for split, images in sets.items():
        least, most = (int(bound) for bound in images.labels.aminmax())
        if not 0 <= least <= most < len(classes):
            requirement = f"must have labels of 0 to {len(classes) - 1} in {split}"
            raise ValueError(bad(source, requirement, f"{least} to {most}"))
    return sets, source


def _read(facts: Cifar, root: Path, settings: DataSettings) -> tuple[dict[str, ImageSet], str] | None:
    """Read the first form that is there, and name it; None if there is none."""
    column = facts.labels[settings.labels].column
    archive, folder = root / facts.archive.name, root / facts.folder
    if not folder.is_dir() and (root.name == facts.folder or any((root / name).is_file() for name in facts.test)):
        folder = root
    for path, form in ((archive, "official archive"), (folder, "unpacked official archive")):
        if path.exists():
            return read_archive(path, facts, f"{column}s"), f"the {form} {path.name}"
    for place in ("", "data", "plain_text", settings.name):
        if (sets := read_parquet(root / place, column, facts.rows)) is not None:
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
        except ConnectionError as error:
            tried, reason = error, f"the download failed: {str(error).rstrip('.')}"
        except OSError as error:  # the folder cannot be made or written, or the disk is full
            tried, reason = error, f"the download could not be stored: {error}"
    fix = (
        f"Put {archive.name} ({archive.size:,} bytes, SHA-256 {archive.sha256}, from {archive.url}) into that folder,"
        " or what it unpacks to, or the parquet files of the hub's layout; or pass another data.root."
    )
    got = f"none of {archive.name}, {facts.folder}, train-*.parquet in {root.absolute()}"
    raise ValueError(bad("data.root", f"must hold {facts.title}", got, fix, origin=reason)) from tried
