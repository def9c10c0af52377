"""The front door: settings in, splits out."""

from dataclasses import dataclass

from attnconv._util.errors import bad
from attnconv.data.cifar import CIFARS, read_cifar
from attnconv.data.digits import CLASSES, read_digits
from attnconv.data.download import Progress
from attnconv.data.image_folder import read_folders
from attnconv.data.image_set import ImageSet, Splits, channel_statistics, held_out
from attnconv.data.settings import DataSettings, problems

_HELD_OUT = {"digits": 200, "cifar10": 5000, "cifar100": 5000}


@dataclass(frozen=True, eq=False)
class _Whole:
    """A data set before anything is held out of its training images; ``None`` is still to be decided."""

    train: ImageSet
    validation: ImageSet | None
    test: ImageSet
    classes: tuple[str, ...]
    source: str
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


def load(settings: DataSettings, *, progress: Progress | None = None) -> Splits:
    """Load a data set into memory and divide it.

    Which images are held out is a function of ``split_seed``, ``validation`` and ``stratify`` alone.

    Args:
        settings: which data set, from where, and how it is divided.
        progress: called with (bytes there, bytes in all) while an archive is fetched.

    Returns:
        The splits, the classes, and the constants that normalise the images.

    Raises:
        ValueError: if the settings are wrong (all problems in one message), or the data are missing, incomplete or
            damaged (the message names the file, what was expected, and what to do).

    Example:
        >>> splits = load(DataSettings("digits"))
        >>> len(splits.train), len(splits.validation), len(splits.test)
        (1237, 200, 360)
    """
    if found := problems(settings):
        raise ValueError("\n".join(found))
    whole = _read(settings, progress)
    train, validation = whole.train, whole.validation
    if validation is None:
        default = _HELD_OUT.get(settings.name, len(train) // 10)
        count = default if settings.validation is None else settings.validation
        kept, out = held_out(train.labels, count, seed=settings.split_seed, stratify=settings.stratify)
        train, validation = train.take(kept), train.take(out)
    elif settings.validation is not None:
        fix = "Leave it out, or rename that folder."
        requirement = "must be left out when the data have a validation folder"
        raise ValueError(bad("--data.validation", requirement, settings.validation, fix))
    mean, std = whole.mean, whole.std
    if mean is None or std is None:
        mean, std = channel_statistics(whole.train.images)
    return Splits(
        train=_limited(train, settings),
        validation=validation,
        test=whole.test,
        classes=whole.classes,
        mean=mean,
        std=std,
        source=whole.source,
    )


def _read(settings: DataSettings, progress: Progress | None) -> _Whole:
    if settings.name == "digits":
        train, test = read_digits()
        return _Whole(train, None, test, CLASSES, "the digits of scikit-learn")
    if settings.name == "folder":
        sets = read_folders(settings)
        return _Whole(sets.train, sets.validation, sets.test, sets.classes, "image folders")
    facts = CIFARS[settings.name]
    tensors, source = read_cifar(facts, settings, progress=progress)
    paper = settings.normalisation == "paper" and facts.paper_std is not None
    return _Whole(
        train=ImageSet(tensors["train_images"], tensors["train_labels"]),
        validation=None,
        test=ImageSet(tensors["test_images"], tensors["test_labels"]),
        classes=facts.labels[settings.labels].classes,
        source=source,
        mean=facts.mean,
        std=facts.paper_std if paper else facts.std,
    )


def _limited(train: ImageSet, settings: DataSettings) -> ImageSet:
    """The part of the training set that ``--data.limit`` leaves."""
    if settings.limit is None or settings.limit == len(train):
        return train
    if settings.limit > len(train):
        requirement = f"must be at most the {len(train)} images that are left to train on"
        raise ValueError(bad("--data.limit", requirement, settings.limit))
    _, chosen = held_out(train.labels, settings.limit, seed=settings.split_seed, stratify=settings.stratify)
    return train.take(chosen)
