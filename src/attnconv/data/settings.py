"""Settings of data and augmentation: frozen dataclasses of plain values, free of torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from attnconv._util.settings import Natural, NotNegative, Problem, Seed, SettingsError, Share, Text

CropBorder = Literal["zero", "reflect"]


@dataclass(frozen=True)
class DataSettings:
    """The images of a run, and how they are split.

    Attributes:
        name: The data set: digits (8 x 8, embedded, needs nothing), cifar10, cifar100, or folder (one folder per
            class).
        root: Folder that holds the data (digits need none). CIFAR: the official archive (.tar.gz), what it unpacks to,
            or parquet files in the hub's layout. Image folders: train/CLASS/*.png and test/CLASS/*.png, or CLASS/*.png.
        validation: Training images held out to select models and draw curves; 0 trains on all and leaves nothing to
            select by. None: 5000 for CIFAR, 200 for digits, a tenth of a folder.
        split_seed: Seed of the held-out split, separate from the training seed so that runs compare on the same images.
        stratify: Hold out the same share of every class.
        limit: Train on only this many images, chosen by the split's seed; validation and test stay whole. None takes
            all.
        normalisation: CIFAR-10 only: divide channels by the paper's .2023 .1994 .2010, or by the measured
            deviations .2470 .2435 .2616. The paper's are means of each image's own deviation. Other data sets are
            normalised by what is measured.
        image_size: Image folders only: side in pixels of the square that images are scaled to cover and cropped to.
        download: Fetch CIFAR from its home when the folder does not hold it.
    """

    ignored: ClassVar[tuple[str, ...]] = ("cache", "labels")  # of earlier versions

    name: Literal["digits", "cifar10", "cifar100", "folder"] = "cifar10"
    root: Text = "data"
    validation: NotNegative | None = None
    split_seed: Seed = 0
    stratify: bool = True
    limit: Natural | None = None
    normalisation: Literal["paper", "measured"] = "paper"
    image_size: Annotated[int, Meta(ge=4, le=1024)] = 32  # a training set of larger ones does not fit in memory
    download: bool = True


@dataclass(frozen=True)
class AugmentSettings:
    """Random changes to training images; the recipe fills in whatever is left at None.

    Attributes:
        recipe: none: normalise only. paper: shifted crops with a black border, mirroring. modern: shifted crops with a
            reflected border, mirroring, cutout, colour jitter.
        padding: Largest shift of the crop, in pixels to each side. None: an eighth of the image (4 for CIFAR, 1 for
            digits).
        border: Pixels of a shifted crop outside the image: zero (black, before normalisation) or reflect.
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

    recipe: Literal["none", "paper", "modern"] = "paper"
    padding: NotNegative | None = None
    border: CropBorder | None = None
    flip: bool | None = None
    cutout: NotNegative | None = None
    jitter: Share | None = None
    mixup: Share = 0.0
    cutmix: Share = 0.0


@dataclass(frozen=True)
class Augmentation:
    """`AugmentSettings` for images of one shape, with nothing left open."""

    padding: int
    border: CropBorder
    flip: bool
    cutout: int
    jitter: float


def settle(settings: AugmentSettings, *, channels: int, size: int) -> Augmentation:
    """Fill what `AugmentSettings` leaves open from its recipe and the images' shape; `size` is the shorter side."""
    changes, modern = settings.recipe != "none", settings.recipe == "modern"
    colour = channels > 1  # one channel means strokes, not scenes: no mirroring, no jitter by default
    eighth, quarter = max(1, size // 8), max(1, size // 4)
    settled = Augmentation(
        padding=(eighth if changes else 0) if settings.padding is None else settings.padding,
        border=("reflect" if modern else "zero") if settings.border is None else settings.border,
        flip=(changes and colour) if settings.flip is None else settings.flip,
        cutout=(quarter if modern else 0) if settings.cutout is None else settings.cutout,
        jitter=(0.2 if modern and colour else 0.0) if settings.jitter is None else settings.jitter,
    )
    # A reflected border repeats at most what the image holds; a black one larger than the image shows nothing.
    requirement = f"must be 0 to {size - 1} for images of {size} pixels"
    sides = {"augment.padding": settled.padding, "augment.cutout": settled.cutout}
    if wrong := [Problem(name, requirement, str(side)) for name, side in sides.items() if not 0 <= side < size]:
        raise SettingsError(wrong)
    return settled


def root_problems(settings: DataSettings) -> list[Problem]:
    """Problems with the folder that holds the data, on this machine."""
    root, fetched = Path(settings.root).expanduser(), settings.download and settings.name != "folder"
    if settings.name == "digits" or root.is_dir() or (fetched and not root.exists()):
        return []
    got = f"the file {root}" if root.exists() else str(root)
    return [Problem("data.root", "must be a folder that exists", got)]
