"""`attnconv report RUN`: the figures of a run and the page that shows them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from attnconv.cli.output_checks import mark, require_room
from attnconv.cli.parsing import parse


@dataclass(frozen=True)
class Report:
    """Arguments of `attnconv report`."""

    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
    """Run folder, as `attnconv train` leaves it; the run may still be going."""
    out: Path | None = None
    """Folder for the page and the figures, new or of an earlier report; None for `report` inside the run folder."""


def run(words: Sequence[str]) -> int:
    """Write the report and say where."""
    about = "Draw a run's figures (accuracy, centres of heads over training and by layer, attention probabilities) as "
    about += "PNG and SVG, and one HTML page that holds them all."
    examples = "attnconv report runs/quadratic-digits\nattnconv report runs/first --out pages/first"
    arguments = parse(Report, "report", words, about=about, examples=examples)
    if arguments.out is not None:
        require_room("--out", arguments.out)
    from attnconv.report import write_report
    from attnconv.training.run_folder import RunFolder

    if arguments.out is not None:
        RunFolder(arguments.run).settings()  # a wrong run leaves no folder
        mark(arguments.out)
    print(f"Report: {write_report(arguments.run, arguments.out)}")
    return 0
