"""HTML page of a report: one self-contained file, rendered from `page.html.jinja` and `page.css`."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from attnconv.models.preset_tables import Table
from attnconv.report.figure_style import save


@dataclass(frozen=True)
class Picture:
    """A figure on the page, with its width in inches, alternative text and caption."""

    files: Sequence[Path]  # as returned by `save`: PNG first, SVG second
    width: float
    alt: str
    caption: str


@dataclass(frozen=True)
class FigureFolder:
    """The folder `figures` next to the page, to which figures are written; `publication` is passed to `save`."""

    path: Path
    publication: bool = False

    def add(self, figure: Figure, name: str, *, alt: str, caption: str) -> Picture:
        """Write a figure to `name.png`, `name.svg`, ... in this folder."""
        files = save(figure, self.path / name, publication=self.publication)
        return Picture(files, float(figure.get_figwidth()), alt, caption)


@dataclass(frozen=True)
class Section:
    """A section of the page: notes, tables and figures, in this order."""

    title: str
    text: str = ""  # one paragraph
    pictures: Sequence[Picture] = ()
    folded: Sequence[Picture] = ()  # figures that a click on `fold` shows
    fold: str = "More"
    notes: Sequence[str] = ()  # what could not be shown, and why
    tables: Sequence[Table] = ()
    folded_tables: Sequence[Table] = ()  # tables below the figures; a click on its title shows a table


@dataclass(frozen=True)
class Page:
    """Content of a report; empty `tables` and `origin` are omitted."""

    title: str
    lead: str  # one sentence below the title
    facts: Sequence[tuple[str, str, str]]  # (label, value, comment) of each number at the top
    sections: Sequence[Section]
    tables: Sequence[tuple[str, Sequence[tuple[str, str]]]] = ()  # title and (name, value) pairs of groups of settings
    origin: Sequence[tuple[str, str]] = ()  # (name, value) pairs of versions and hardware
    command: str = ""  # the command line of the run or audit; shown with `origin`
    notes: Sequence[str] = ()  # remarks at the top


def render(page: Page) -> str:
    """Render the page as HTML with all text escaped and the SVG files of its figures embedded."""
    loader = PackageLoader("attnconv.report", "")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["base64"] = lambda path: base64.b64encode(path.read_bytes()).decode("ascii")
    return environment.get_template("page.html.jinja").render(page=page)
