"""Load a model and its input images for the commands that apply a model to images."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from attnconv._util.errors import bad
from attnconv._util.processes import is_first_process
from attnconv._util.settings import Natural

if TYPE_CHECKING:
    from torch import Tensor

    from attnconv.data import FolderPictures
    from attnconv.inspect import Audit
    from attnconv.models.model_loader import LoadedModel

DATA_SETS = ("digits", "cifar10")
_USUAL_SIZE = 224  # pixels; used if a model does not state its image size
Scale: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Options shared by all commands that apply a model to images.

    Attributes:
        data: Images: a folder of image files (searched recursively), digits or cifar10. The default is random noise.
        data_root: Folder that contains CIFAR-10; the data set is downloaded if it is missing.
        images: Maximum number of images to read.
        image_size: Image height and width in pixels: HxW, or N for both. The default is the model's image size, or 224
            if it is unknown. Models from timm and Hugging Face with a fixed image size are built for the given size.
        skip_broken: Skip and list files that cannot be read or show only one colour, instead of stopping with an error.
        pretrained: Download pretrained weights for a timm, torchvision or Hugging Face model.
    """

    data: str | None = None
    data_root: Path = Path("data")
    images: Natural = 4
    image_size: str | None = None
    skip_broken: bool = False
    pretrained: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(ImageOptions):
    """Options shared by all commands that record the attention of a model.

    Attributes:
        layers: Names of the attention modules to inspect, separated by commas. The default is all attention modules.
        grid: Number of image tokens along the height and width: HxW, or N for both. Needed only if the positions of
            the tokens cannot be determined automatically.
        prefix: With --grid, number of class and register tokens before the image tokens.
    """

    layers: str | None = None
    grid: str | None = None
    prefix: int | None = None

    def reading(self) -> dict[str, Any]:
        """Return the options of `attnconv.inspect.audit` that define how attention is recorded."""
        layers = None if self.layers is None else tuple(map(str.strip, self.layers.split(",")))
        return {"grid": _sides("--grid", self.grid), "prefix": self.prefix, "layers": layers}


@dataclass(frozen=True)
class Subject:
    """Loaded model, with the height and width, channels and number of axes of its images."""

    loaded: "LoadedModel"
    sizes: tuple[int, int]
    channels: int
    dims: int

    @classmethod
    def load(cls, name: str, options: ImageOptions, *, resized: bool = True) -> "Subject":
        """Load a model; with `resized`, models with a fixed image size are built for --image-size.

        Numbers of channels and axes are those of the first convolution, or 3 and 2; settings override the channels.
        Random parameters are sampled with seed 0, so that all processes load the same model.
        """
        import torch

        from attnconv.models.model_loader import load
        from attnconv.theory.conv_taps import Convolution

        size = _sides("--image-size", options.image_size)
        torch.manual_seed(0)
        loaded = load(name, pretrained=options.pretrained, size=size if resized else None)
        first = next((module for module in loaded.model.modules() if isinstance(module, Convolution)), None)
        channels, dims = (3, 2) if first is None else (first.in_channels, len(first.kernel_size))
        return cls(loaded, size or own_size(loaded), getattr(loaded.settings, "image_channels", channels), dims)

    @property
    def normalisation(self) -> Scale:
        """Mean and standard deviation of each channel; 0.5 if the model does not state them."""
        return self.loaded.mean or (0.5,) * self.channels, self.loaded.std or (0.5,) * self.channels

    def noise(self, count: int) -> "Tensor":
        """Sample images of standard normal noise; with one or three axes, all sides are as long as the height."""
        import torch

        sizes = self.sizes if self.dims == 2 else self.sizes[:1] * self.dims
        return self._cast(torch.randn(count, self.channels, *sizes, generator=torch.Generator().manual_seed(0)))

    def images(self, data: str, options: ImageOptions) -> "tuple[FolderPictures, Scale]":
        """Read images from a folder or one of `DATA_SETS`, and print notes about skipped and enlarged files."""
        from attnconv.data.image_files import FolderPictures, read_pictures
        from attnconv.data.load_splits import load_data
        from attnconv.data.settings import DataSettings
        from attnconv.training.progress_bars import downloading

        sizes, channels, count, skip = self.sizes, self.channels, options.images, options.skip_broken
        if self.dims != 2 or channels not in (1, 3):
            got = f"images with channels: {channels}, spatial axes: {self.dims}"
            requirement = "must be omitted for a model whose images are not greyscale or RGB"
            raise ValueError(bad("--data", requirement, got, "Omit it to use random noise."))
        mean, std = self.normalisation
        if data in DATA_SETS:
            with downloading(shown=is_first_process()) as progress:
                settings = DataSettings(data, root=str(options.data_root))  # type: ignore[arg-type]
                splits = load_data(settings, progress=progress)
            pixels = splits.test.images[:count]
            if pixels.shape[1] == channels:
                mean, std = self.loaded.mean or splits.mean, self.loaded.std or splits.std
            labels = tuple(splits.classes[label] for label in splits.test.labels[:count].tolist())
            return FolderPictures(_fitted(pixels, sizes, channels), (), (), labels, splits.classes), (mean, std)
        if not Path(data).is_dir():
            raise ValueError(bad("--data", f"must be a folder of images, {' or '.join(DATA_SETS)}", repr(data)))
        found = read_pictures(data, sizes, count=count, channels=channels, skip_broken=skip, varied=True)
        for note in found.notes if is_first_process() else ():
            print(note)
        return found, (mean, std)

    def normalised(self, found: "FolderPictures", scale: Scale) -> "Tensor":
        from attnconv.data.augmentation import normalise

        return self._cast(normalise(found.pixels, *scale))

    def _cast(self, images: "Tensor") -> "Tensor":
        parameter = next(self.loaded.model.parameters(), None)
        return images if parameter is None else images.to(parameter.dtype)


def example_images(subject: Subject, options: ImageOptions) -> "Tensor":
    """Return the normalised images of --data, or one image of noise."""
    return subject.noise(1) if options.data is None else subject.normalised(*subject.images(options.data, options))


def require_positions_only(found: "Audit") -> None:
    """Raise `ValueError` if an audit on noise contains attention that depends on the image."""
    if content := [layer.name for layer in found.layers if not layer.position_only]:
        requirement = f"must be given, since the attention of {content[0]} depends on the image"
        raise ValueError(bad("--data", requirement, "none", f"Pass a folder of images, {' or '.join(DATA_SETS)}."))


def own_size(loaded: "LoadedModel") -> tuple[int, int]:
    """Return the height and width of the images that a model expects, or 224 x 224 if they are unknown."""
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
        raise ValueError(bad(flag, "must be N or HxW with positive integers", repr(words)))
    return sides


def _fitted(pixels: "Tensor", sizes: tuple[int, int], channels: int) -> "Tensor":
    """Resize images to the model's size, and repeat a single channel; reject colour images for a greyscale model."""
    import torch.nn.functional as F

    if pixels.shape[1] > channels:
        fix = "Pass --data digits."
        raise ValueError(bad("--data", "must contain greyscale images for this model", "colour images", fix))
    pixels = pixels.expand(-1, channels, -1, -1)
    if tuple(pixels.shape[2:]) == sizes:
        return pixels
    scaled = F.interpolate(pixels.float(), sizes, mode="bilinear", antialias=True)
    return scaled.round().clamp(0, 255).byte()
