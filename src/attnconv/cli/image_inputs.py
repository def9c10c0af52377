"""Images to look at a model with, as the flags of `audit` and `explore` name them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attnconv._util.errors import bad

if TYPE_CHECKING:
    from torch import Tensor

    from attnconv.models.model_loader import LoadedModel

DATA_SETS = ("digits", "cifar10")
_USUAL_SIZE = 224  # pixels, where a model does not say


def sides(flag: str, words: str | None) -> tuple[int, int] | None:
    """`N` or `HxW` as height and width."""
    if words is None:
        return None
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", words)
    sides = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
    if min(sides) < 1:
        raise ValueError(bad(flag, "must be N or HxW with numbers of at least 1", repr(words)))
    return sides


def own_size(loaded: "LoadedModel") -> tuple[int, int]:
    """The images that a model is made for, if it says so: this library's, timm's, torchvision's, transformers'."""
    network = getattr(loaded.model, "network", loaded.model)
    words = (
        getattr(loaded.settings, "image_size", None),
        getattr(getattr(network, "patch_embed", None), "img_size", None),
        getattr(network, "image_size", None),
        getattr(getattr(network, "config", None), "image_size", None),
    )
    size = next((word for word in words if word is not None), _USUAL_SIZE)
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


@contextmanager
def blaming_size(size: tuple[int, int] | None, own: tuple[int, int]) -> Iterator[None]:
    """A model that does not take the images of --size says so in its own words; these add what to do.

    Args:
        size: What the user asked for, if anything.
        own: What the model is given otherwise.
    """
    try:
        yield
    except ValueError as error:
        if size is None or size == own or not str(error).startswith("images: must be what the forward pass"):
            raise
        fix = f"Leave --size out, which gives it images of {own[0]} x {own[1]}, or build it for that size."
        raise ValueError(f"{error} {fix}") from error


def own_channels(loaded: "LoadedModel") -> int:
    """Channels of the images that a model takes: those of its settings, or of its first convolution."""
    from attnconv.theory.conv_taps import is_convolution

    first = next((module for module in loaded.model.modules() if is_convolution(module)), None)
    channels = 3 if first is None else int(first.in_channels)
    return int(getattr(loaded.settings, "image_channels", channels))


def layer_names(words: str | None) -> tuple[str, ...] | None:
    """Names with commas between them."""
    return None if words is None else tuple(name.strip() for name in words.split(","))


def require_positions_alone(loaded: "LoadedModel", noise: "Tensor", reading: dict[str, Any]) -> None:
    """Refuse to look on noise at what depends on the image."""
    from attnconv.inspect import audit

    content = [
        layer.name for layer in audit(loaded.model, noise, queries=1, **reading).layers if not layer.position_only
    ]
    if content:
        some = ", ".join(content[:3]) + (f" and {len(content) - 3} more" if len(content) > 3 else "")
        requirement = "must say which images to look at, since attention depends on what they show"
        fix = f"Name a folder of pictures, or {' or '.join(DATA_SETS)}."
        raise ValueError(bad("--data", requirement, f"none for {some}", fix))


def noise_for(loaded: "LoadedModel", sizes: tuple[int, int]) -> "Tensor":
    """Two images for a model that does not look at them."""
    import torch

    some = next(loaded.model.parameters(), torch.zeros(()))
    drawn = torch.randn(2, own_channels(loaded), *sizes, generator=torch.Generator().manual_seed(0))
    return drawn.to(some.dtype)


class InputImages(NamedTuple):
    """Images to look at a model with.

    Attributes:
        pixels: Bytes (b, c, height, width).
        names: Of the files; empty for a data set.
        mean: Of each channel, to normalise them where the model has none of its own.
        std: Deviation, likewise.
        notes: What is to be said of the files.
    """

    pixels: "Tensor"
    names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    notes: tuple[str, ...]


def read_pixels(
    data: str, sizes: tuple[int, int], *, channels: int, count: int, root: Path, skip_broken: bool = False
) -> InputImages:
    """The images to look at.

    Args:
        data: A folder of pictures, or one of `DATA_SETS`.
        sizes: Height and width in pixels.
        channels: 1 or 3.
        count: How many images to read at most.
        root: Folder that holds CIFAR-10.
        skip_broken: Pass over files that cannot be read or are of one colour.

    Raises:
        ValueError: There is no such data, it cannot be read, or it does not fit the channels.
    """
    from attnconv.data.load_splits import load as load_data
    from attnconv.data.sample_images import read_pictures
    from attnconv.data.settings import DataSettings

    if channels not in (1, 3):
        raise ValueError(bad("model", "must take grey or RGB images to look at --data", f"{channels} channels"))
    middle = (0.5,) * channels
    if data in DATA_SETS:
        splits = load_data(DataSettings(data, root=str(root)))  # type: ignore[arg-type]
        pixels = splits.test.images[:count]
        same = pixels.shape[1] == channels
        mean, std = (splits.mean, splits.std) if same else (middle, middle)
        return InputImages(_fitted(pixels, sizes, channels), (), mean, std, ())
    if not Path(data).is_dir():
        requirement = f"must be a folder of pictures, {' or '.join(DATA_SETS)}"
        raise ValueError(bad("--data", requirement, repr(data)))
    found = read_pictures(data, sizes, count=count, channels=channels, skip_broken=skip_broken, varied=True)
    return InputImages(found.pixels, found.names, middle, middle, found.notes)


def _fitted(pixels: "Tensor", sizes: tuple[int, int], channels: int) -> "Tensor":
    """Images of a data set at the size and with the channels that the model wants; colours are not thrown away."""
    import torch.nn.functional as F

    if pixels.shape[1] > channels:
        raise ValueError(
            bad("--data", "must be grey for a model of grey images", "images with colours", "Take digits.")
        )
    pixels = pixels.expand(-1, channels, -1, -1)
    if tuple(pixels.shape[2:]) == sizes:
        return pixels
    scaled = F.interpolate(pixels.float(), sizes, mode="bilinear", antialias=True)
    return scaled.round().clamp(0, 255).byte()
