"""`attnconv predict IMAGE`: the classes that a model sees in a picture."""

from dataclasses import dataclass
from pathlib import Path

from attnconv._util.errors import bad, printable
from attnconv._util.settings import Natural
from attnconv.cli.parsing import Positional


@dataclass(frozen=True)
class Arguments:
    """Print the classes that a model finds likeliest for an image, with their probabilities.

    Examples:
        attnconv predict frog.png --model runs/quadratic-small
        attnconv predict digit.png

    Attributes:
        image: Picture file, of at most 80 million pixels; it is scaled and cropped to the model's image size.
        model: Run folder or weights file (.safetensors); None takes the newest run in runs/.
        top: How many classes to print.
    """

    image: Positional[Path]
    model: str | None = None
    top: Natural = 5


def run(arguments: Arguments) -> None:
    """Print the likeliest classes."""
    import torch

    from attnconv.data.augmentation import normalise
    from attnconv.data.image_files import read_image
    from attnconv.models.model_loader import load

    loaded = load(arguments.model or str(_newest_run(Path("runs"))))
    if loaded.settings is None or not loaded.mean or not loaded.classes:
        fix = "Name a run folder or a weights file that `attnconv train` wrote."
        raise ValueError(bad("--model", "must know its classes and its normalisation", loaded.source, fix))
    image = read_image(arguments.image, loaded.settings.image_size, channels=loaded.settings.image_channels)
    dtype = next(parameter.dtype for parameter in loaded.model.parameters())
    with torch.inference_mode():
        logits = loaded.model(normalise(image[None], loaded.mean, loaded.std).to(dtype))[0]
    if not bool(logits.isfinite().all()):
        raise ValueError(bad("--model", "must give finite logits for the image", str(logits.tolist())))
    best = logits.softmax(-1).topk(min(arguments.top, logits.numel()))
    for probability, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        print(f"{probability:7.2%}  {printable(loaded.classes[index])}")


def _newest_run(folder: Path) -> Path:
    weights = sorted(folder.glob("*/checkpoints/last.safetensors"), key=lambda path: path.stat().st_mtime)
    if not weights:
        fix = "Name one with --model, or train one: attnconv train quadratic-digits."
        raise ValueError(bad("--model", "must be given while there is no finished run in runs/", "nothing", fix))
    return weights[-1].parent.parent
