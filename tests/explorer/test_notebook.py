"""The page in a notebook: its channel to Python, and what it reports. The frame is tested with the page."""

import json
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from attnconv import LearnedRelativeContent, SelfAttention2d
from attnconv.explorer import (
    Explorer,
    Payload,
    Selection,
    Snapshot,
    attention_row,
    explore,
    notebook,
    payload,
    read_payload,
)
from attnconv.explorer.notebook import attention_of, channel_class, question, selection_in
from tests.explorer.pages import place_stand_in

NEEDS = "the extra 'notebook' is not installed"


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Explorer:
    """Return an explorer of two heads on 4 x 5 tokens, with a placeholder for the page."""
    place_stand_in(tmp_path, monkeypatch)
    return explore(SelfAttention2d(3, 4, heads=2), torch.rand(1, 3, 4, 5), title="two heads", height=500)


class TestWithoutAnywidget:
    @pytest.fixture(autouse=True)
    def absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "anywidget", None)  # importing it then fails
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
        assert channel.page == ""  # the page is in the HTML, and not sent again
        assert shown.widget is channel
        assert channel.page == shown._page
        assert (channel.height, channel.title) == (500, "attnconv explorer: two heads")

    def test_each_explorer_has_a_mark_of_its_own(self, shown: Explorer) -> None:
        assert Explorer(shown.content).widget.mark != shown.widget.mark

    def test_all_traits_of_the_channel_are_kept_equal(self, shown: Explorer) -> None:
        assert {"mark", "told", "asked", "page", "title", "height", "sandbox", "_esm"} <= set(shown.widget.get_state())


class TestCallsInARow:
    """Layer `0` has two heads and layer `1` nine. The tests set what the page reports, which arrives between cells."""

    START: ClassVar[Mapping[str, Any]] = {"layer": 0, "head": 0, "query": [2, 2], "image": 0, "time": 0, "part": "both"}

    @pytest.fixture
    def two(self, shown: Explorer) -> Explorer:
        pytest.importorskip("anywidget", reason=NEEDS)
        model = torch.nn.Sequential(SelfAttention2d(3, 4, heads=2), SelfAttention2d(4, 4, heads=9))
        return explore(model, torch.rand(2, 3, 4, 5))

    def test_of_a_page_that_is_shown(self, two: Explorer) -> None:
        two.widget.told = {**self.START, "head": 1}
        two.select(layer="1")
        two.select(head=5)  # layer 0 has no head 5
        two.select(query=(0, 0))
        assert two.widget.asked == [3, {"layer": 1, "head": 5, "query": [0, 0]}]

    def test_of_a_page_that_is_not_shown_yet(self, two: Explorer) -> None:
        two.select(layer="1", head=5)
        two.select(image=1)
        assert two.widget.asked == [2, {"layer": 1, "head": 5, "image": 1}]
        two.widget.told = self.START  # the page opens, and only then receives the selection
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


TOLD: dict[str, Any] = {"layer": 1, "head": 2, "query": [1, 4], "image": 1, "time": 0, "part": "both"}


@pytest.fixture(scope="module")
def opened() -> Payload:
    """Return a payload of two images on 4 x 5 tokens: two heads with position scores, three that also use content."""
    encoding = LearnedRelativeContent(6, 3, max_shift=4)
    model = torch.nn.Sequential(SelfAttention2d(3, 6, heads=2), SelfAttention2d(6, 4, heads=3, encoding=encoding))
    return read_payload(payload(model, torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))))


