"""Load a data set and split it into training, validation and test images."""

from attnconv._util.errors import bad
from attnconv._util.settings import SettingsError, problems
from attnconv.data.cifar import CIFARS, Progress, read_cifar
from attnconv.data.digits import CLASSES, read_digits
from attnconv.data.image_files import read_folders
from attnconv.data.image_set import ImageSet, Splits, channel_statistics, held_out
from attnconv.data.settings import DataSettings, root_problems

_HELD_OUT = {"digits": 200, "cifar10": 5000, "cifar100": 5000}


def load_data(settings: DataSettings, *, image_size: int = 32, progress: Progress | None = None) -> Splits:
    """Load a data set into memory, and split it into training, validation and test images.

    Args:
        settings: Data set, its folder, and how it is split.
        image_size: Images are scaled and cropped to a square of this side, in pixels (image folders only).
        progress: Called with (bytes received, total bytes) while an archive is downloaded; None for no calls.

    Raises:
        ValueError: If the settings are invalid (one message lists all problems), or the data are missing, incomplete or
            damaged (the message names the file, the requirement and the fix).

    Example:
        >>> splits = load_data(DataSettings("digits"))
        >>> len(splits.train), len(splits.validation), len(splits.test)
        (1237, 200, 360)
    """
    if found := problems(settings, "data") or root_problems(settings):
        raise SettingsError(found)
    sets, classes, source = _read(settings, image_size, progress)
    whole = train = sets["train"]
    if "validation" not in sets:
        default = _HELD_OUT.get(settings.name, len(whole) // 10)
        count = default if settings.validation is None else settings.validation
        kept, out = held_out(whole.labels, count, seed=settings.split_seed, stratify=settings.stratify)
        train, sets["validation"] = whole.take(kept), whole.take(out)
    elif settings.validation is not None:
        fix = "Omit it, or rename the folder."
        requirement = "must be omitted if the data have a validation folder"
        raise ValueError(bad("data.validation", requirement, settings.validation, fix))
    if settings.limit is not None and settings.limit > len(train):
        requirement = f"must be at most {len(train)}, the number of training images"
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


def _read(
    settings: DataSettings, image_size: int, progress: Progress | None
) -> tuple[dict[str, ImageSet], tuple[str, ...], str]:
    """Return the sets by name, where `validation` is optional, the classes, and the source."""
    if settings.name == "digits":
        train, test = read_digits()
        return {"train": train, "test": test}, CLASSES, "the digits of scikit-learn"
    if settings.name == "folder":
        return *read_folders(settings, image_size), "image folders"
    facts = CIFARS[settings.name]
    sets, source = read_cifar(facts, settings, progress=progress)
    return sets, facts.classes, source
