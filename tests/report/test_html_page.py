from html.parser import HTMLParser
from pathlib import Path

from attnconv.report.html_page import Page, Picture, Section, render

NASTY = "<script>alert(1)</script> & \"quoted\" 'text' </style> $x$"


class Reader(HTMLParser):
    """Parser that collects tags with their attributes, texts, and tags that are never closed."""

    VOID = ("meta", "img", "br")

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    return reader


def test_every_text_is_escaped(tmp_path: Path) -> None:
    svg = tmp_path / "a.svg"
    svg.write_text("<svg/>")
    picture = Picture((tmp_path / "a & b.png", svg), width=5.0, alt=NASTY, caption=NASTY)
    page = Page(
        title=NASTY,
        lead=NASTY,
        facts=[(NASTY, NASTY, NASTY)],
        sections=[Section(NASTY, NASTY, [picture], [picture], NASTY, [NASTY])],
        tables=[(NASTY, [(NASTY, NASTY)])],
        origin=[(NASTY, NASTY)],
        command=NASTY,
        notes=[NASTY],
    )
    reader = read(render(page))
    assert reader.all("script") == []
    assert [image["alt"] for image in reader.all("img")] == [NASTY, NASTY]
    assert reader.text.count("<script>alert(1)</script>") == 19
    assert reader.all("a")[0]["href"] == "figures/a & b.png"


def test_empty_parts_leave_no_trace() -> None:
    reader = read(render(Page("t", "lead", [], [Section("s")], [], [])))
    assert reader.all("details") == reader.all("img") == reader.all("pre") == []
