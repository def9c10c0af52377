"""What a page says it shows: read strictly, and its numbers."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from attnconv import LearnedRelativeContent, SelfAttention2d
from attnconv.explorer import Payload, Selection, attention_row, payload, read_payload
from attnconv.explorer.notebook import attention_of, question, selection_in

TOLD: dict[str, Any] = {"layer": 1, "head": 2, "query": [1, 4], "image": 1, "time": 0, "part": "both"}


@pytest.fixture(scope="module")
def shown() -> Payload:
    """Two layers on 4 x 5 tokens, by position with two heads and by content and position with three; two images."""
    encoding = LearnedRelativeContent(6, 3, max_shift=4)
    model = torch.nn.Sequential(SelfAttention2d(3, 6, heads=2), SelfAttention2d(6, 4, heads=3, encoding=encoding))
    return read_payload(payload(model, torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))))


class TestSelectionIn:
    def test_everything_that_is_told(self, shown: Payload) -> None:
        name = shown.layers[1].name
        assert selection_in(shown, TOLD) == Selection(1, name, 2, (1, 4), 1, 0, "both")
        assert selection_in(shown, {**TOLD, "image": None}) == Selection(1, name, 2, (1, 4), None, 0, "both")

    @pytest.mark.parametrize(
        ("entry", "value"),
        [
            ("layer", 2), ("layer", -1), ("layer", "1"), ("layer", True), ("layer", 1.0), ("head", 3), ("head", None),
            ("query", [4, 0]), ("query", [0, 5]), ("query", [0]), ("query", [0, 0, 0]), ("query", "00"),
            ("query", [0.5, 0]), ("query", {0: 0, 1: 0}), ("image", 2), ("image", -1), ("image", "0"), ("time", 1),
            ("time", -1), ("part", "all"), ("part", []),
        ],
    )  # fmt: skip
    def test_one_wrong_entry_and_nothing_is_taken(self, shown: Payload, entry: str, value: object) -> None:
        assert selection_in(shown, {**TOLD, entry: value}) is None

    @pytest.mark.parametrize("told", [None, [], "selection", 3, {}, {"layer": 1}])
    def test_what_is_no_selection(self, shown: Payload, told: object) -> None:
        assert selection_in(shown, told) is None


class TestAttentionOf:
    @pytest.mark.parametrize("part", ["both", "content", "position"])
    def test_the_row_of_the_reader(self, shown: Payload, part: Any) -> None:
        place = Selection(1, "", 2, (1, 4), 1, 0, part)
        torch.testing.assert_close(attention_of(shown, place), attention_row(shown, 1, 2, 9, image=1, part=part))

    def test_the_mean_over_images(self, shown: Payload) -> None:
        first, second = (attention_row(shown, 1, 0, 0, image=image) for image in (0, 1))
        assert not torch.allclose(first, second)
        torch.testing.assert_close(
            attention_of(shown, Selection(1, "", 0, (0, 0), None, 0, "both")), (first + second) / 2
        )

    def test_a_part_that_the_layer_lacks(self, shown: Payload) -> None:
        with pytest.raises(ValueError, match=r"part: .*got 'content'"):
            attention_of(shown, Selection(0, "", 0, (0, 0), 0, 0, "content"))


def asked(shown: Payload, told: Selection | None = None, **places: Any) -> dict[str, Any]:
    return question(shown, told, **{"pending": {}, "layer": None, "head": None, "query": None, "image": None, **places})


@pytest.fixture(scope="module")
def pyramid() -> Payload:
    """A layer on 4 x 6 tokens, one on 2 x 3."""
    layers = (SelfAttention2d(3, 3, heads=2), torch.nn.AvgPool2d(2), SelfAttention2d(3, 4, heads=3))
    return read_payload(payload(torch.nn.Sequential(*layers), torch.rand(1, 3, 4, 6)))


class TestQuestion:
    def test_what_is_not_given_stays(self, shown: Payload) -> None:
        assert asked(shown) == {}
        assert asked(shown, image=1) == {"image": 1}
        assert asked(shown, query=(3, 4)) == {"layer": 0, "query": [3, 4]}
        now = selection_in(shown, TOLD)
        assert asked(shown, now, query=(3, 4)) == {"layer": 1, "query": [3, 4]}
        assert asked(shown, now, head=1) == {"layer": 1, "head": 1}

    def test_a_layer_keeps_the_head_if_it_has_it(self, shown: Payload) -> None:
        now = selection_in(shown, TOLD)
        assert asked(shown, now, layer=0) == {"layer": 0, "head": 0}
        assert asked(shown, now, layer=1) == {"layer": 1, "head": 2}
        assert asked(shown, layer=shown.layers[1].name) == {"layer": 1, "head": 0}

    def test_what_the_payload_does_not_have(self, shown: Payload) -> None:
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"layer": 2}, "layer: must be at most 1, got 2"),
            ({"layer": True}, "layer: must be a whole number .*got True"),
            ({"layer": "none"}, r"layer: must be one of the payload's \(.*\), got 'none'"),
            ({"layer": 0, "head": 2}, "head: must be at most 1, got 2"),
            ({"query": (4, 0)}, r"query: must be \(row, column\) on the 4 x 5 tokens of layer .*, got \(4, 0\)"),
            ({"query": (1, 2, 3)}, r"query: must be .*, got \(1, 2, 3\)"),
            ({"image": 2}, "image: must be at most 1, got 2"),
        ]
        for places, words in wrong:
            with pytest.raises((TypeError, ValueError), match=words):
                asked(shown, **places)

    def test_what_is_pending_is_asked_again(self, shown: Payload) -> None:
        now = selection_in(shown, {**TOLD, "layer": 0, "head": 1})
        first = asked(shown, now, layer=1)
        second = asked(shown, now, pending=first, head=2)
        third = asked(shown, now, pending=second, query=(0, 0), image=0)
        assert first == {"layer": 1, "head": 1}
        assert second == {"layer": 1, "head": 2}
        assert third == {"layer": 1, "head": 2, "query": [0, 0], "image": 0}
        assert asked(shown, now, pending=third, layer=0) == {**third, "layer": 0, "head": 0}  # it has no head 2

    def test_what_is_pending_is_what_is_checked_against(self, shown: Payload) -> None:
        now = selection_in(shown, TOLD)
        with pytest.raises(ValueError, match=r"head: .*got 2"):
            asked(shown, now, pending={"layer": 0, "head": 0}, head=2)

    def test_a_pending_query_goes_along_to_a_layer_of_other_sizes(self, pyramid: Payload) -> None:
        assert [layer.sizes for layer in pyramid.layers] == [(4, 6), (2, 3)]
        before = asked(pyramid, layer=0, query=(3, 4))
        after = asked(pyramid, pending=before, layer=1)
        assert after == {"layer": 1, "head": 0, "query": [1, 2]}
        assert asked(pyramid, pending=after, layer=0)["query"] == [3, 5]  # the middle of (1, 2)
        assert asked(pyramid, pending=before, head=1)["query"] == [3, 4]

    @pytest.mark.parametrize("query", [
        np.array([3, 4]), torch.tensor([3, 4]), (np.int64(3), torch.tensor(4)), [np.array(3), np.uint8(4)],
    ])  # fmt: skip
    def test_whole_numbers_of_numpy_and_torch(self, shown: Payload, query: Any) -> None:
        message = asked(shown, layer=np.int64(1), head=torch.tensor(2), query=query, image=np.array(1))
        assert json.dumps(message) == '{"layer": 1, "head": 2, "query": [3, 4], "image": 1}'  # ints and nothing else

    @pytest.mark.parametrize("value", [
        True, 1.0, np.True_, np.float32(1), np.array([0, 1]), np.array(True), np.array(1.0), torch.tensor(True),
        torch.tensor(1.0), torch.tensor([0, 1]), b"1", np.int64(-1), torch.tensor(2),
    ])  # fmt: skip
    @pytest.mark.usefixtures("unhooked")
    def test_what_is_no_whole_number_in_range(self, shown: Payload, value: Any) -> None:
        for name in ("layer", "head", "image"):
            with pytest.raises((TypeError, ValueError), match=rf"{name}: .*got "):
                asked(shown, **{name: value})

    @pytest.mark.parametrize("query", [
        (True, 0), (0.0, 1), np.array([0.0, 1.0]), torch.tensor([True, False]), torch.tensor([[0, 1]]), np.array(1),
        torch.tensor(1), np.array([0, 5]), torch.tensor([-1, 0]), "00", {0: 0, 1: 0}, {0, 1}, torch.tensor([1]),
    ])  # fmt: skip
    @pytest.mark.usefixtures("unhooked")
    def test_what_is_no_place(self, shown: Payload, query: Any) -> None:
        with pytest.raises(ValueError, match=r"query: .*got "):
            asked(shown, query=query)
