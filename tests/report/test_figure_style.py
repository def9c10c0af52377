import re
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from attnconv.report.figure_style import printable, save
from attnconv.report.head_centres import HeadGaussians, draw_centres

HEADS = HeadGaussians([[0, 1], [2, -1]], [np.eye(2)] * 2)


def test_both_files_are_written_and_alike_each_time(tmp_path: Path) -> None:
    first = save(draw_centres([HEADS], title="t"), tmp_path / "new" / "figure-04.5")
    second = save(draw_centres([HEADS], title="t"), tmp_path / "again")
    assert [path.name for path in first] == ["figure-04.5.png", "figure-04.5.svg"]
    assert first[0].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert ET.parse(first[1]).getroot().tag.endswith("svg")
    assert b"date" not in first[1].read_bytes()


def test_for_publication_there_is_a_pdf_no_title_and_text_that_can_be_edited(tmp_path: Path) -> None:
    files = save(draw_centres([HEADS], title="a title"), tmp_path / "figure", publication=True)
    again = save(draw_centres([HEADS], title="a title"), tmp_path / "again", publication=True)
    assert [path.name for path in files] == ["figure.png", "figure.svg", "figure.pdf"]
    assert [path.read_bytes() for path in files] == [path.read_bytes() for path in again]
    drawing = files[1].read_text(encoding="utf-8")
    assert ("a title" in drawing, re.search(r"<text[^>]*>layer 0</text>", drawing) is not None) == (False, True)
    assert files[2].read_bytes().startswith(b"%PDF")
    plain = save(draw_centres([HEADS], title="a title"), tmp_path / "plain")
    assert "<text" not in plain[1].read_text(encoding="utf-8")


def test_settings_of_the_user_are_neither_used_nor_changed(tmp_path: Path) -> None:
    plain = save(draw_centres([HEADS], title="t"), tmp_path / "plain")
    with matplotlib.rc_context({"axes.facecolor": "red", "svg.hashsalt": "theirs", "lines.linewidth": 9.0}):
        styled = save(draw_centres([HEADS], title="t"), tmp_path / "styled")
        assert matplotlib.rcParams["svg.hashsalt"] == "theirs"
    assert plain[1].read_bytes() == styled[1].read_bytes()


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(FileExistsError, match="taken"):
        save(draw_centres([HEADS], title="t"), tmp_path / "taken" / "figure")


@pytest.mark.parametrize(
    ("text", "shown"), [("", ""), ("a\t b\x07\n", "a b?"), ("漢字 é", "?? é"), ("x" * 25, "x" * 20 + "\n" + "x" * 5)]
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text, width=20) == shown