class TestSelectionIn:
    def test_everything_that_is_told(self, opened: Payload) -> None:
        name = opened.layers[1].name
        assert selection_in(opened, TOLD) == Selection(1, name, 2, (1, 4), 1, 0, "both")
        assert selection_in(opened, {**TOLD, "image": None}) == Selection(1, name, 2, (1, 4), None, 0, "both")

    @pytest.mark.parametrize(
        ("entry", "value"),
        [
            ("layer", 2), ("layer", -1), ("layer", "1"), ("layer", True), ("layer", 1.0), ("head", 3), ("head", None),
            ("query", [4, 0]), ("query", [0, 5]), ("query", [0]), ("query", [0, 0, 0]), ("query", "00"),
            ("query", [0.5, 0]), ("query", {0: 0, 1: 0}), ("image", 2), ("image", -1), ("image", "0"), ("time", 1),
            ("time", -1), ("part", "all"), ("part", []),
        ],
    )  # fmt: skip
    def test_one_wrong_entry_and_nothing_is_taken(self, opened: Payload, entry: str, value: object) -> None:
        assert selection_in(opened, {**TOLD, entry: value}) is None

    def test_a_time_between_two_snapshots(self) -> None:
        heads = (torch.zeros(2, 2).double(), torch.eye(2).double().expand(2, 2, 2))
        snapshots = [Snapshot("epoch 0", {"SelfAttention2d": heads})]
        found = read_payload(payload(SelfAttention2d(3, 4, heads=2), torch.rand(1, 3, 4, 5), snapshots=snapshots))
        told = {**TOLD, "layer": 0, "head": 0, "image": 0}
        between = selection_in(found, {**told, "time": 0.5})
        assert between is not None
        assert torch.equal(attention_of(found, between), attention_row(found, 0, 0, 1 * 5 + 4, time=0.5))
        assert repr(selection_in(found, {**told, "time": 1})).count("time=1,") == 1
        for time in (1.5, -0.5, float("nan")):
            assert selection_in(found, {**told, "time": time}) is None

    @pytest.mark.parametrize("told", [None, [], "selection", 3, {}, {"layer": 1}])
    def test_what_is_no_selection(self, opened: Payload, told: object) -> None:
        assert selection_in(opened, told) is None


class TestAttentionOf:
    @pytest.mark.parametrize("part", ["both", "content", "position"])
    def test_the_row_of_the_reader(self, opened: Payload, part: Any) -> None:
        place = Selection(1, "", 2, (1, 4), 1, 0, part)
        torch.testing.assert_close(attention_of(opened, place), attention_row(opened, 1, 2, 9, image=1, part=part))

    def test_the_mean_over_images(self, opened: Payload) -> None:
        first, second = (attention_row(opened, 1, 0, 0, image=image) for image in (0, 1))
        assert not torch.allclose(first, second)
        torch.testing.assert_close(
            attention_of(opened, Selection(1, "", 0, (0, 0), None, 0, "both")), (first + second) / 2
        )

    def test_a_part_that_the_layer_lacks(self, opened: Payload) -> None:
        with pytest.raises(ValueError, match=r"part: .*got 'content'"):
            attention_of(opened, Selection(0, "", 0, (0, 0), 0, 0, "content"))


def asked(opened: Payload, told: Selection | None = None, **places: Any) -> dict[str, Any]:
    return question(opened, told, **{"pending": {}, **places})


@pytest.fixture(scope="module")
def pyramid() -> Payload:
    """Return a payload with a layer on 4 x 6 tokens and a layer on 2 x 3 tokens."""
    layers = (SelfAttention2d(3, 3, heads=2), torch.nn.AvgPool2d(2), SelfAttention2d(3, 4, heads=3))
    return read_payload(payload(torch.nn.Sequential(*layers), torch.rand(1, 3, 4, 6)))


