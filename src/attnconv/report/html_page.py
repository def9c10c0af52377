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
    """A figure on the page: files, natural width in inches, alternative text, and caption."""

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
    """A section of the page, in the order notes, tables, figures."""

    title: str
    text: str = ""  # one paragraph
    pictures: Sequence[Picture] = ()
    folded: Sequence[Picture] = ()  # figures that a click on `fold` shows
    fold: str = "More"
    notes: Sequence[str] = ()  # what could not be shown, and why
    tables: Sequence[Table] = ()
    folded_tables: Sequence[Table] = ()  # below the figures, each shown by a click on its title


@dataclass(frozen=True)
class Page:
    """The content of a report; empty `tables` and `origin` are left out."""

    title: str
    lead: str  # one sentence below the title
    facts: Sequence[tuple[str, str, str]]  # label, value and a remark of each number at the top
    sections: Sequence[Section]
    tables: Sequence[tuple[str, Sequence[tuple[str, str]]]] = ()  # title and (name, value) of each group of settings
    origin: Sequence[tuple[str, str]] = ()  # (name, value) about versions and hardware
    command: str = ""  # that started the run; shown with `origin`
    notes: Sequence[str] = ()  # what a reader must know before the numbers


def render(page: Page) -> str:
    """The page as HTML, every text escaped; reads the pictures' SVG files."""
    loader = PackageLoader("attnconv.report", "")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["base64"] = lambda path: base64.b64encode(path.read_bytes()).decode("ascii")
    return environment.get_template("page.html.jinja").render(page=page)
