"""What can be chosen about data and augmentation, as frozen dataclasses, and what can be wrong with the choice.

The command line is derived from these classes (field ``validation`` of the group ``data`` is ``--data.validation``);
the text under a field is its help. Nothing here imports torch.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from attnconv._util.errors import bad

DataName = Literal["digits", "cifar10", "cifar100", "folder"]
Recipe = Literal["none", "paper", "modern"]
CropBorder = Literal["zero", "reflect"]

LARGEST_IMAGE = 1024
"""Largest ``image_size``: above it a training set in memory is no longer sensible."""


@dataclass(frozen=True)
class DataSettings:
    """Which images a run sees, and how they are divided.

    Attributes:
        name: The data set: digits (8 x 8, embedded, needs nothing), cifar10, cifar100, or folder (one folder per
            class).
        root: Folder that holds the data (digits need none). CIFAR: the official archive (.tar.gz), what it unpacks to,
            or parquet files in the hub's layout. Image folders: train/CLASS/*.png and test/CLASS/*.png, or CLASS/*.png.
        validation: Training images held out to select models and draw curves; 0 trains on all and leaves nothing to
            select by. None: 5000 for CIFAR, 200 for digits, a tenth of a folder.
        split_seed: Seed of the held-out split. It is apart from the training seed, so that runs compare on the same
            images.
        stratify: Hold out the same share of every class.
        limit: Train on only this many images, chosen by the split's seed; validation and test stay whole. None takes
            all.
        labels: CIFAR-100 only: the 100 fine or the 20 coarse labels.
        normalisation: CIFAR-10 only: divide channels by the paper's .2023 .1994 .2010, or by the measured
            deviations .2470 .2435 .2616. The paper's are means of each image's own deviation. Other data sets are
            normalised by what is measured.
        image_size: Image folders only: side in pixels of the square that images are scaled to cover and cropped to.
        download: Fetch CIFAR from its home when the folder does not hold it.
        cache: Where decoded images are kept, to load faster: auto (the user's cache folder), off, or a folder. Nothing
            is written beside the data except a download.
    """

    name: DataName = "cifar10"
    root: str = "data"
    validation: int | None = None
    split_seed: int = 0
    stratify: bool = True
    limit: int | None = None
    labels: Literal["fine", "coarse"] = "fine"
    normalisation: Literal["paper", "measured"] = "paper"
    image_size: int = 32
    download: bool = True
    cache: str = "auto"


@dataclass(frozen=True)
class AugmentSettings:
    """Random changes to training images; the recipe fills in whatever is left at None.

    Attributes:
        recipe: none: normalise only. paper: shifted crops with a black border, mirroring. modern: shifted crops with a
            reflected border, mirroring, cutout, colour jitter.
        padding: Largest shift of the crop, in pixels to each side. None: an eighth of the image (4 for CIFAR, 1 for
            digits).
        border: What a shifted crop sees outside the image: zero (black, before normalisation) or reflect.
        flip: Mirror left and right with probability 1/2. None: the recipe's, for colour images; digits are never
            mirrored.
        cutout: Side of a square that is set to the mean colour, in pixels; 0 turns it off. None: modern takes a
            quarter.
        jitter: Strength of random brightness, contrast and saturation, 0 to 1. None: modern takes 0.2, colour images
            only.
        mixup: Parameter of mixup's Beta(a, a) distribution, 0 to 1; 0 turns mixup off.
        cutmix: Parameter of CutMix's Beta(a, a) distribution, 0 to 1; 0 turns CutMix off. With both on, each image
            takes one.
    """

    recipe: Recipe = "paper"
    padding: int | None = None
    border: CropBorder | None = None
    flip: bool | None = None
    cutout: int | None = None
    jitter: float | None = None
    mixup: float = 0.0
    cutmix: float = 0.0


@dataclass(frozen=True)
class Augmentation:
    """`AugmentSettings` for images of one shape, nothing left open."""

    padding: int
    border: CropBorder
    flip: bool
    cutout: int
    jitter: float

    @property
    def random(self) -> bool:
        """Whether anything is left to chance."""
        return self.padding > 0 or self.flip or self.cutout > 0 or self.jitter > 0.0


def settle(settings: AugmentSettings, *, channels: int, size: int) -> Augmentation:
    """Fill what `AugmentSettings` leaves open from its recipe and the images' shape.

    Args:
        settings: the user's choice.
        channels: channels of the images. One channel means strokes, not scenes: no mirroring, no jitter by default.
        size: the shorter side of the images, in pixels.

    Returns:
        The choice in numbers.

    Raises:
        ValueError: if the padding or the square is too large for the images.

    Example:
        >>> settle(AugmentSettings("paper"), channels=3, size=32)
        Augmentation(padding=4, border='zero', flip=True, cutout=0, jitter=0.0)
        >>> settle(AugmentSettings("modern"), channels=1, size=8)
        Augmentation(padding=1, border='reflect', flip=False, cutout=2, jitter=0.0)
    """
    changes, modern, colour = settings.recipe != "none", settings.recipe == "modern", channels > 1
    eighth, quarter = max(1, size // 8), max(1, size // 4)
    settled = Augmentation(
        padding=(eighth if changes else 0) if settings.padding is None else settings.padding,
        border=("reflect" if modern else "zero") if settings.border is None else settings.border,
        flip=(changes and colour) if settings.flip is None else settings.flip,
        cutout=(quarter if modern else 0) if settings.cutout is None else settings.cutout,
        jitter=(0.2 if modern and colour else 0.0) if settings.jitter is None else settings.jitter,
    )
    # A reflected border repeats at most what the image holds; a black one larger than the image shows nothing.
    if not 0 <= settled.padding < size:
        requirement = f"must be 0 to {size - 1} for images of {size} pixels"
        raise ValueError(bad("--augment.padding", requirement, settled.padding))
    if not 0 <= settled.cutout < size:
        requirement = f"must be 0 to {size - 1} for images of {size} pixels"
        raise ValueError(bad("--augment.cutout", requirement, settled.cutout))
    return settled


def problems(settings: DataSettings | AugmentSettings) -> list[str]:
    """Everything that is wrong with the settings by themselves, each in the spelling of its flag.

    Args:
        settings: either of the two classes above.

    Returns:
        One message per problem; empty if there is none. What depends on the images' number or size is checked when
        they are loaded.

    Example:
        >>> problems(AugmentSettings(padding=-1, mixup=2.0))
        ['--augment.padding: must be at least 0, got -1.', '--augment.mixup: must be 0 to 1, got 2.0.']
    """
    return _data_problems(settings) if isinstance(settings, DataSettings) else _augment_problems(settings)


def _data_problems(settings: DataSettings) -> list[str]:
    found = [
        *_one_of("--data.name", settings.name, get_args(DataName)),
        *_at_least("--data.validation", settings.validation, 0),
        *_at_least("--data.split-seed", settings.split_seed, 0),
        *_at_least("--data.limit", settings.limit, 1),
        *_one_of("--data.labels", settings.labels, ("fine", "coarse")),
        *_one_of("--data.normalisation", settings.normalisation, ("paper", "measured")),
    ]
    if settings.labels == "coarse" and settings.name != "cifar100":
        fix = "Only CIFAR-100 has coarse labels."
        found.append(bad("--data.labels", f"must be 'fine' for {settings.name}", repr("coarse"), fix))
    if not 4 <= settings.image_size <= LARGEST_IMAGE:
        found.append(bad("--data.image-size", f"must be 4 to {LARGEST_IMAGE}", settings.image_size))
    if not settings.cache:
        found.append(bad("--data.cache", "must be auto, off or a folder", repr(settings.cache)))
    if settings.name != "digits":
        found += _root_problems(settings)
    return found


def _root_problems(settings: DataSettings) -> list[str]:
    root, fetched = Path(settings.root).expanduser(), settings.download and settings.name != "folder"
    if not settings.root:
        return [bad("--data.root", "must be the folder that holds the data", repr(settings.root))]
    if root.exists() and not root.is_dir():
        return [bad("--data.root", "must be a folder", f"the file {root}")]
    if not root.exists() and not fetched:
        return [bad("--data.root", "must be a folder that exists", str(root))]
    return []


def _augment_problems(settings: AugmentSettings) -> list[str]:
    found = [
        *_one_of("--augment.recipe", settings.recipe, get_args(Recipe)),
        *_at_least("--augment.padding", settings.padding, 0),
        *_at_least("--augment.cutout", settings.cutout, 0),
    ]
    if settings.border is not None:
        found += _one_of("--augment.border", settings.border, get_args(CropBorder))
    strengths = {"jitter": settings.jitter, "mixup": settings.mixup, "cutmix": settings.cutmix}
    for flag, value in strengths.items():
        if value is not None and (not math.isfinite(value) or not 0.0 <= value <= 1.0):
            found.append(bad(f"--augment.{flag}", "must be 0 to 1", value))
    return found


def _one_of(flag: str, value: str, choices: tuple[str, ...]) -> list[str]:
    return [] if value in choices else [bad(flag, f"must be one of {', '.join(choices)}", repr(value))]


def _at_least(flag: str, value: int | None, least: int) -> list[str]:
    return [] if value is None or value >= least else [bad(flag, f"must be at least {least}", value)]
