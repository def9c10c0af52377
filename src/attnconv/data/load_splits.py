"""Load a data set and divide it into training, validation and test images."""

from attnconv._util.errors import bad
from attnconv._util.settings import SettingsError, problems
from attnconv.data.cifar import CIFARS, Progress, read_cifar
from attnconv.data.digits import CLASSES, read_digits
from attnconv.data.image_files import read_folders
from attnconv.data.image_set import ImageSet, Splits, channel_statistics, held_out
from attnconv.data.settings import DataSettings, root_problems

_HELD_OUT = {"digits": 200, "cifar10": 5000, "cifar100": 5000}


def load_data(settings: DataSettings, *, progress: Progress | None = None) -> Splits:
    """Load a data set into memory and divide it.

    Args:
        settings: Which data set, from where, and how it is divided.
        progress: Called with (bytes there, bytes in all) while an archive is downloaded.

    Raises:
        ValueError: The settings are wrong (all problems in one message), or the data are missing, incomplete or
            damaged (the message names the file, what was expected, and what to do).

    Example:
        >>> splits = load_data(DataSettings("digits"))
        >>> len(splits.train), len(splits.validation), len(splits.test)
        (1237, 200, 360)
    """
    if found := problems(settings, "data") or root_problems(settings):
        raise SettingsError(found)
    sets, classes, source = _read(settings, progress)
    whole = train = sets["train"]
    if "validation" not in sets:
        default = _HELD_OUT.get(settings.name, len(whole) // 10)
        count = default if settings.validation is None else settings.validation
        kept, out = held_out(whole.labels, count, seed=settings.split_seed, stratify=settings.stratify)
        train, sets["validation"] = whole.take(kept), whole.take(out)
    elif settings.validation is not None:
        fix = "Leave it out, or rename that folder."
        requirement = "must be left out when the data have a validation folder"
        raise ValueError(bad("data.validation", requirement, settings.validation, fix))
    if settings.limit is not None and settings.limit > len(train):
        requirement = f"must be at most the {len(train)} images that are left to train on"
        raise ValueError(bad("data.limit", requirement, settings.limit))
    if settings.limit is not None and settings.limit < len(train):
        _, chosen = held_out(train.labels, settings.limit, seed=settings.split_seed, stratify=settings.stratify)
        train = train.take(chosen)
    if settings.name in CIFARS:
        facts = CIFARS[settings.name]
        mean, std = facts.mean, (facts.paper_std if settings.normalisation == "paper" else None) or facts.std
    else:
        mean, std = channel_statistics(whole.images)
    return Splits(train, sets["validation"], sets["test"], classes, mean, std, source)


def _read(settings: DataSettings, progress: Progress | None) -> tuple[dict[str, ImageSet], tuple[str, ...], str]:
    """Sets by name, of which `validation` may be missing; classes; and where they came from."""
    if settings.name == "digits":
        train, test = read_digits()
        return {"train": train, "test": test}, CLASSES, "the digits of scikit-learn"
    if settings.name == "folder":
        return *read_folders(settings), "image folders"
    facts = CIFARS[settings.name]
    sets, source = read_cifar(facts, settings, progress=progress)
    return sets, facts.classes, source
