"""`attnconv report RUN`: the figures of a run and the page that shows them."""

from dataclasses import dataclass
from pathlib import Path

from attnconv.cli.output import mark, require_room
from attnconv.cli.parsing import Positional


@dataclass(frozen=True)
class Arguments:
    """Draw the figures of a run, as PNG and SVG and on one HTML page.

    They show the accuracy, the centres of heads over training and by layer, and the attention probabilities.

    Examples:
        attnconv report runs/quadratic-digits
        attnconv report runs/first --out pages/first

    Attributes:
        run: Run folder, as `attnconv train` leaves it; the run may still be going.
        out: Folder for the page and the figures, new or of an earlier report; None for `report` inside the run folder.
        publication: Also write the figures as PDF, omit their titles, and keep the text in SVG files editable.
    """

    run: Positional[Path]
    out: Path | None = None
    publication: bool = False


def run(arguments: Arguments) -> None:
    """Write the report and print its path."""
    require_room("--out", arguments.out)
    from attnconv.report import write_report
    from attnconv.training.run_folder import RunFolder

    if arguments.out is not None:
        RunFolder(arguments.run).settings()  # a wrong run leaves no folder
        mark(arguments.out)
    print(f"Report: {write_report(arguments.run, arguments.out, publication=arguments.publication)}")
