"""Settings of data sets and augmentation. This module does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from attnconv._util.settings import Natural, NotNegative, Problem, Seed, SettingsError, Share, Text

CropBorder = Literal["zero", "reflect"]


@dataclass(frozen=True)
class DataSettings:
    """Data set and its splits.

    Attributes:
        name: Data set: cifar10, cifar100, digits (8 x 8 pixels, no download needed), or folder (image files in one
            folder per class; `attnconv train` uses the number of these folders as the default for --classes).
        root: Folder of the data set; not used for digits. For CIFAR, it contains the official archive (.tar.gz), its
            unpacked files, or Parquet files in the layout of the Hugging Face Hub. For image folders, it contains
            train/CLASS/*.png and test/CLASS/*.png (or other formats), or CLASS/*.png, of which a fifth are test images.
        validation: Number of training images held out for validation; 0 holds out none. The default is 5000 for
            CIFAR, 200 for digits, and a tenth of the training images for image folders.
        split_seed: Seed of the validation split. It is independent of the training seed, so that runs with different
            seeds use the same split.
        stratify: Hold out the same fraction of every class.
        limit: Number of training images to use, selected at random with the split seed. The validation and test images
            are not affected. The default is all training images.
        normalisation: Values by which the channels of CIFAR-10 are divided, for pixels in [0, 1]. measured: the
            standard deviations over all pixels (0.2470, 0.2435, 0.2616). paper: per-image standard deviations averaged
            over images (0.2023, 0.1994, 0.2010). Other data sets always use their measured values.
        download: Download CIFAR-10 or CIFAR-100 if the folder does not contain it.
    """

    ignored: ClassVar[tuple[str, ...]] = ("cache", "image_size", "labels")  # settings of earlier versions

    name: Literal["digits", "cifar10", "cifar100", "folder"] = "cifar10"
    root: Text = "data"
    validation: NotNegative | None = None
    split_seed: Seed = 0
    stratify: bool = True
    limit: Natural | None = None
    normalisation: Literal["paper", "measured"] = "paper"
    download: bool = True


@dataclass(frozen=True)
class AugmentSettings:
    """Augmentation of training images. The augmentation recipe sets the defaults of most settings in this group.

    Attributes:
        recipe: modern: random crops with a reflected border, flips, cutout and colour jitter. none: no augmentation.
            paper: random crops with a black border, and flips.
        padding: Maximum translation of the random crop along each axis, in pixels. The default is an eighth of the
            image's shorter side (4 for CIFAR, 1 for digits), or 0 with the augmentation recipe "none".
        border: Pixels outside the image: reflect (the image reflected at its edges) or zero (black). The default is
            reflect with the augmentation recipe "modern", and zero otherwise.
        flip: Flip images horizontally with probability 1/2. The default is False for data sets with one channel
            (digits) and with the augmentation recipe "none", and True otherwise; image folders have three channels.
        cutout: Side in pixels of a randomly placed square that is set to the mean colour; 0 turns cutout off. The
            default is a quarter of the image's shorter side with the augmentation recipe "modern", and 0 otherwise.
        jitter: Strength a, from 0 to 1: brightness, contrast and saturation are scaled by random factors from 1 - a to
            1 + a. The default is 0.2 for colour images with the augmentation recipe "modern", and 0 otherwise.
        mixup: Parameter a of mixup's Beta(a, a) distribution, from 0 to 1; 0 turns mixup off.
        cutmix: Parameter a of CutMix's Beta(a, a) distribution, from 0 to 1; 0 turns CutMix off. If mixup is also on,
            one of the two is chosen at random for each image.
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
    """Augmentation for one image shape: `AugmentSettings` in which the recipe's defaults replace None."""

    padding: int
    border: CropBorder
    flip: bool
    cutout: int
    jitter: float


def settle(settings: AugmentSettings, *, channels: int, size: int) -> Augmentation:
    """Replace None in `AugmentSettings` with the recipe's defaults; `size` is the shorter image side in pixels."""
    changes, modern = settings.recipe != "none", settings.recipe == "modern"
    colour = channels > 1  # greyscale images are usually characters, which must not be flipped
    eighth, quarter = max(1, size // 8), max(1, size // 4)
    settled = Augmentation(
        padding=(eighth if changes else 0) if settings.padding is None else settings.padding,
        border=("reflect" if modern else "zero") if settings.border is None else settings.border,
        flip=(changes and colour) if settings.flip is None else settings.flip,
        cutout=(quarter if modern else 0) if settings.cutout is None else settings.cutout,
        jitter=(0.2 if modern and colour else 0.0) if settings.jitter is None else settings.jitter,
    )
    # A reflected border is at most as wide as the image, and a crop with a wider black border may be empty.
    requirement = f"must be from 0 to {size - 1} for images with a side of {size} pixels"
    sides = {"augment.padding": settled.padding, "augment.cutout": settled.cutout}
    if wrong := [Problem(name, requirement, str(side)) for name, side in sides.items() if not 0 <= side < size]:
        raise SettingsError(wrong)
    return settled


def root_problems(settings: DataSettings) -> list[Problem]:
    """List the problems with the folder of the data set."""
    root, fetched = Path(settings.root).expanduser(), settings.download and settings.name != "folder"
    if settings.name == "digits" or root.is_dir() or (fetched and not root.exists()):
        return []
    got = f"the file {root}" if root.exists() else str(root)
    return [Problem("data.root", "must be an existing folder", got)]
