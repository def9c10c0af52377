"""The HTML page of a report: one file that needs nothing else, rendered from `page.html.jinja` and `page.css`."""

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
    """A figure on the page: its files, its natural width in inches, its alternative text, and how to read it."""

    png: Path
    svg: Path
    width: float
    alt: str
    caption: str

    @staticmethod
    def saved(figure: Figure, stem: Path, *, alt: str, caption: str) -> "Picture":
        """Write a figure as `stem.png` and `stem.svg`, in the folder `figures` beside the page."""
        png, svg = save(figure, stem)
        return Picture(png, svg, float(figure.get_figwidth()), alt, caption)


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        title: Heading.
        text: One paragraph.
        pictures: Figures, below the notes and the tables.
        folded: Figures that a click on `fold` shows.
        fold: Summary of the folded figures.
        notes: What could not be shown, and why.
        tables: Tables above the figures.
        folded_tables: Tables below the figures, each shown by a click on its title.
    """

    title: str
    text: str = ""
    pictures: Sequence[Picture] = ()
    folded: Sequence[Picture] = ()
    fold: str = "More"
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    folded_tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Fact:
    """One number at the top: its label, its value, and a remark."""

    label: str
    value: str
    aside: str = ""


@dataclass(frozen=True)
class Page:
    """The content of a report.

    Attributes:
        title: Heading and title of the page.
        lead: One sentence below it.
        facts: The most important numbers.
        sections: Figures and tables.
        tables: Title and rows (name, value) of each group of settings; empty omits the part.
        origin: Rows (name, value) about versions and hardware; empty omits the part.
        command: Command line that started the run; shown with `origin`.
        notes: What a reader must know before the numbers.
    """

    title: str
    lead: str
    facts: Sequence[Fact]
    sections: Sequence[Section]
    tables: Sequence[tuple[str, Sequence[tuple[str, str]]]] = ()
    origin: Sequence[tuple[str, str]] = ()
    command: str = ""
    notes: Sequence[str] = ()


def render(page: Page) -> str:
    """The page as HTML, every text escaped; reads the pictures' SVG files."""
    loader = PackageLoader("attnconv.report", "")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["base64"] = lambda path: base64.b64encode(path.read_bytes()).decode("ascii")
    return environment.get_template("page.html.jinja").render(page=page)
