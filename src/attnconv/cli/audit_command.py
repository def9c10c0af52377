"""`attnconv audit MODEL`: how convolutional each attention of a model is, as a table and a page with figures."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from attnconv._errors import bad
from attnconv.cli.parsing import parse

if TYPE_CHECKING:
    from torch import Tensor

    from attnconv.analysis import Audit as Found
    from attnconv.models.load import LoadedModel

_EXAMPLES = """\
attnconv audit runs/quadratic-digits --data digits
attnconv audit timm:vit_tiny_patch16_224 --pretrained --data PATH/TO/PICTURES
attnconv audit hf:facebook/deit-tiny-patch16-224 --pretrained --data PATH/TO/PICTURES --images 16 --skip-broken
attnconv audit my_package.models:network --data PATH/TO/PICTURES --size 192x256 --grid 12x16 --prefix 1
"""
_DATA_SETS = ("digits", "cifar10")
_USUAL_SIZE = 224  # pixels, where a model does not say


ON_SCREEN = 6  # columns, layer to coverage: a terminal of 80 characters cuts more short; the page has all


@dataclass(frozen=True)
class Audit:
    """Arguments of `attnconv audit`."""

    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """Preset, run folder, checkpoint, timm:NAME, hf:NAME, torchvision:NAME or package.module:function."""
    data: str | None = None
    """Images to look at: a folder of pictures (or of folders of pictures), digits or cifar10. Only a model whose
    attention looks at positions alone does without."""
    root: Path = Path("data")
    """Folder that holds CIFAR-10."""
    images: int = 64
    """How many images to look at, at most."""
    size: str | None = None
    """Height and width of the images in pixels, N or HxW; None for the model's own, or 224."""
    queries: int = 256
    """How many queries of each image to look at, at most."""
    layers: str | None = None
    """Names of the modules to read, with commas between; None for all."""
    grid: str | None = None
    """Tokens of the image, N or HxW, for models that do not say it."""
    prefix: int | None = None
    """Class tokens and registers before the image's tokens, for models that do not say it."""
    skip_broken: bool = False
    """Pass over files that cannot be read or are of one colour, instead of stopping; they are named either way."""
    pretrained: bool = False
    """Fetch the trained weights of a model from a library."""
    out: Path | None = None
    """Folder for the page, the figures and audit.json; None for audits/MODEL."""


def run(words: Sequence[str]) -> int:
    """Load, look, print, write."""
    about = "Say how much of a convolution each attention layer of a model is: a score from 0 (uniform or random "
    about += "attention) to 1 (a convolution), and what every head does, as a table and one HTML page with figures."
    arguments = parse(Audit, "audit", words, about=about, examples=_EXAMPLES)
    for flag in ("images", "queries"):
        if getattr(arguments, flag) < 1:
            raise ValueError(bad(f"--{flag}", "must be at least 1", getattr(arguments, flag)))
    sizes, grid = (_sides(f"--{name}", getattr(arguments, name)) for name in ("size", "grid"))
    from attnconv.analysis import audit
    from attnconv.models.load import load
    from attnconv.report.audit_page import write_audit

    loaded = load(arguments.model, pretrained=arguments.pretrained)
    layers = None if arguments.layers is None else tuple(name.strip() for name in arguments.layers.split(","))
    reading: dict[str, Any] = {"grid": grid, "prefix": arguments.prefix, "layers": layers}
    images, about, notes = _images(arguments, loaded, sizes or _own_size(loaded), reading)
    found = audit(loaded.model, images, queries=arguments.queries, **reading)
    about = f"{_capital(loaded.source)}. {about}"
    for note in notes:
        print(note)
    _print(found, about)
    out = arguments.out or Path("audits") / re.sub(r"[^\w.]+", "-", arguments.model).strip("-.")
    command = shlex.join(["attnconv", "audit", *words])
    print(f"Audit: {write_audit(found, out, title=arguments.model, about=about, command=command, notes=notes)}")
    return 0


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sides(flag: str, words: str | None) -> tuple[int, int] | None:
    """`N` or `HxW` as height and width."""
    if words is None:
        return None
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", words)
    sides = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
    if min(sides) < 1:
        raise ValueError(bad(flag, "must be N or HxW with numbers of at least 1", repr(words)))
    return sides


