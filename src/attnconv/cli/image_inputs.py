"""The images on which `audit`, `explore`, `prove` and `recast` look at a model, and the flags that name them."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from attnconv._util.errors import bad
from attnconv._util.settings import Natural

if TYPE_CHECKING:
    from torch import Tensor

    from attnconv.data import FolderPictures
    from attnconv.inspect import Audit
    from attnconv.models.model_loader import LoadedModel

DATA_SETS = ("digits", "cifar10")
_USUAL_SIZE = 224  # pixels, where a model does not say
Scale: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation of each channel


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Flags of every command that shows images to any model.

    Attributes:
        data: Images: a folder of pictures (or of folders of pictures), digits or cifar10; None for noise.
        root: Folder that holds CIFAR-10.
        images: Largest number of images.
        size: Height and width of the images in pixels, N or HxW; None for the model's own, or 224. Models of timm and
            Hugging Face are made for it where they are made for one size.
        skip_broken: Skip files that cannot be read or are of one colour, instead of stopping; they are named either
            way.
        pretrained: Fetch the trained weights of a model from a library.
    """

    data: str | None = None
    root: Path = Path("data")
    images: Natural = 4
    size: str | None = None
    skip_broken: bool = False
    pretrained: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(ImageOptions):
    """Flags of every command that reads the attention of any model.

    Attributes:
        layers: Names of the modules to read, with commas between; None for all.
        grid: Tokens of the image, N or HxW, for models that do not state it.
        prefix: Class tokens and registers before the image's tokens, for models that do not state it.
    """

    layers: str | None = None
    grid: str | None = None
    prefix: int | None = None

    def reading(self) -> dict[str, Any]:
        """Options of `attnconv.inspect.audit` that say how attention is read."""
        layers = None if self.layers is None else tuple(map(str.strip, self.layers.split(",")))
        return {"grid": _sides("--grid", self.grid), "prefix": self.prefix, "layers": layers}


@dataclass(frozen=True)
class Subject:
    """A model to look at; the height and width, channels and number of axes of its images."""

    loaded: "LoadedModel"
    sizes: tuple[int, int]
    channels: int
    dims: int

    @classmethod
    def load(cls, name: str, options: ImageOptions, *, resized: bool = True) -> "Subject":
        """Load a model, `resized` to images of --size where it is made for one size.

        What its settings leave open, its first convolution says; otherwise it takes RGB images.
        """
        from attnconv.models.model_loader import load
        from attnconv.theory.conv_taps import Convolution

        size = _sides("--size", options.size)
        loaded = load(name, pretrained=options.pretrained, size=size if resized else None)
        first = next((module for module in loaded.model.modules() if isinstance(module, Convolution)), None)
        channels, dims = (3, 2) if first is None else (first.in_channels, len(first.kernel_size))
        return cls(loaded, size or own_size(loaded), getattr(loaded.settings, "image_channels", channels), dims)

    @property
    def normalisation(self) -> Scale:
        """Mean and deviation of each channel, 0.5 where the model does not say."""
        return self.loaded.mean or (0.5,) * self.channels, self.loaded.std or (0.5,) * self.channels

    def noise(self, count: int) -> "Tensor":
        """Draw images of noise; with one axis or three, every side has the length of the height."""
        import torch

        sizes = self.sizes if self.dims == 2 else self.sizes[:1] * self.dims
        drawn = torch.randn(count, self.channels, *sizes, generator=torch.Generator().manual_seed(0))
        return self._cast(drawn)

    def images(self, data: str, options: ImageOptions) -> "tuple[FolderPictures, Scale]":
        """Read images of a folder of pictures, or of one of `DATA_SETS`; prints what a reader must know of them."""
        from attnconv.data.image_files import FolderPictures, read_pictures
        from attnconv.data.load_splits import load_data
        from attnconv.data.settings import DataSettings

        sizes, channels, count, skip = self.sizes, self.channels, options.images, options.skip_broken
        if self.dims != 2 or channels not in (1, 3):
            got = f"{self.dims} axes and {channels} channels"
            raise ValueError(bad("--data", "is for models of grey or RGB images", got, "Leave it out to use noise."))
        mean, std = self.normalisation
        if data in DATA_SETS:
            splits = load_data(DataSettings(data, root=str(options.root)))  # type: ignore[arg-type]
            pixels = splits.test.images[:count]
            if pixels.shape[1] == channels:
                mean, std = self.loaded.mean or splits.mean, self.loaded.std or splits.std
            return FolderPictures(_fitted(pixels, sizes, channels), (), ()), (mean, std)
        if not Path(data).is_dir():
            raise ValueError(bad("--data", f"must be a folder of pictures, {' or '.join(DATA_SETS)}", repr(data)))
        found = read_pictures(data, sizes, count=count, channels=channels, skip_broken=skip, varied=True)
        for note in found.notes:
            print(note)
        return found, (mean, std)

    def normalised(self, found: "FolderPictures", scale: Scale) -> "Tensor":
        """Images as the model takes them."""
        from attnconv.data.augmentation import normalise

        return self._cast(normalise(found.pixels, *scale))

    def _cast(self, images: "Tensor") -> "Tensor":
        parameter = next(self.loaded.model.parameters(), None)
        return images if parameter is None else images.to(parameter.dtype)


def example_images(subject: Subject, options: ImageOptions) -> "Tensor":
    """The images of --data as the model takes them, or one of noise."""
    return subject.noise(1) if options.data is None else subject.normalised(*subject.images(options.data, options))


def require_positions_only(found: "Audit") -> None:
    """Reject an audit on noise of attention that depends on the image."""
    if content := [layer.name for layer in found.layers if not layer.position_only]:
        got, fix = f"none for {content[0]}", f"Name a folder of pictures, or {' or '.join(DATA_SETS)}."
        raise ValueError(bad("--data", "must name images, since attention depends on them", got, fix))


def own_size(loaded: "LoadedModel") -> tuple[int, int]:
    """The size of the images that a model is made for, of any library; 224 where it is not known."""
    network = getattr(loaded.model, "network", loaded.model)
    of_timm = getattr(getattr(network, "patch_embed", None), "img_size", None)
    others = (getattr(each, "image_size", None) for each in (network, getattr(network, "config", None)))
    stated = (getattr(loaded.settings, "image_size", None), of_timm, *others, _USUAL_SIZE)
    size = next(size for size in stated if size is not None)
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _sides(flag: str, words: str | None) -> tuple[int, int] | None:
    """Parse `N` or `HxW` as height and width."""
    if words is None:
        return None
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", words)
    sides = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
    if min(sides) < 1:
        raise ValueError(bad(flag, "must be N or HxW with numbers of at least 1", repr(words)))
    return sides


def _fitted(pixels: "Tensor", sizes: tuple[int, int], channels: int) -> "Tensor":
    """Images of a data set at the size and with the channels of the model; colours are kept."""
    import torch.nn.functional as F

    if pixels.shape[1] > channels:
        got = "images with colours"
        raise ValueError(bad("--data", "must be grey for a model of grey images", got, "Take digits."))
    pixels = pixels.expand(-1, channels, -1, -1)
    if tuple(pixels.shape[2:]) == sizes:
        return pixels
    scaled = F.interpolate(pixels.float(), sizes, mode="bilinear", antialias=True)
    return scaled.round().clamp(0, 255).byte()
