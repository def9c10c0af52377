"""Payloads: what they contain, that they agree with the model, and errors for broken ones."""

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from attnconv import (
    Absolute,
    Content,
    GeneralizedQuadratic,
    Grid,
    LearnedRelative,
    LearnedRelativeContent,
    Quadratic,
    Relative,
    SelfAttention1d,
    SelfAttention2d,
    SelfAttention3d,
)
from attnconv.encodings import Encoding, SinusoidalPositions
from attnconv.encodings.base import gaussians_of
from attnconv.explorer import (
    Payload,
    PayloadLayer,
    Pictures,
    Snapshot,
    attention_row,
    payload,
    read_payload,
)
from attnconv.explorer.payload_layers import balance, content_tensors, shorten, store_layer
from attnconv.explorer.payload_write import BUDGET
from attnconv.inspect import audit, visit_attention
from attnconv.models import build
from attnconv.surgery import ablated
from attnconv.surgery.head_ablation import HeadChange
from experiments.small_vit import PoolingViT

SIZES = (5, 7)
POSITIONS: dict[str, Callable[[], Encoding]] = {
    "quadratic": lambda: Quadratic(4),
    "diagonal": lambda: Quadratic(4, diagonal=True, spread_std=0.5),
    "generalized": lambda: GeneralizedQuadratic(4, spread_std=0.5),
    "learned": lambda: LearnedRelative(4, channels=8, max_shift=3),
    "sinusoidal": lambda: Relative(8, 4, terms=("position-position",)),
}
CONTENT: dict[str, Callable[[], Encoding]] = {
    "learned-content": lambda: LearnedRelativeContent(8, 4, max_shift=3),
    "sinusoidal": lambda: Relative(8, 4),
    "absolute": lambda: Absolute(8, 4, positions=SinusoidalPositions(8, 2)),
}


def images(batch: int = 2, channels: int = 8, sizes: tuple[int, ...] = SIZES) -> Tensor:
    return torch.randn(batch, channels, *sizes, generator=torch.Generator().manual_seed(1))


def own(encoding: Encoding, **options: Any) -> SelfAttention2d:
    return SelfAttention2d(8, 6, 4, encoding=encoding, **options)


def all_rows(found: Payload, layer: int = 0, part: str = "both", image: int = 0) -> Tensor:
    """Return the rows (h, n, m) of a layer and image."""
    shown = found.layers[layer]
    count = math.prod(shown.sizes)
    rows = [
        torch.stack([attention_row(found, layer, head, n, image=image, part=part).flatten() for n in range(count)])
        for head in range(shown.heads)
    ]
    return torch.stack(rows)


def altered(content: bytes, change: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> bytes:
    """Change the manifest and tensors of a payload."""
    length = int.from_bytes(content[:8], "little")
    manifest = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["attnconv"])
    tensors = load(content)
    change(manifest, tensors)
    return save(tensors, {"attnconv": json.dumps(manifest)})


