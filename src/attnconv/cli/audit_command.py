"""`attnconv audit MODEL`: measure how closely attention resembles convolution, and write a page with figures."""

import re
import shlex
import sys
import warnings
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from attnconv._util.processes import begin_group, is_first_process
from attnconv._util.settings import Natural
from attnconv.cli.image_inputs import AttentionOptions, Subject, require_positions_only
from attnconv.cli.output import mark, print_table, print_text, require_room
from attnconv.cli.parsing import Positional

ON_SCREEN = 6  # number of columns, layer to coverage, that fit in 80 characters; the page has all columns


@dataclass(frozen=True, kw_only=True)
class Arguments(AttentionOptions):
    """Measure how closely the attention of a model resembles convolution, and write a page with figures.

    The page shows a score for each layer, from 0 (uniform attention) to 1 (a convolution), and statistics of each head.

    Examples:
        attnconv audit runs/quadratic-digits --data digits
        attnconv audit timm:vit_tiny_patch16_224 --pretrained --data photos
        attnconv audit hf:facebook/deit-tiny-patch16-224 --pretrained --data photos
        attnconv audit my_package.models:network --data photos --image-size 192x256
        torchrun --nproc-per-node 2 -m attnconv audit runs/first --data digits

    Attributes:
        model: Preset, run folder, weights file, hub:OWNER/NAME, timm:NAME, hf:NAME, torchvision:NAME or
            package.module:function.
        data: Input images: a folder of image files (searched recursively), digits or cifar10. Required
            unless attention depends only on positions, in which case the default is random noise.
        queries: Maximum number of queries whose attention is measured in each layer, per image.
        out: Output folder. It must be new, empty or written by an earlier audit. The default is a folder in
            audits/ that is named after the model.
        publication: Prepare figures for print: add PDF files, omit titles, and keep the text of SVG files editable.
    """

    model: Positional[str]
    images: Natural = 64
    queries: Natural = 256
    out: Path | None = None
    publication: bool = False


def run(arguments: Arguments) -> None:
    """Load the model, measure its attention, and print and write the results."""
    out = arguments.out or Path("audits") / re.sub(r"[^\w.]+", "-", arguments.model).strip("-.")
    require_room("--out", out)
    from attnconv.inspect import audit
    from attnconv.inspect.auditing import omissions
    from attnconv.report.audit_report import LAYER_COLUMNS, layer_row, write_audit
    from attnconv.training.progress_bars import tracked

    subject = Subject.load(arguments.model, arguments)
    reading = arguments.reading()
    size = f"{subject.sizes[0]} x {subject.sizes[1]} pixels"
    notes: tuple[str, ...] = ()
    if arguments.data is None:
        images = subject.noise(2)
        about = f"Its attention depends only on positions; it was measured for images of {size}."
    else:
        pictures, scale = subject.images(arguments.data, arguments)
        images, notes = subject.normalised(pictures, scale), pictures.notes
        about = f"Measured on {len(images)} images of {arguments.data}, {size}."
    begin_group()
    batches = images.split(8)
    warnings.filterwarnings("ignore", "audit: ")  # what is left out is printed below
    with closing(tracked(batches, f"Auditing {arguments.model}", len(batches))) as shown:
        found = audit(subject.loaded.model, shown, queries=arguments.queries, **reading)
    if arguments.data is None:
        require_positions_only(found)
    if not is_first_process():
        return
    source = subject.loaded.source
    about = f"Model: {source}. {about}"
    for omission in omissions(found.left_out):
        print(omission)
    print_text(about)  # the title of a table would be wrapped to the width of the table
    print_table("", LAYER_COLUMNS[:ON_SCREEN], [layer_row(layer)[:ON_SCREEN] for layer in found.layers])
    scores = [layer.statistics.convolution_score for layer in found.layers]
    meaning = "Score: 0 for uniform attention, 1 for a convolution with one tap per head"
    print_text(f"{meaning}; mean {sum(scores) / len(scores):.3f}.")
    mark(out)
    command = shlex.join(["attnconv", *sys.argv[1:]])
    texts = {"title": arguments.model, "about": about, "command": command}
    print(f"Audit: {write_audit(found, out, **texts, notes=notes, publication=arguments.publication)}")
