"""`attnconv audit MODEL`: how convolutional each attention of a model is, as a table and a page with figures."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnconv._util.settings import Natural
from attnconv.cli.image_inputs import Subject
from attnconv.cli.output_checks import mark, require_room
from attnconv.cli.parsing import Positional, parse
from attnconv.cli.output import print_table, print_text

if TYPE_CHECKING:
    from torch import Tensor

    from attnconv.inspect import Audit as Found

ON_SCREEN = 6  # columns, layer to coverage: a terminal of 80 characters cuts more short; the page has all


@dataclass(frozen=True)
class Audit:
    """Measure how convolutional the attention of a model is, and write a page with figures.

    Each attention layer gets a score from 0 (uniform or random attention) to 1 (a convolution), and every head its
    statistics.

    Examples:
        attnconv audit runs/quadratic-digits --data digits
        attnconv audit timm:vit_tiny_patch16_224 --pretrained --data PATH/TO/PICTURES
        attnconv audit hf:facebook/deit-tiny-patch16-224 --pretrained --data PATH/TO/PICTURES --images 16 --skip-broken
        attnconv audit my_package.models:network --data PATH/TO/PICTURES --size 192x256 --grid 12x16 --prefix 1

    Attributes:
        model: Preset, run folder, checkpoint, timm:NAME, hf:NAME, torchvision:NAME or package.module:function.
        data: Images to run the model on: a folder of pictures (or of folders of pictures), digits or cifar10. None
            takes noise, for a model whose attention depends on positions only.
        root: Folder that holds CIFAR-10.
        images: Largest number of images.
        size: Height and width of the images in pixels, N or HxW; None for the model's own, or 224. Models of timm and
            Hugging Face are made for it where they are made for one size.
        queries: Largest number of queries of each image.
        layers: Names of the modules to read, with commas between; None for all.
        grid: Tokens of the image, N or HxW, for models that do not state it.
        prefix: Class tokens and registers before the image's tokens, for models that do not state it.
        skip_broken: Skip files that cannot be read or are of one colour, instead of stopping; they are named either
            way.
        skip_unreadable: Leave out attention that cannot be read, as that of a pooling head, instead of stopping; it is
            named.
        pretrained: Fetch the trained weights of a model from a library.
        out: Folder for the page, the figures and audit.json, new or of an earlier audit; None for audits/MODEL.
    """

    model: Positional[str]
    data: str | None = None
    root: Path = Path("data")
    images: Natural = 64
    size: str | None = None
    queries: Natural = 256
    layers: str | None = None
    grid: str | None = None
    prefix: int | None = None
    skip_broken: bool = False
    skip_unreadable: bool = False
    pretrained: bool = False
    out: Path | None = None


def run(words: Sequence[str]) -> int:
    """Load the model, inspect its attention, print and write the results."""
    arguments = parse(Audit, words)
    out = arguments.out or Path("audits") / re.sub(r"[^\w.]+", "-", arguments.model).strip("-.")
    require_room("--out", out)
    from attnconv.inspect import audit
    from attnconv.report.audit_report import write_audit

    subject = Subject.load(arguments.model, arguments)
    reading = {**subject.reading, "skip_unreadable": arguments.skip_unreadable}
    with subject.size_explained():
        images, about, notes = _images(arguments, replace(subject, reading=reading))
        found = audit(subject.loaded.model, images, queries=arguments.queries, **reading)
    source = subject.loaded.source
    about = f"{source[:1].upper()}{source[1:]}. {about}"
    for note in (*notes, *found.omissions()):
        print(note)
    _print(found, about)
    mark(out)
    command = shlex.join(["attnconv", "audit", *words])
    print(f"Audit: {write_audit(found, out, title=arguments.model, about=about, command=command, notes=notes)}")
    return 0


def _images(arguments: Audit, subject: Subject) -> "tuple[Tensor, str, list[str]]":
    """Images in the model's format, a sentence on their origin, and what a reader must know."""
    import torch

    from attnconv.data.augmentation import normalise

    loaded, size = subject.loaded, f"{subject.sizes[0]} x {subject.sizes[1]} pixels"
    if arguments.data is None:
        return subject.noise(), f"All its attention looks at positions alone, those of images of {size}.", []
    options: dict[str, Any] = {"count": arguments.images, "root": arguments.root, "skip_broken": arguments.skip_broken}
    found = subject.images(arguments.data, **options)
    mean, std = loaded.mean or found.mean, loaded.std or found.std
    dtype = next(loaded.model.parameters(), torch.zeros(())).dtype
    images = normalise(found.pixels, mean, std).to(dtype)
    return images, f"Looked at {len(images)} images of {arguments.data}, {size}.", list(found.notes)


def _print(found: "Found", title: str) -> None:
    """One row per layer, and what its numbers mean."""
    from attnconv.report.audit_report import LAYER_COLUMNS, layer_row

    print_text(title)  # a table would wrap it to its own width
    print_table("", LAYER_COLUMNS[:ON_SCREEN], [layer_row(layer)[:ON_SCREEN] for layer in found.layers])
    scores = [layer.statistics.convolution_score for layer in found.layers]
    words = "score: 0 is uniform or random attention, 1 a convolution with one tap per head"
    print_text(f"{words}; mean {sum(scores) / len(scores):.3f}.")
