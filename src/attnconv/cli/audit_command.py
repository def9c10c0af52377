"""`attnconv audit MODEL`: how convolutional each attention of a model is, as a table and a page with figures."""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from attnconv._util.settings import Natural
from attnconv.cli.image_inputs import AttentionOptions, Subject, require_positions_only
from attnconv.cli.output import mark, print_table, print_text, require_room
from attnconv.cli.parsing import Positional

ON_SCREEN = 6  # columns, layer to coverage: a terminal of 80 characters cuts more short; the page has all


@dataclass(frozen=True, kw_only=True)
class Arguments(AttentionOptions):
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
        queries: Largest number of queries of each image.
        skip_unreadable: Leave out attention that cannot be read, as that of a pooling head, instead of stopping; it is
            named.
        out: Folder for the page, the figures and audit.json, new or of an earlier audit; None for audits/MODEL.
        publication: Also write the figures as PDF, omit their titles, and keep the text in SVG files editable.
    """

    model: Positional[str]
    images: Natural = 64
    queries: Natural = 256
    skip_unreadable: bool = False
    out: Path | None = None
    publication: bool = False


def run(arguments: Arguments) -> None:
    """Load the model, inspect its attention, print and write the results."""
    out = arguments.out or Path("audits") / re.sub(r"[^\w.]+", "-", arguments.model).strip("-.")
    require_room("--out", out)
    from attnconv.inspect import audit
    from attnconv.report.audit_report import LAYER_COLUMNS, layer_row, write_audit

    subject = Subject.load(arguments.model, arguments)
    reading = {**arguments.reading(), "skip_unreadable": arguments.skip_unreadable}
    size = f"{subject.sizes[0]} x {subject.sizes[1]} pixels"
    notes: tuple[str, ...] = ()
    if arguments.data is None:
        images, about = subject.noise(2), f"All its attention looks at positions alone, those of images of {size}."
    else:
        pictures, scale = subject.images(arguments.data, arguments)
        images, notes = subject.normalised(pictures, scale), pictures.notes
        about = f"Looked at {len(images)} images of {arguments.data}, {size}."
    found = audit(subject.loaded.model, images, queries=arguments.queries, **reading)
    if arguments.data is None:
        require_positions_only(found)
    source = subject.loaded.source
    about = f"{source[:1].upper()}{source[1:]}. {about}"
    for omission in found.omissions():
        print(omission)
    print_text(about)  # a table would wrap it to its own width
    print_table("", LAYER_COLUMNS[:ON_SCREEN], [layer_row(layer)[:ON_SCREEN] for layer in found.layers])
    scores = [layer.statistics.convolution_score for layer in found.layers]
    meaning = "score: 0 is uniform or random attention, 1 a convolution with one tap per head"
    print_text(f"{meaning}; mean {sum(scores) / len(scores):.3f}.")
    mark(out)
    command = shlex.join(["attnconv", *sys.argv[1:]])
    texts = {"title": arguments.model, "about": about, "command": command}
    print(f"Audit: {write_audit(found, out, **texts, notes=notes, publication=arguments.publication)}")
