"""`attnconv predict IMAGE [MODEL]`: classify an image."""

from dataclasses import dataclass
from pathlib import Path

from attnconv._util.errors import bad, printable
from attnconv._util.settings import Natural
from attnconv.cli.parsing import Positional

_MOST_TINT = 32  # maximum difference between channels, of 255; greyscale JPEG files and scans stay below it
_MOST_COLOURED = 0.01  # maximum fraction of pixels above it; scans have some at edges


@dataclass(frozen=True)
class Arguments:
    """Print the most probable classes of an image.

    Models trained on greyscale images, such as digits, reject colour images, since their predictions would be
    meaningless. Models trained on colour images accept greyscale ones. Nothing else about the content is checked.

    Examples:
        attnconv predict frog.png runs/quadratic-small
        attnconv predict digit.png

    Attributes:
        image: Image file of at most 80 million pixels; it is scaled and cropped to the model's image size.
        model: Run folder, weights file (.safetensors) or hub:OWNER/NAME. The default is the most recent run in runs/.
        top: Number of classes to print.
    """

    image: Positional[Path]
    model: Positional[str | None] = None
    top: Natural = 5


def run(arguments: Arguments) -> None:
    """Print the model and the most probable classes."""
    import torch

    from attnconv.data.augmentation import normalise
    from attnconv.data.image_files import read_image
    from attnconv.models.model_loader import load

    loaded = load(arguments.model or str(_newest_run(Path("runs"))))
    if loaded.settings is None or not loaded.mean or not loaded.classes:
        fix = "Pass a run folder or a weights file written by `attnconv train`."
        raise ValueError(bad("MODEL", "must contain class names and a normalisation", loaded.source, fix))
    if loaded.settings.image_channels == 1:
        _require_grey(arguments.image)
    image = read_image(arguments.image, loaded.settings.image_size, channels=loaded.settings.image_channels)
    dtype = next(parameter.dtype for parameter in loaded.model.parameters())
    with torch.inference_mode():
        logits = loaded.model(normalise(image[None], loaded.mean, loaded.std).to(dtype))[0]
    if not bool(logits.isfinite().all()):
        raise ValueError(bad("MODEL", "must return finite logits for the image", str(logits.tolist())))
    best = logits.double().softmax(-1).topk(min(arguments.top, logits.numel()))
    print(f"{printable(loaded.source)}:")
    for probability, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        print(f"{probability:7.2%}  {printable(loaded.classes[index])}")


def _require_grey(file: Path) -> None:
    """Raise `ValueError` for a colour image; this is tested before scaling, which may average colours to grey."""
    from PIL import ImageChops

    from attnconv.data.image_files import open_picture

    with open_picture(file) as image:
        red, green, blue, _ = image.convert("RGBA").split()  # RGBA, since palettes may contain transparent colours
        most = ImageChops.lighter(ImageChops.lighter(red, green), blue)
        least = ImageChops.darker(ImageChops.darker(red, green), blue)
        counts = ImageChops.difference(most, least).histogram()
    if sum(counts[_MOST_TINT + 1 :]) > _MOST_COLOURED * sum(counts):
        fix = "Convert it to greyscale if it resembles the model's training images."
        raise ValueError(bad("IMAGE", "must be greyscale for this model", f"{file}, a colour image", fix))


def _newest_run(folder: Path) -> Path:
    weights = sorted(folder.glob("*/checkpoints/last.safetensors"), key=lambda path: path.stat().st_mtime)
    if not weights:
        fix = "Train one with: attnconv train quadratic-digits"
        raise ValueError(bad("MODEL", "must be given if runs/ contains no run", "no model", fix))
    return weights[-1].parent.parent
