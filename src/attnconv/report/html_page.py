"""The HTML page of a report: one file that needs nothing else, on any screen, in a light or a dark room.

Figures are inlined as SVG images, styles stand in the page, and a content security policy forbids every request. There
is no script. Every text passes through `html.escape`.
"""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from attnconv.models.preset_tables import Table

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --faint: #57606a; --line: #d9dde2; --paper: #fff; --card: #f6f8fa;
  --link: #0b5cad; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --faint: #a5adb6; --line: #363c44; --paper: #14171b; --card: #1d2127; --link: #7cb7ff; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.6 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 64rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: clamp(1.6rem, 4.5vw, 2.3rem); line-height: 1.2; margin: 0 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.35rem; line-height: 1.3; margin: 3.2rem 0 .4rem; }
p { margin: .5rem 0; max-width: 44rem; }
.lead, .note, figcaption, summary small { color: var(--faint); }
.lead { font-size: 1.1rem; }
.note { border-left: 3px solid var(--line); padding-left: .9rem; }
a { color: var(--link); }
dl.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .8rem;
  margin: 1.8rem 0 0; }
dl.facts div { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem; }
dl.facts dt { color: var(--faint); font-size: .85rem; }
dl.facts dd { margin: 0; }
dl.facts dd.value { font-size: 1.6rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
dl.facts dd.aside { color: var(--faint); font-size: .8rem; line-height: 1.4; }
figure { margin: 1.2rem 0 2rem; }
.plate { overflow-x: auto; background: #fff; border: 1px solid var(--line); border-radius: .6rem; padding: .6rem; }
.plate:focus-visible, .wide:focus-visible, summary:focus-visible, a:focus-visible { outline: 2px solid var(--link);
  outline-offset: 2px; }
.plate img { display: block; height: auto; margin: 0 auto; }
figcaption { font-size: .92rem; margin-top: .6rem; max-width: 44rem; }
.files { white-space: nowrap; }
.hint { display: none; }
@media (max-width: 44rem) { .hint { display: inline; } }
details { border-top: 1px solid var(--line); margin-top: 1rem; }
summary { cursor: pointer; padding: .7rem 0; font-weight: 600; }
.groups { columns: 17.5rem 3; column-gap: 2.4rem; margin-top: 1rem; }
.groups table { break-inside: avoid; margin-bottom: 1.4rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { text-align: left; vertical-align: top; font-weight: 400; padding: .25rem 0;
  border-top: 1px solid var(--line); }
th { color: var(--faint); padding-right: 1rem; }
td { text-align: right; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.wide table { width: auto; min-width: 100%; }
.wide th, .wide td { padding: .25rem .8rem .25rem 0; overflow-wrap: normal; }
.wide .line { white-space: nowrap; }
.wide thead th { vertical-align: bottom; text-align: right; }
.wide thead th:first-child, .wide thead th.words, .wide td.words { text-align: left; }
details .wide caption { display: none; }
.wide { overflow-x: auto; margin: 1rem 0 1.6rem; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem; white-space:
  pre-wrap; overflow-wrap: anywhere; font: .85rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
@media print { main { max-width: none; padding: 0; } .plate, dl.facts div { break-inside: avoid; } }
"""
_SEVERAL = re.compile(r"[\d(][\d\s x,.()-]*")  # 14 x 14, (-1, 0): numbers that are read together
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Picture:
    """A figure on the page.

    Attributes:
        png: The bitmap's file.
        svg: The drawing's file, which is inlined.
        width: Natural width in inches.
        alt: What it shows, for those who cannot see it.
        caption: How to read it.
    """

    png: Path
    svg: Path
    width: float
    alt: str
    caption: str


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        title: Heading.
        text: One paragraph.
        pictures: Shown one below the other.
        folded: Shown when asked for.
        fold: What asks for them.
        notes: What could not be shown, and why.
        tables: Shown before the pictures.
        folded_tables: Shown after them, each when asked for by its title.
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
    """One number at the top: what it is, its value, and a word about it."""

    label: str
    value: str
    aside: str = ""


@dataclass(frozen=True)
class Page:
    """All that a report says.

    Attributes:
        title: Heading and title of the page.
        lead: One sentence below it.
        facts: The numbers that matter.
        sections: Figures.
        tables: Title and rows (name, value) of each group of settings; empty leaves the part out.
        origin: Title and rows of what the run ran on; empty likewise.
        command: Command line that started it; empty if it was not started from one.
        notes: What a reader must know before the numbers.
    """

    title: str
    lead: str
    facts: Sequence[Fact]
    sections: Sequence[Section]
    tables: Sequence[tuple[str, Sequence[tuple[str, str]]]]
    origin: Sequence[tuple[str, str]]
    command: str = ""
    notes: Sequence[str] = ()


def render(page: Page) -> str:
    """The page as HTML; reads the pictures' SVG files.

    Links to the figures' own files are relative to the page, in the folder `figures` beside it.
    """
    facts = "".join(
        f'<div><dt>{escape(fact.label)}</dt><dd class="value">{escape(fact.value)}</dd>'
        f'<dd class="aside">{escape(fact.aside)}</dd></div>'
        for fact in page.facts
    )
    settings = f'<div class="groups">{"".join(_table(title, rows) for title, rows in page.tables)}</div>'
    command = f"<p>It was started with</p><pre>{escape(page.command)}</pre>" if page.command else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(page.title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<header>
<h1>{escape(page.title)}</h1>
<p class="lead">{escape(page.lead)}</p>
{_notes(page.notes)}
<dl class="facts">{facts}</dl>
</header>
{"".join(_section(section) for section in page.sections)}
{_part("Settings", settings) if page.tables else ""}
{_part("What the run ran on", f'{command}<div class="groups">{_table("", page.origin)}</div>') if page.origin else ""}
</main>
</body>
</html>
"""


def _part(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>"


def _section(section: Section) -> str:
    text = f"<p>{escape(section.text)}</p>" if section.text else ""
    shown = "".join(_figure(picture) for picture in section.pictures)
    folded = "".join(_figure(picture) for picture in section.folded)
    tables = "".join(_wide_table(table) for table in section.tables)
    asked = "".join(
        f"<details><summary>{escape(table.title)}</summary>{_wide_table(table)}</details>"
        for table in section.folded_tables
    )
    more = f"<details><summary>{escape(section.fold)}</summary>{folded}</details>" if folded else ""
    above = f"{text}{_notes(section.notes)}{tables}"
    return f"<section>\n<h2>{escape(section.title)}</h2>\n{above}{shown}{more}{asked}\n</section>\n"


def _notes(notes: Sequence[str]) -> str:
    return "".join(f'<p class="note">{escape(note)}</p>' for note in notes)


def _figure(picture: Picture) -> str:
    """A wide figure scrolls sideways in its plate before its letters become too small to read."""
    data = base64.b64encode(picture.svg.read_bytes()).decode("ascii")
    natural = round(picture.width * 96)
    size = f"width:100%;max-width:{natural}px;min-width:{round(natural * 0.72)}px"
    links = " · ".join(
        f'<a href="figures/{escape(file.name)}">{kind}</a>'
        for kind, file in (("PNG", picture.png), ("SVG", picture.svg))
    )
    name = escape(picture.alt.partition(".")[0])
    return (
        f'<figure><div class="plate" tabindex="0" role="group" aria-label="{name}">'
        f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(picture.alt)}" style="{size}"></div>'
        f"<figcaption>{escape(picture.caption)} "
        f'<span class="hint">The figure scrolls sideways.</span> <span class="files">{links}</span></figcaption>'
        "</figure>\n"
    )


def _table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    lines = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows)
    return f"<table>{caption}{lines}</table>"


def _class(*names: str) -> str:
    some = " ".join(filter(None, names))
    return f' class="{some}"' if some else ""


def _wide_table(table: Table) -> str:
    """A table of any number of columns; columns of words stand to the left, those of numbers to the right."""
    kinds = ["" if is_numeric else "words" for is_numeric in table.numeric]
    columns = zip(kinds, table.columns, strict=True)
    heads = "".join(f'<th scope="col"{_class(kind)}>{escape(name)}</th>' for kind, name in columns)
    rows = []
    for first, *others in table.rows:
        cells = "".join(
            f"<td{_class(kind, 'line' if _SEVERAL.fullmatch(cell) else '')}>{escape(cell)}</td>"
            for kind, cell in zip(kinds[1:], others, strict=True)
        )
        rows.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    return (
        f'<div class="wide" tabindex="0" role="group" aria-label="{escape(table.title)}"><table>'
        f"<caption>{escape(table.title)}</caption><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>"
        "</table></div>"
    )
