"""`attnconv ablate MODEL`: measure what every single head contributes to the output of a model."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from attnconv._util.errors import bad
from attnconv._util.settings import Natural
from attnconv.cli.image_inputs import DATA_SETS, AttentionOptions, Subject
from attnconv.cli.output import print_text
from attnconv.cli.parsing import Positional


@dataclass(frozen=True, kw_only=True)
class Arguments(AttentionOptions):
    """Change the attention of every head, one at a time, and print how much the output of the model changes.

    The output change is the norm of the difference between the outputs, relative to the norm of the original output,
    over all images. The accuracy is also printed if the model was built for the classes of --data (digits, cifar10).

    Examples:
        attnconv ablate runs/quadratic-digits --data digits --images 360
        attnconv ablate runs/first --data digits --csv heads.csv --figure heads.png
        attnconv ablate timm:vit_tiny_patch16_224 --pretrained --data photos --to mean

    Attributes:
        model: Preset, run folder, weights file, hub:OWNER/NAME, timm:NAME, hf:NAME, torchvision:NAME or
            package.module:function.
        data: Input images (required): a folder of image files (searched recursively), digits or cifar10.
        to: Replacement of a head's attention. zero: nothing. mean: its mean over queries. uniform: mean pooling. shift:
            1 at the shift with the largest mean attention. convolution: the nearest matrix that depends only on the
            shift.
        csv: File for the table, as comma-separated values.
        figure: File for a heat map of the output change by layer and head; it ends with .png, .svg or .pdf.
    """

    model: Positional[str]
    images: Natural = 64
    to: Literal["zero", "mean", "uniform", "shift", "convolution"] = "zero"
    csv: Path | None = None
    figure: Path | None = None


def run(arguments: Arguments) -> None:
    """Load the model, change its heads, and print and write the effects."""
    if arguments.data is None:
        raise ValueError(bad("--data", f"must be a folder of images, {' or '.join(DATA_SETS)}", "none"))
    import torch

    from attnconv.surgery import head_effects
    from attnconv.training.progress_bars import working
    from attnconv.training.run_folder import write_csv

    if arguments.figure is not None:
        from attnconv.report.effect_map import draw_effects  # raises early if matplotlib is not installed
        from attnconv.report.figure_style import house_style

        if arguments.figure.suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(bad("--figure", "must end in .png, .svg or .pdf", str(arguments.figure)))
    subject = Subject.load(arguments.model, arguments)
    pictures, scale = subject.images(arguments.data, arguments)
    labels, settings = None, subject.loaded.settings
    same = settings is not None and settings.classes == len(pictures.classes)
    if same and subject.loaded.classes in ((), pictures.classes):
        labels = torch.tensor([pictures.classes.index(label) for label in pictures.labels])
    warnings.filterwarnings("ignore", "head_effects: ")  # the table lists what is left out
    with working(f"Ablating the heads of {arguments.model}"):
        images = subject.normalised(pictures, scale)
        found = head_effects(subject.loaded.model, images, labels=labels, to=arguments.to, **arguments.reading())
    source = subject.loaded.source
    size = f"{subject.sizes[0]} x {subject.sizes[1]} pixels"
    title = f"Model: {source}. Each head changed to {arguments.to}"
    images_of = "1 image" if found.images == 1 else f"{found.images} images"
    print_text(f"{title}, on {images_of} of {arguments.data}, {size}.")
    print(found)
    for path in (arguments.csv, arguments.figure):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if arguments.csv is not None:
        write_csv(arguments.csv, found.rows())
    if arguments.figure is not None:
        with house_style():
            draw_effects(found, title=title).savefig(arguments.figure)