class TestPositions:
    @pytest.mark.parametrize("name", POSITIONS)
    def test_the_rows_are_the_layers_own(self, name: str) -> None:
        torch.manual_seed(0)
        layer = own(POSITIONS[name]()).double()
        found = read_payload(payload(layer, images().double()))
        assert found.layers[0].kind == "positions"
        torch.testing.assert_close(all_rows(found), layer.operator(images().double()).to_dense()[0], rtol=0, atol=1e-6)

    def test_far_centres_and_sharp_heads(self) -> None:
        encoding = Quadratic(4)
        with torch.no_grad():
            encoding.centres.copy_(torch.tensor([[-40.0, 0.25], [3.5, 90.0], [0.0, 0.5], [1e3, -1e3]]))
            encoding.spread.copy_(torch.tensor([[1.0], [0.3], [9.0], [3.0]]))
        layer = own(encoding).double()
        found = read_payload(payload(layer, images().double()))
        torch.testing.assert_close(all_rows(found), layer.operator(images().double()).to_dense()[0], rtol=0, atol=1e-6)

    @pytest.mark.parametrize("name", ["quadratic", "diagonal", "generalized"])
    def test_gaussian_heads_need_no_table(self, name: str) -> None:
        torch.manual_seed(0)
        content = payload(own(POSITIONS[name]()), images())
        assert read_payload(content).layers[0].tensors.keys() == {"centres", "precision"}
        assert {tuple(tensor.shape) for tensor in load(content).values()} == {(2, 5, 7, 3), (1, 4, 2), (1, 4, 2, 2)}

    def test_the_table_of_an_older_file_is_read(self) -> None:
        found = payload(own(Quadratic(4)), images())
        table = images(1, 4, (9, 13)).clone()
        older = read_payload(altered(found, lambda _, tensors: tensors.update({"0.shift_scores": table})))
        row = torch.softmax(table[0, 1, 3:8, 2:9].double().flatten(), 0).unflatten(0, SIZES)
        torch.testing.assert_close(attention_row(older, 0, 1, 1 * 7 + 4), row, rtol=1e-12, atol=0)

    def test_a_layer_that_runs_dense_or_as_shifts_shows_its_encoding(self) -> None:
        encoding = Quadratic(4)
        with torch.no_grad():
            encoding.spread.fill_(12.0)
            encoding.centres.round_()
        layer = own(encoding)
        assert layer.plan(SIZES) == "shift"
        found = read_payload(payload(layer, images()))
        assert found.layers[0].kind == "positions"
        torch.testing.assert_close(all_rows(found).float(), layer.operator(images()).to_dense()[0], rtol=0, atol=1e-6)

    def test_no_image_is_needed(self) -> None:
        found = read_payload(payload(own(Quadratic(4)), title="none"))
        assert (found.title, found.names, found.patch, len(found.images)) == ("none", (), (1, 1), 0)

    @pytest.mark.parametrize("start", [nn.Identity(), nn.Conv1d(5, 3, 3, padding=1)])
    def test_no_image_is_needed_along_one_axis(self, start: nn.Module) -> None:
        """The rows of 32 tokens are those of the layer's own operator."""
        layer = SelfAttention1d(3, 4, heads=4)
        found = read_payload(payload(nn.Sequential(start, layer)))
        assert (found.layers[0].sizes, found.layers[0].heads, found.names) == ((1, 32), 4, ("no image",))
        wanted = layer.operator(torch.zeros(1, 3, 32)).to_dense()[0].double()
        for head, query in ((0, 0), (3, 17)):
            torch.testing.assert_close(attention_row(found, 0, head, query)[0], wanted[head, query], rtol=0, atol=1e-3)

    @pytest.mark.parametrize(
        ("model", "words"),
        [
            (SelfAttention3d(3, 4, heads=4), "more than two axes, got none for 3 axes"),
            (nn.Conv3d(3, 4, 3), "more than two axes, got none for 3 axes"),
            (nn.Linear(3, 4), "got none for Linear"),
        ],
    )
    def test_models_for_which_no_image_can_be_made(self, model: nn.Module, words: str) -> None:
        with pytest.raises(ValueError, match=f"images: must be given .*{words}"):
            payload(model)

    def test_snapshots_are_stacked_before_the_present(self) -> None:
        model = nn.Sequential(own(Quadratic(4)), SelfAttention2d(6, 6, 2, encoding=LearnedRelative(2, channels=4)))
        shapes = (torch.zeros(4, 2).double(), torch.eye(2).double().expand(4, 2, 2))
        content = payload(model, images(), snapshots=[Snapshot("epoch 0", {"0": shapes})])
        found = read_payload(content)
        assert found.times == ("epoch 0", "now")
        assert found.layers[0].tensors["centres"][0].abs().sum() == 0
        table = found.layers[1].tensors["shift_scores"]
        assert torch.equal(table[0], table[1])
        rows = torch.stack([attention_row(found, 0, 0, 0, time=time) for time in (0, 1)])
        down, across = torch.arange(5.0).double(), torch.arange(7.0).double()
        gaussian = torch.softmax((-0.5 * (down[:, None] ** 2 + across**2)).flatten(), 0)
        torch.testing.assert_close(rows[0].flatten(), gaussian, rtol=0, atol=1e-6)
        assert not torch.allclose(rows[0], rows[1])
        half = attention_row(found, 0, 0, 0, time=0.5)
        between = (rows[0] * rows[1]).sqrt()
        torch.testing.assert_close(half, between / between.sum(), rtol=1e-10, atol=0)
        assert torch.equal(attention_row(found, 0, 0, 0, time=-2), rows[0])
        for time in (-3, -0.5, 1.5):
            with pytest.raises(ValueError, match=rf"time: .*got {time}"):
                attention_row(found, 0, 0, 0, time=time)

    def test_scores_of_snapshots_are_those_of_an_audit(self) -> None:
        torch.manual_seed(0)
        layer = own(GeneralizedQuadratic(4, spread_std=0.5))
        heads = gaussians_of(layer.encoding, "encoding")
        snapshots = [
            Snapshot("epoch 0", {"SelfAttention2d": (heads.centres.detach().double() + 1, heads.precision)}),
            Snapshot("epoch 1", {}),
        ]
        (stored,) = read_payload(payload(layer, images(), snapshots=snapshots)).layers
        with torch.no_grad():
            heads.centres.add_(1)
        score = audit(layer, images()).layers[0].statistics.convolution_score
        assert stored.scores[0] == pytest.approx(score, abs=1e-6)
        assert stored.scores[1:] == (None, stored.statistics["layer"]["score"])
        assert stored.scores[0] != stored.scores[2]