class TestQuestion:
    def test_what_is_not_given_stays(self, opened: Payload) -> None:
        assert asked(opened) == {}
        assert asked(opened, image=1) == {"image": 1}
        assert asked(opened, query=(3, 4)) == {"layer": 0, "query": [3, 4]}
        now = selection_in(opened, TOLD)
        assert asked(opened, now, query=(3, 4)) == {"layer": 1, "query": [3, 4]}
        assert asked(opened, now, head=1) == {"layer": 1, "head": 1}

    def test_a_layer_keeps_the_head_if_it_has_it(self, opened: Payload) -> None:
        now = selection_in(opened, TOLD)
        assert asked(opened, now, layer=0) == {"layer": 0, "head": 0}
        assert asked(opened, now, layer=1) == {"layer": 1, "head": 2}
        assert asked(opened, layer=opened.layers[1].name) == {"layer": 1, "head": 0}

    def test_what_the_payload_does_not_have(self, opened: Payload) -> None:
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"layer": 2}, "layer: must be at most 1, got 2"),
            ({"layer": True}, "layer: .*got True"),
            ({"layer": "none"}, r"layer: .*got 'none'"),
            ({"layer": 0, "head": 2}, "head: must be at most 1, got 2"),
            ({"query": (4, 0)}, r"query: .*got \(4, 0\)"),
            ({"query": (1, 2, 3)}, r"query: must be .*, got \(1, 2, 3\)"),
            ({"image": 2}, "image: must be at most 1, got 2"),
        ]
        for places, words in wrong:
            with pytest.raises((TypeError, ValueError), match=words):
                asked(opened, **places)

    def test_what_is_pending_is_asked_again(self, opened: Payload) -> None:
        now = selection_in(opened, {**TOLD, "layer": 0, "head": 1})
        first = asked(opened, now, layer=1)
        second = asked(opened, now, pending=first, head=2)
        third = asked(opened, now, pending=second, query=(0, 0), image=0)
        assert first == {"layer": 1, "head": 1}
        assert second == {"layer": 1, "head": 2}
        assert third == {"layer": 1, "head": 2, "query": [0, 0], "image": 0}
        assert asked(opened, now, pending=third, layer=0) == {**third, "layer": 0, "head": 0}  # layer 0 has no head 2

    def test_what_is_pending_is_what_is_checked_against(self, opened: Payload) -> None:
        now = selection_in(opened, TOLD)
        with pytest.raises(ValueError, match=r"head: .*got 2"):
            asked(opened, now, pending={"layer": 0, "head": 0}, head=2)

    def test_a_pending_query_goes_along_to_a_layer_of_other_sizes(self, pyramid: Payload) -> None:
        assert [layer.sizes for layer in pyramid.layers] == [(4, 6), (2, 3)]
        before = asked(pyramid, layer=0, query=(3, 4))
        after = asked(pyramid, pending=before, layer=1)
        assert after == {"layer": 1, "head": 0, "query": [1, 2]}
        assert asked(pyramid, pending=after, layer=0)["query"] == [3, 5]  # the centre of (1, 2)
        assert asked(pyramid, pending=before, head=1)["query"] == [3, 4]

    @pytest.mark.parametrize("query", [
        np.array([3, 4]), torch.tensor([3, 4]), (np.int64(3), torch.tensor(4)), [np.array(3), np.uint8(4)],
    ])  # fmt: skip
    def test_whole_numbers_of_numpy_and_torch(self, opened: Payload, query: Any) -> None:
        message = asked(opened, layer=np.int64(1), head=torch.tensor(2), query=query, image=np.array(1))
        assert json.dumps(message) == '{"layer": 1, "head": 2, "query": [3, 4], "image": 1}'  # plain ints

    @pytest.mark.parametrize("value", [
        True, 1.0, np.True_, np.float32(1), np.array([0, 1]), np.array(True), np.array(1.0), torch.tensor(True),
        torch.tensor(1.0), torch.tensor([0, 1]), b"1", np.int64(-1), torch.tensor(2),
    ])  # fmt: skip
    @pytest.mark.usefixtures("unhooked")
    def test_what_is_no_whole_number_in_range(self, opened: Payload, value: Any) -> None:
        for name in ("layer", "head", "image"):
            with pytest.raises((TypeError, ValueError), match=rf"{name}: .*got "):
                asked(opened, **{name: value})

    @pytest.mark.parametrize("query", [
        (True, 0), (0.0, 1), np.array([0.0, 1.0]), torch.tensor([True, False]), torch.tensor([[0, 1]]), np.array(1),
        torch.tensor(1), np.array([0, 5]), torch.tensor([-1, 0]), "00", {0: 0, 1: 0}, {0, 1}, torch.tensor([1]),
    ])  # fmt: skip
    @pytest.mark.usefixtures("unhooked")
    def test_what_is_no_place(self, opened: Payload, query: Any) -> None:
        with pytest.raises(ValueError, match=r"query: .*got "):
            asked(opened, query=query)
