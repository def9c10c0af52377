"""The page in a notebook: its channel back to Python. The frame itself is tested with the page (test_page.py)."""

import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from attnconv import SelfAttention2d
from attnconv.explorer import Explorer, Selection, attention_row, explore, notebook, read_payload
from attnconv.explorer.notebook import channel_class
from tests.explorer.pages import place_stand_in

NEEDS = "the extra 'notebook' is not installed"


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Explorer:
    """Two heads on 4 x 5 tokens, with a page that stands in for the real one."""
    place_stand_in(tmp_path, monkeypatch)
    return explore(SelfAttention2d(3, 4, heads=2), torch.rand(1, 3, 4, 5), title="two heads", height=500)


class TestWithoutAnywidget:
    @pytest.fixture(autouse=True)
    def absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "anywidget", None)  # its import then fails
        channel_class.cache_clear()

    def test_every_way_through_the_channel_says_what_to_install(self, shown: Explorer) -> None:
        ways = (lambda: shown.selection, lambda: shown.widget, shown.attention, lambda: shown.select(head=1))
        for way in ways:
            with pytest.raises(ImportError, match=r"anywidget: .*pip install 'attnconv\[notebook\]'"):
                way()

    def test_the_page_is_shown_all_the_same(self, shown: Explorer) -> None:
        assert shown._repr_mimebundle_() == {"text/plain": repr(shown), "text/html": shown._repr_html_()}

    def test_the_module_imports_without_it(self) -> None:
        assert notebook.__file__ is not None
        runpy.run_path(notebook.__file__)


class TestChannel:
    @pytest.fixture(autouse=True)
    def present(self) -> None:
        pytest.importorskip("anywidget", reason=NEEDS)

    def test_nothing_is_selected_before_the_page_tells(self, shown: Explorer) -> None:
        assert shown.selection is None
        with pytest.raises(ValueError, match=r"selection: .*got none"):
            shown.attention()

    def test_what_the_page_tells_and_its_numbers(self, shown: Explorer) -> None:
        told = {"layer": 0, "head": 1, "query": [2, 3], "image": 0, "time": 0, "part": "both"}
        shown.widget.told = told
        assert shown.selection == Selection(0, "SelfAttention2d", 1, (2, 3), 0, 0, "both")
        torch.testing.assert_close(shown.attention(), attention_row(read_payload(shown.content), 0, 1, 13))
        shown.widget.told = {**told, "head": 2}
        assert shown.selection is None

    def test_every_question_is_a_change(self, shown: Explorer) -> None:
        assert shown.widget.asked == [0, {}]
        shown.select(head=1, query=(2, 3))
        shown.select(head=1, query=(2, 3))
        assert shown.widget.asked == [2, {"layer": 0, "head": 1, "query": [2, 3]}]
        with pytest.raises(ValueError, match=r"head: .*got 2"):
            shown.select(head=2)
        assert shown.widget.asked[0] == 2

    def test_showing_opens_the_channel_and_stays_html(self, shown: Explorer) -> None:
        bundle = shown._repr_mimebundle_()
        assert sorted(bundle) == ["text/html", "text/plain"]
        channel = shown._channel
        assert f'data-attnconv="{channel.mark}"' in bundle["text/html"]
        assert channel.page == ""  # the page is in the HTML, and not sent twice
        assert shown.widget is channel
        assert channel.page == shown._page
        assert (channel.height, channel.title) == (500, "attnconv explorer: two heads")

    def test_each_explorer_has_a_mark_of_its_own(self, shown: Explorer) -> None:
        assert Explorer(shown.content).widget.mark != shown.widget.mark

    def test_all_traits_of_the_channel_are_kept_equal(self, shown: Explorer) -> None:
        assert {"mark", "told", "asked", "page", "title", "height", "sandbox", "_esm"} <= set(shown.widget.get_state())


class TestCallsInARow:
    """On layers `0` with two heads and `1` with nine. What the page tells is stood in for; it arrives between cells."""

    START: ClassVar[Mapping[str, Any]] = {"layer": 0, "head": 0, "query": [2, 2], "image": 0, "time": 0, "part": "both"}

    @pytest.fixture
    def two(self, shown: Explorer) -> Explorer:
        pytest.importorskip("anywidget", reason=NEEDS)
        model = torch.nn.Sequential(SelfAttention2d(3, 4, heads=2), SelfAttention2d(4, 4, heads=9))
        return explore(model, torch.rand(2, 3, 4, 5))

    def test_of_a_page_that_is_shown(self, two: Explorer) -> None:
        two.widget.told = {**self.START, "head": 1}
        two.select(layer="1")
        two.select(head=5)  # which layer 0 does not have
        two.select(query=(0, 0))
        assert two.widget.asked == [3, {"layer": 1, "head": 5, "query": [0, 0]}]

    def test_of_a_page_that_is_not_shown_yet(self, two: Explorer) -> None:
        two.select(layer="1", head=5)
        two.select(image=1)
        assert two.widget.asked == [2, {"layer": 1, "head": 5, "image": 1}]
        two.widget.told = self.START  # it opens, and is asked only then
        two.select(query=(3, 4))
        assert two.widget.asked == [3, {"layer": 1, "head": 5, "image": 1, "query": [3, 4]}]

    def test_an_answer_ends_what_is_pending(self, two: Explorer) -> None:
        two.select(layer="1", head=5, image=1)
        two.widget.told = self.START
        two.widget.told = {**self.START, "layer": 1, "head": 5, "image": 1}
        two.select(query=(3, 4))
        assert two.widget.asked == [2, {"layer": 1, "query": [3, 4]}]

    def test_a_later_move_of_the_visitor_ends_what_is_pending(self, two: Explorer) -> None:
        two.widget.told = self.START
        two.select(layer="1", head=5)
        two.widget.told = {**self.START, "head": 1}
        two.select(query=(0, 0))
        assert two.widget.asked == [2, {"layer": 0, "query": [0, 0]}]
        with pytest.raises(ValueError, match=r"head: .*got 5"):
            two.select(head=5)

    def test_a_refused_call_leaves_what_is_pending(self, two: Explorer) -> None:
        two.select(layer="1", head=5)
        with pytest.raises(ValueError, match=r"image: .*got 2"):
            two.select(head=6, image=2)
        two.select(query=(0, 0))
        assert two.widget.asked == [2, {"layer": 1, "head": 5, "query": [0, 0]}]
