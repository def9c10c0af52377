"""The model that `audit` and `explore` inspect, and the images on which they do."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attnconv._util.errors import bad

if TYPE_CHECKING:
    from torch import Tensor

    from attnconv.cli.audit_command import Audit
    from attnconv.cli.explore_command import Explore
    from attnconv.models.model_loader import LoadedModel

DATA_SETS = ("digits", "cifar10")
_USUAL_SIZE = 224  # pixels, where a model does not say


class InputImages(NamedTuple):
    """Images for a model, as bytes (b, c, height, width), with a normalisation for models that have none of their own.

    `names` are those of the files; `notes` are what a reader must know of them.
    """

    pixels: "Tensor"
    names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Subject:
    """A model to inspect, the height and width of --size, and options of `audit` that say how its attention is read."""

    loaded: "LoadedModel"
    asked: tuple[int, int] | None
    reading: dict[str, Any]

    @classmethod
    def load(cls, name: str, arguments: "Audit | Explore") -> "Subject":
        """Load the model that the arguments describe."""
        from attnconv.models.model_loader import load

        size, grid = _sides("--size", arguments.size), _sides("--grid", arguments.grid)
        layers = None if arguments.layers is None else tuple(map(str.strip, arguments.layers.split(",")))
        loaded = load(name, pretrained=arguments.pretrained, size=size)
        return cls(loaded, size, {"grid": grid, "prefix": arguments.prefix, "layers": layers})

    @property
    def sizes(self) -> tuple[int, int]:
        """Height and width of the images."""
        return self.asked or own_size(self.loaded)

    @property
    def channels(self) -> int:
        """Channels of the images: those of the model's settings, or of its first convolution."""
        from attnconv.theory.conv_taps import is_convolution

        first = next((module for module in self.loaded.model.modules() if is_convolution(module)), None)
        channels = 3 if first is None else int(first.in_channels)
        return int(getattr(self.loaded.settings, "image_channels", channels))

    def noise(self) -> "Tensor":
        """Draw two images of noise, for a model whose attention does not depend on the image; others are an error."""
        import torch

        from attnconv.inspect import audit

        some = next(self.loaded.model.parameters(), torch.zeros(()))
        drawn = torch.randn(2, self.channels, *self.sizes, generator=torch.Generator().manual_seed(0)).to(some.dtype)
        read = audit(self.loaded.model, drawn, queries=1, **self.reading).layers
        if content := [layer.name for layer in read if not layer.position_only]:
            some_names = ", ".join(content[:3]) + (f" and {len(content) - 3} more" if len(content) > 3 else "")
            requirement = "must name images, since attention depends on them"
            fix = f"Name a folder of pictures, or {' or '.join(DATA_SETS)}."
            raise ValueError(bad("--data", requirement, f"none for {some_names}", fix))
        return drawn

    def images(self, data: str, *, count: int, root: Path, skip_broken: bool = False) -> InputImages:
        """Read at most `count` images of a folder of pictures, or of one of `DATA_SETS`.

        `skip_broken` skips files that cannot be read or are of one colour.
        """
        from attnconv.data.image_folder import read_pictures
        from attnconv.data.load_splits import load as load_data
        from attnconv.data.settings import DataSettings

        sizes, channels = self.sizes, self.channels
        if channels not in (1, 3):
            raise ValueError(bad("model", "must have grey or RGB images to inspect --data", f"{channels} channels"))
        middle = (0.5,) * channels
        if data in DATA_SETS:
            splits = load_data(DataSettings(data, root=str(root)))  # type: ignore[arg-type]
            pixels = splits.test.images[:count]
            mean, std = (splits.mean, splits.std) if pixels.shape[1] == channels else (middle, middle)
            return InputImages(_fitted(pixels, sizes, channels), (), mean, std, ())
        if not Path(data).is_dir():
            raise ValueError(bad("--data", f"must be a folder of pictures, {' or '.join(DATA_SETS)}", repr(data)))
        found = read_pictures(data, sizes, count=count, channels=channels, skip_broken=skip_broken, varied=True)
        return InputImages(found.pixels, found.names, middle, middle, found.notes)

    @contextmanager
    def size_explained(self) -> Iterator[None]:
        """Add the fix to a model's error about the images of --size."""
        own = own_size(self.loaded)
        try:
            yield
        except ValueError as error:
            if self.sizes == own or not str(error).startswith("images: must be what the forward pass"):
                raise
            fix = f"Leave --size out, which gives it images of {own[0]} x {own[1]}, or build it for that size."
            raise ValueError(f"{error} {fix}") from error


def own_size(loaded: "LoadedModel") -> tuple[int, int]:
    """The size of the images that a model is made for, of any library; 224 where it is not known."""
    network = getattr(loaded.model, "network", loaded.model)
    stated = (
        getattr(loaded.settings, "image_size", None),
        getattr(getattr(network, "patch_embed", None), "img_size", None),
        getattr(network, "image_size", None),
        getattr(getattr(network, "config", None), "image_size", None),
    )
    size = next((size for size in stated if size is not None), _USUAL_SIZE)
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