class Classifier(nn.Module):
    """Attention, and logits that name the image's brightest channel."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.drop = own(Quadratic(4)), nn.Dropout(0.9)

    def forward(self, pixels: Tensor) -> Tensor:
        self.attention(pixels)
        means: Tensor = self.drop(10 * pixels.mean((2, 3)))
        return means[:, :4]


class TestPredictions:
    def test_logits_of_the_model(self) -> None:
        pixels = images()
        pixels[0, 2] += 5
        pixels[1, 3] += 5
        shown = Pictures(torch.zeros(2, 5, 7, 3, dtype=torch.uint8), labels=("c", "a"))
        found = read_payload(payload(Classifier(), pixels, pictures=shown, classes=("a", "b", "c", "d"), random=True))
        assert (found.labels, found.random) == (("c", "a"), True)
        assert found.classes == ("a", "b", "c", "d")
        assert found.logits is not None
        torch.testing.assert_close(found.logits, (10 * pixels.mean((2, 3)))[:, :4])
        assert "zero_logits" not in found.layers[0].tensors

    def test_logits_with_changed_heads(self) -> None:
        torch.manual_seed(0)
        model = build("quadratic-digits", layers=2, width=9, mlp_width=9).eval()
        pixels, classes = torch.rand(2, 1, 8, 8), tuple("0123456789")
        found = read_payload(payload(model, pixels, classes=classes, ablations=True))
        kinds: tuple[HeadChange, ...] = ("zero", "convolution")
        for layer, kind in product(found.layers, kinds):
            logits = layer.tensors[f"{kind}_logits"]
            assert logits.shape == (2, 9, 10)
            for head in (0, 8):
                with torch.no_grad(), ablated(model, {layer.name: [head]}, to=kind):
                    torch.testing.assert_close(logits[:, head], model(pixels).half())

    @pytest.mark.parametrize("classes", [(), ("a", "b", "c")])
    def test_unknown_classes_are_not_predicted(self, classes: tuple[str, ...]) -> None:
        content = payload(Classifier(), images(), classes=classes)
        found = read_payload(content)
        assert (found.labels, found.classes, found.logits, found.random) == ((None, None), (), None, False)
        assert b"logits" not in content
        with pytest.raises(ValueError, match=r"ablations: must be False unless"):
            payload(Classifier(), images(), classes=classes, ablations=True)

    def test_no_images_no_predictions(self) -> None:
        found = read_payload(payload(own(Quadratic(4)), classes=("a",)))
        assert (found.labels, found.logits) == ((), None)

    def test_one_label_per_image(self) -> None:
        pixels = torch.zeros(2, 5, 7, 3, dtype=torch.uint8)
        with pytest.raises(ValueError, match=r"pictures: .*labels.*\(2\), got \('a',\)"):
            payload(own(Quadratic(4)), images(), pictures=Pictures(pixels, labels=("a",)))


class TestContent:
    @pytest.mark.parametrize("name", CONTENT)
    def test_the_rows_are_the_layers_own_within_the_stated_rounding(self, name: str) -> None:
        torch.manual_seed(0)
        layer = own(CONTENT[name]())
        found = read_payload(payload(layer, images()))
        assert found.layers[0].kind == "content"
        rounding = found.layers[0].statistics["layer"]["rounding of scores"]
        assert rounding is not None
        assert 0 < rounding < 2e-3
        for image in range(2):
            exact = layer.operator(images()).to_dense()[image].double()
            off = (all_rows(found, image=image) / exact).log().abs().max()
            assert off <= 2 * rounding + 1e-5  # the softmax of the layer is float32
            assert off > 1e-7  # half precision is not exact

    def test_each_part_alone(self) -> None:
        layer = own(LearnedRelativeContent(8, 4, max_shift=3))
        found = read_payload(payload(layer, images()))
        terms = layer.score_terms(images())
        for part, name in (("content", "content-content"), ("position", "content-position")):
            exact = torch.softmax(terms[name][0], -1).double()
            torch.testing.assert_close(all_rows(found, part=part), exact, rtol=4e-3, atol=1e-6)

    def test_no_position_part_where_positions_are_in_the_vectors(self) -> None:
        found = read_payload(payload(own(CONTENT["absolute"]()), images()))
        with pytest.raises(ValueError, match=r"part: .*got 'position'"):
            attention_row(found, 0, 0, 0, part="position")

    def test_a_budget_is_kept_and_its_price_is_said(self) -> None:
        torch.manual_seed(0)
        layer = own(LearnedRelativeContent(8, 4, head_channels=24, max_shift=3))
        full, small = (payload(layer, images(), budget=budget) for budget in (10**9, 35 * 4 * 2 * (2 * 9 + 12)))
        found = read_payload(small)
        assert found.layers[0].tensors["query"].shape[-1] == 9  # exact scores need at least rank 8 + 1
        assert len(small) < len(full)
        rounding = found.layers[0].statistics["layer"]["rounding of scores"]
        assert rounding is not None
        exact = layer.operator(images()).to_dense()[0].double()
        off = (all_rows(found) / exact).log().abs().max()
        assert off <= 2 * rounding + 1e-5
        assert rounding <= 0.01

    @pytest.mark.parametrize("numbers", [2 * 5 + 12, 2 + 12, 1])  # too few channels, one, none
    def test_no_rows_are_wrong_for_want_of_room(self, numbers: int) -> None:
        torch.manual_seed(0)
        layer = own(LearnedRelativeContent(8, 4, head_channels=24, max_shift=3))
        budget = 35 * 4 * 2 * numbers
        shown = read_payload(payload(layer, images(), budget=budget)).layers[0]
        assert (shown.kind, "rounding of scores" in shown.statistics["layer"]) == ("rows", False)
        queries = shown.tensors["queries"].long()
        assert shown.statistics["layer"]["queries stored"] == len(queries)
        assert len(queries) == 1 or sum(t.nbytes for t in shown.tensors.values()) <= 2 * budget  # two images
        exact = layer.operator(images()).rows(queries)
        torch.testing.assert_close(shown.tensors["probabilities"].float(), exact, rtol=2**-11, atol=1e-7)

    def test_six_layers_of_nine_heads_on_a_thousand_tokens(self) -> None:
        """Their row and column scores would need twice the budget."""
        torch.manual_seed(0)
        encodings = [LearnedRelativeContent(3, 9, max_shift=31) for _ in range(6)]
        layers = [SelfAttention2d(3, 3, 9, encoding=encoding) for encoding in encodings]
        model = nn.Sequential(*layers)
        batch = images(1, 3, (32, 32))
        found: dict[str, PayloadLayer] = {}

        def look(name: str, operator: Any) -> None:
            found[name] = store_layer(name, model.get_submodule(name), operator, budget=BUDGET // 6)

        visit_attention(model, batch, look)  # without the audit of `payload`, which is slow
        assert [layer.kind for layer in found.values()] == ["rows"] * 6
        stored = sum(tensor.nbytes for layer in found.values() for tensor in layer.tensors.values())
        assert 0.9 * BUDGET < stored <= BUDGET
        assert BUDGET * 4 / 3 < 4.8e6  # base64 of at most the 5 MB that are documented
        queries = found["0"].tensors["queries"].long()
        assert len(queries) == 30  # a lattice of 5 x 6 queries
        exact = layers[0].operator(batch).rows(queries)
        torch.testing.assert_close(found["0"].tensors["probabilities"].float(), exact, rtol=2**-11, atol=1e-7)

    @pytest.mark.parametrize("lowest", [-4910.0, -1e6])
    def test_position_scores_far_below_others_are_stored(self, lowest: float) -> None:
        """Content compensates for most of them, or they exceed the range of half precision."""
        queries, keys = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2)
        queries[..., 0], keys[..., 1, 0] = 70.0, 70.0
        columns = torch.zeros(1, 1, 3, 3)
        columns[..., 1] = lowest
        operator = Content(Grid.make((1, 3)), queries, keys, biases=(torch.zeros(1, 1, 3, 1), columns))
        found = content_tensors(operator, budget=10**6)
        assert found is not None
        tensors, rounding = found
        stored = tensors["query"].float() @ tensors["key"].float().mT + tensors["column_scores"].float()
        assert rounding <= 1
        torch.testing.assert_close(stored.softmax(-1), operator.to_dense(), rtol=0, atol=1e-4)

    def test_images_are_needed(self) -> None:
        with pytest.raises(ValueError, match=r"images: must be given, .*got"):
            payload(own(LearnedRelativeContent(8, 4)))

    def test_fewer_channels_are_exact_where_the_rank_allows(self) -> None:
        query, key = torch.randn(1, 2, 9, 3), torch.randn(1, 2, 9, 3)
        left, right = shorten(query, key, 3)
        off = left @ right.mT - query @ key.mT
        torch.testing.assert_close(off, off.mean(-1, keepdim=True).expand_as(off), rtol=0, atol=1e-5)

    def test_balanced_vectors_have_the_same_products(self) -> None:
        query, key = torch.randn(1, 2, 9, 3) * 1e-6, torch.randn(1, 2, 9, 3) * 1e6
        left, right = balance(query, key)
        assert torch.equal(left @ right.mT, query @ key.mT)
        assert right.abs().max() < 10


class TestArguments:
    def test_pictures_are_made_or_taken(self) -> None:
        found = read_payload(payload(own(Quadratic(4)), images()))
        assert found.names == ("image 0", "image 1")
        assert found.images.shape == (2, *SIZES, 3)
        assert (int(found.images.min()), int(found.images.max())) == (0, 255)
        pixels = torch.zeros(2, 10, 14, 3, dtype=torch.uint8)
        found = read_payload(payload(own(Quadratic(4)), images(), pictures=Pictures(pixels, ("a", "b"))))
        assert (found.names, found.images.shape) == (("a", "b"), pixels.shape)

    def test_pictures_that_do_not_fit(self) -> None:
        pixels = torch.zeros(3, 4, 4, 3, dtype=torch.uint8)
        with pytest.raises(ValueError, match=r"pictures: .*got 3"):
            payload(own(Quadratic(4)), images(), pictures=Pictures(pixels))
        with pytest.raises(ValueError, match=r"pictures: .*got \('a',\)"):
            payload(own(Quadratic(4)), images(), pictures=Pictures(pixels[:2], ("a",)))
        with pytest.raises(ValueError, match=r"pictures: .*got shape \(2, 8, 6\)"):
            payload(SelfAttention1d(8, 4, 2), images(sizes=(6,)))

    def test_a_budget_of_nothing(self) -> None:
        with pytest.raises(ValueError, match=r"budget: .*got 0"):
            payload(own(Quadratic(4)), images(), budget=0)

    @pytest.mark.parametrize("budget", [5e6, 2.5, "3", True, None])
    @pytest.mark.usefixtures("unhooked")
    def test_a_budget_that_is_no_whole_number(self, budget: Any) -> None:
        words = f"budget: .*got {re.escape(repr(budget))}"
        with pytest.raises(TypeError, match=words):
            payload(own(Quadratic(4)), images(), budget=budget)

    @pytest.mark.usefixtures("unhooked")
    def test_a_model_that_is_no_module(self) -> None:
        with pytest.raises(TypeError, match=r"model: .*got str"):
            payload("quadratic", images())  # type: ignore[arg-type]

    def test_statistics_are_the_audits(self) -> None:
        from attnconv.inspect import audit

        layer = own(Quadratic(4))
        numbers = audit(layer, images()).layers[0].numbers()
        statistics = read_payload(payload(layer, images())).layers[0].statistics
        assert statistics["layer"]["score"] == numbers["convolution_score"]
        assert statistics["heads"]["entropy"] == numbers["entropy"]
        assert statistics["heads"]["best column"] == [shift[1] for shift in numbers["best_shift"]]
        assert statistics["heads"]["content share"] == [0.0] * 4
        assert {len(values) for values in statistics["heads"].values()} == {4}

    def test_attention_that_cannot_be_read_is_left_out(self) -> None:
        with pytest.warns(UserWarning, match="left out: attn_pool$"):
            found = read_payload(payload(PoolingViT(), images(2, 3, sizes=(32, 32))))
        assert [layer.name for layer in found.layers] == ["blocks.0.attn", "blocks.1.attn"]
        assert list(found.left_out) == ["attn_pool"]

    @pytest.mark.parametrize(
        ("name", "value"), [("layer", 1), ("head", 4), ("head", -1), ("query", 35), ("time", 1), ("time", -2)]
    )
    def test_numbers_out_of_range(self, name: str, value: int) -> None:
        found = read_payload(payload(own(Quadratic(4)), images()))
        numbers = {"layer": 0, "head": 0, "query": 0} | {name: value}
        with pytest.raises(ValueError, match=rf"{name}: .*got {value}"):
            attention_row(found, **numbers)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"part: .*got 'all'"):
            attention_row(found, 0, 0, 0, part="all")


@functools.cache
def whole() -> bytes:
    """Return a valid payload."""
    torch.manual_seed(0)
    return payload(own(LearnedRelativeContent(8, 4, max_shift=3)), images())


class TestBroken:
    def test_every_cut_is_refused(self) -> None:
        content = whole()
        for length in {0, 1, 7, 8, 9, 100, *range(200, len(content), 997), len(content) - 1}:
            with pytest.raises(ValueError, match="payload: must be a complete safetensors"):
                read_payload(content[:length])

    def test_foreign_files(self) -> None:
        content = whole()
        for other in (
            b"\x89PNG\r\n\x1a\n" + b"\0" * 100,
            b"{}" * 50,
            b"\xff" * 64,
            (20).to_bytes(8, "little") + b"[" * 64,
        ):
            with pytest.raises(ValueError, match="payload: must be a"):
                read_payload(other)
        with pytest.raises(ValueError, match=r"payload: .*got none"):
            read_payload(save({"x": torch.zeros(1)}))
        with pytest.raises(ValueError, match=r"payload: .* manifest"):
            read_payload(save({"x": torch.zeros(1)}, {"attnconv": "{"}))
        with pytest.raises(ValueError, match=r"payload: .*\b2\b"):
            read_payload(altered(content, lambda manifest, _: manifest.update(format=2)))

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda m, t: m.update(times=[]), r"got .*\$.times"),
            (lambda m, t: m.update(layers=[]), r"got .*\$.layers"),
            (lambda m, t: m.update(title=3), r"got .*int.*\$.title"),
            (lambda m, t: m.update(patch=[1]), r"got .*\$.patch"),
            (lambda m, t: m.update(images=[]), "images .*uint8 of shape 0 x 5 x 7 x 3, got .*2, 5, 7, 3"),
            (lambda m, t: m["layers"][0].update(kind="magic"), r"got .*'magic'.*\$.layers\[0\].kind"),
            (lambda m, t: m["layers"][0].update(heads=True), r"got .*bool.*\$.layers\[0\].heads"),
            (lambda m, t: m["layers"][0].update(heads=5), "statistics.heads.best row must be"),
            (lambda m, t: m["layers"][0].update(tensors={"key": 3}), r"got .*int.*\$.layers\[0\].tensors"),
            (
                lambda m, t: m["layers"][0].update(heads=5, statistics={"heads": {}, "layer": {}}),
                "0.query .*float16 of shape 2 x 5 x 35 x 8, got .*2, 4, 35, 8",
            ),
            (lambda m, t: m["layers"][0].update(sizes=[5, -7]), r"got .*\$.layers\[0\].sizes\[1\]"),
            (lambda m, t: m["layers"][0].update(statistics=[]), r"got .*\$.layers\[0\].statistics"),
            (lambda m, t: t.pop("0.key"), "tensor 0.key, got none"),
            (lambda m, t: t.pop("0.row_scores"), "tensors of layer 0 must be .*row_scores"),
            (lambda m, t: m.update(random="yes"), r"got .*str.*\$.random"),
            (lambda m, t: m["images"][0].update(label=3), r"got .*int.*\$.images\[0\].label"),
            (lambda m, t: t.update(logits=torch.zeros(2, 3)), r"tensor logits must be float32 of shape 2 x 0"),
            (lambda m, t: t.update({"0.zero_logits": torch.zeros(2, 4, 0).half()}), "must be both zero_logits"),
            (lambda m, t: m["layers"][0].update(scores=[0.5, None]), r"layers\[0\].scores must have .*\(1\), got 2"),
            (lambda m, t: t["0.key"].fill_(math.nan), "tensor 0.key must be finite"),
            (lambda m, t: t.update({"0.key": t["0.key"].float()}), "tensor 0.key must be float16 .*got torch.float32"),
        ],
    )
    def test_manifest_and_tensors_that_do_not_fit(
        self, change: Callable[[Mapping[str, Any], Mapping[str, Tensor]], object], words: str
    ) -> None:
        with pytest.raises(ValueError, match=words):
            read_payload(altered(whole(), change))


def test_shortened_scores_are_stored_up_to_two_percent_of_a_probability() -> None:
    """Scores whose rounding error grows in small steps, stored in 8 of 24 channels."""
    generator, channels = torch.Generator().manual_seed(0), 24
    left, right = (torch.linalg.qr(torch.randn(64, channels, generator=generator))[0] for _ in range(2))
    sizes = 2.0 ** -torch.arange(channels)
    coarsest = 0.0
    for scale in torch.linspace(8, 80, 25).tolist():
        operator = Content(Grid.make((8, 8)), (scale * sizes * left)[None, None], right[None, None])
        found = content_tensors(operator, budget=2 * 64 * (8 + 8))
        if found is not None:
            stored = found[0]["query"].float() @ found[0]["key"].float().mT
            exact = operator.queries @ operator.keys.mT
            wrong = (stored.softmax(-1) / exact.softmax(-1) - 1).abs().max()
            assert wrong <= 0.021
            coarsest = max(coarsest, math.expm1(2 * found[1]))
    assert found is None  # the errors of the last scores are larger
    assert 0.016 < coarsest <= 0.021