def _own_size(loaded: "LoadedModel") -> tuple[int, int]:
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


def _images(
    arguments: Audit, loaded: "LoadedModel", sizes: tuple[int, int], reading: dict[str, Any]
) -> "tuple[Tensor, str, list[str]]":
    """Images as the model wants them, where they came from in words, and what a reader must know."""
    import torch

    from attnconv.data.augment import normalise
    from attnconv.theorem.convolutions import is_convolution

    parameter = next(loaded.model.parameters(), torch.zeros(()))
    first = next((module for module in loaded.model.modules() if is_convolution(module)), None)
    channels = 3 if first is None else int(first.in_channels)
    channels = getattr(loaded.settings, "image_channels", channels)
    if arguments.data is None:
        noise = torch.randn(2, channels, *sizes, generator=torch.Generator().manual_seed(0)).to(parameter.dtype)
        _require_positions_alone(loaded, noise, reading)
        about = f"All its attention looks at positions alone, those of images of {sizes[0]} x {sizes[1]} pixels."
        return noise, about, []
    if channels not in (1, 3):
        raise ValueError(bad("model", "must take grey or RGB images to look at --data", f"{channels} channels"))
    pixels, mean, std, notes = _pixels(arguments, sizes, channels)
    about = f"Looked at {len(pixels)} images of {arguments.data}, {sizes[0]} x {sizes[1]} pixels."
    mean, std = loaded.mean or mean, loaded.std or std
    return normalise(pixels, mean, std).to(parameter.dtype), about, notes


def _require_positions_alone(loaded: "LoadedModel", noise: "Tensor", reading: dict[str, Any]) -> None:
    """Refuse to audit on noise what depends on the image."""
    from attnconv.analysis import audit

    content = [
        layer.name for layer in audit(loaded.model, noise, queries=1, **reading).layers if not layer.position_only
    ]
    if content:
        some = ", ".join(content[:3]) + (f" and {len(content) - 3} more" if len(content) > 3 else "")
        requirement = "must say which images to look at, since attention depends on what they show"
        fix = f"Name a folder of pictures, or {' or '.join(_DATA_SETS)}."
        raise ValueError(bad("--data", requirement, f"none for {some}", fix))


def _pixels(
    arguments: Audit, sizes: tuple[int, int], channels: int
) -> "tuple[Tensor, tuple[float, ...], tuple[float, ...], list[str]]":
    """Bytes, the mean and deviation that normalise them where the model has none, and notes."""
    from attnconv.data.load import load as load_data
    from attnconv.data.pictures import read_pictures
    from attnconv.data.settings import DataSettings

    assert arguments.data is not None
    middle = (0.5,) * channels
    if arguments.data in _DATA_SETS:
        splits = load_data(DataSettings(arguments.data, root=str(arguments.root)))  # type: ignore[arg-type]
        pixels = splits.test.images[: arguments.images]
        same = pixels.shape[1] == channels
        return _fitted(pixels, sizes, channels), *((splits.mean, splits.std) if same else (middle, middle)), []
    if not Path(arguments.data).is_dir():
        requirement = f"must be a folder of pictures, {' or '.join(_DATA_SETS)}"
        raise ValueError(bad("--data", requirement, repr(arguments.data)))
    pixels, broken = read_pictures(
        arguments.data,
        sizes,
        count=arguments.images,
        channels=channels,
        skip_broken=arguments.skip_broken,
        varied=True,
    )
    return pixels, middle, middle, [f"Skipped a broken file. {sentence}" for sentence in broken]


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


def _print(found: "Found", title: str) -> None:
    """One row per layer, and what its numbers mean."""
    from rich.console import Console

    from attnconv.cli.comparing import plain_table
    from attnconv.report.audit_page import LAYER_COLUMNS, layer_row

    table = plain_table("", LAYER_COLUMNS[:ON_SCREEN], left=1)
    for layer in found.layers:
        table.add_row(*layer_row(layer)[:ON_SCREEN])
    console = Console()
    console.print(title, highlight=False)  # a table would wrap it to its own width
    console.print(table)
    scores = [layer.statistics.convolution_score for layer in found.layers]
    words = "score: 0 is uniform or random attention, 1 a convolution with one tap per head"
    console.print(f"{words}; mean {sum(scores) / len(scores):.3f}.", highlight=False)
