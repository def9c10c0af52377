"""`attnconv report RUN`: draw the figures of a run, and write an HTML page."""

from dataclasses import dataclass
from pathlib import Path

from attnconv.cli.output import mark, require_room
from attnconv.cli.parsing import Positional


@dataclass(frozen=True)
class Arguments:
    """Draw the figures of a run as PNG and SVG files, and write an HTML page with all of them.

    The figures show the accuracy, the centres of the heads by epoch and by layer, and the attention probabilities.

    Examples:
        attnconv report runs/quadratic-digits
        attnconv report runs/first --out pages/first

    Attributes:
        run: Run folder written by `attnconv train`, with at least one complete epoch.
        out: Output folder. It must be new, empty or written by an earlier report. The default is RUN/report.
        publication: Prepare figures for print: add PDF files, omit titles, and keep the text of SVG files editable.
    """

    run: Positional[Path]
    out: Path | None = None
    publication: bool = False


def run(arguments: Arguments) -> None:
    """Write the report and print its path."""
    require_room("--out", arguments.out)
    from attnconv.report import write_report
    from attnconv.training.progress_bars import working
    from attnconv.training.run_folder import RunFolder

    if arguments.out is not None:
        RunFolder(arguments.run).settings()  # raises before the output folder is created
        mark(arguments.out)
    with working("Drawing figures"):
        page = write_report(arguments.run, arguments.out, publication=arguments.publication)
    print(f"Report: {page}")
