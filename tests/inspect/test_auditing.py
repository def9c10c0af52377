"""`audit`: statistics of every attention layer of a model, and errors for invalid arguments."""

import itertools
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnconv import LearnedRelativeContent, Quadratic, SelfAttention2d, from_conv
from attnconv.encodings import SeparableEncoding
from attnconv.inspect import audit, layer_statistics, sample_queries, visit_attention
from attnconv.operators import AttentionOperator
from attnconv.surgery import replace_heads
from experiments.small_vit import AttentionPool, PoolingViT, SmallViT
from tests.tolerances import tolerance


def images(count: int = 3, *, sizes: tuple[int, int] = (8, 9), channels: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(count, channels, *sizes, generator=torch.Generator().manual_seed(seed))


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 16, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def own() -> nn.Sequential:
    """Return a model with a convolution as attention, soft heads, and heads that attend by content."""
    torch.manual_seed(0)
    soft = SelfAttention2d(6, 6, heads=5, encoding=Quadratic(5))
    content = SelfAttention2d(6, 4, heads=2, encoding=LearnedRelativeContent(6, 2, head_channels=4, max_shift=8))
    return nn.Sequential(from_conv(nn.Conv2d(3, 6, 3, padding=1)), soft, nn.ReLU(), content)


class BoundToSize(SeparableEncoding):
    """Encoding with one score per position, for images of one size."""

    def __init__(self, size: int) -> None:
        super().__init__(2, 2)
        self.size = size

    def axis_scores(self, axis: int, shifts: Tensor) -> Tensor:
        if len(shifts) != self.size:
            raise RuntimeError(f"{self.size} positions are wanted, not {len(shifts)}")
        return -shifts.abs().expand(2, *shifts.shape)


class Twice(nn.Module):
    """Attention layer that runs twice, on an image and then on half of it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention2d(3, 3, heads=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.attention(x)[..., ::2])


class TestNumbers:
    def test_of_layers_of_this_library(self) -> None:
        found = audit(own(), images())
        assert [layer.name for layer in found.layers] == ["0", "1", "3"]
        exact, soft, content = found.layers
        assert exact.statistics.convolution_score == pytest.approx(1, abs=1e-6)
        assert soft.statistics.convolution_score < 0.9
        assert [layer.position_only for layer in found.layers] == [True, True, False]
        assert exact.span_residual == pytest.approx(0, abs=1e-9)
        assert soft.span_residual is not None
        assert soft.span_residual > 0.1
        assert content.span_residual is None
        assert content.statistics.content_share is not None
        assert found.images == 3
        assert [layer.sizes for layer in found.layers] == [(8, 9)] * 3

    def test_are_the_statistics_of_each_operator(self) -> None:
        model, tokens = encoder(), torch.randn(4, 31, 16, generator=torch.Generator().manual_seed(1))
        found = audit(model, tokens, grid=(5, 6), prefix=1, queries=12)
        seen: dict[str, Any] = {}

        def look(name: str, operator: AttentionOperator) -> None:
            seen[name] = layer_statistics(operator, queries=sample_queries(operator.grid, 12))

        visit_attention(model, tokens, look, grid=(5, 6), prefix=1)
        assert [layer.name for layer in found.layers] == list(seen)
        for layer in found.layers:
            assert (layer.queries, layer.query_count) == (12, 30)
            expected = seen[layer.name]
            assert layer.statistics.convolution_score == expected.convolution_score
            assert float(layer.statistics.padding_mass.min()) > 0
            for name in ("entropy", "constancy", "padding_mass", "content_share", "distance"):
                torch.testing.assert_close(
                    getattr(layer.statistics, name), getattr(expected, name), **tolerance(torch.float64)
                )

    def test_do_not_depend_on_how_images_are_batched(self) -> None:
        model, all_images = own(), images(6)
        whole = audit(model, all_images, batch=3)
        parts: Iterator[Tensor] = iter(all_images.split(3))
        pieces = audit(model, parts, batch=8)
        assert whole.images == pieces.images == 6
        assert whole.numbers() == pieces.numbers()

    def test_a_module_that_attends_twice_is_two_layers(self) -> None:
        found = audit(Twice(), images())
        assert [(layer.name, layer.sizes) for layer in found.layers] == [
            ("attention", (8, 9)),
            ("attention (call 2)", (8, 5)),
        ]

    def test_a_single_layer_has_the_name_of_its_class(self) -> None:
        assert [layer.name for layer in audit(own()[0], images()).layers] == ["SelfAttention2d"]

    def test_layers_can_be_chosen(self) -> None:
        found = audit(own(), images(), layers=["1"])
        assert [layer.name for layer in found.layers] == ["1"]
        assert found["1"].kind == "SelfAttention2d"

    def test_a_layer_bound_to_its_size_has_no_residual_and_says_why(self) -> None:
        encoding: Any = BoundToSize(24)
        model = nn.Sequential(SelfAttention2d(3, 4, heads=2, encoding=encoding), own()[0].__class__(4, 3, heads=2))
        bound, free = audit(model, images(sizes=(24, 24))).layers
        assert bound.position_only
        assert bound.span_residual is None
        assert re.fullmatch("on 16 x 16 positions .*: 24 positions are wanted, not 16", bound.span_unknown)
        assert bound.numbers()["span_unknown"] == bound.span_unknown
        assert (free.span_residual is None, free.span_unknown) == (False, "")

    def test_as_json(self) -> None:
        found = audit(own(), images(1)).numbers()
        again = json.loads(json.dumps(found, allow_nan=False))
        assert again["layers"][0]["convolution_score"] == pytest.approx(1, abs=1e-6)
        shifts = [tuple(shift) for shift in again["layers"][0]["best_shift"]]
        assert sorted(shifts) == list(itertools.product((-1, 0, 1), repeat=2))
        assert again["layers"][2]["content_share"] is None  # undefined for a single image

    def test_printed(self) -> None:
        lines = str(audit(own(), images())).splitlines()
        assert lines[0].split() == ["layer", "heads", "score", "coverage", "redundancy", "constancy"]
        assert lines[1].split()[:3] == ["0", "9", "1.000"]

    def test_the_model_is_left_in_its_mode(self) -> None:
        model = own().train()
        audit(model, images())
        assert model.training


class Scaled(nn.Module):
    """Model with inputs other than images."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = encoder(1)

    def forward(self, x: Tensor, *, scale: float, **more: object) -> Tensor:
        return self.attention(scale * x.flatten(2).mT, **more)


class TestOptions:
    def test_reach_the_model(self) -> None:
        given = images(channels=16)
        sharp, even = (audit(Scaled(), given, options={"scale": scale}).layers[0] for scale in (9.0, 0.0))
        assert float(even.statistics.entropy.mean()) == pytest.approx(math.log(72), rel=1e-5)
        assert float(sharp.statistics.entropy.mean()) < 4

    @pytest.mark.parametrize(
        ("options", "got"),
        [
            (None, r"none. .*: missing a required (keyword-only )?argument: 'scale'"),
            ({"size": 1}, "size. .*: missing"),
            ({"scale": 1.0, "size": 1}, "scale, size. .*: .*unexpected keyword argument 'size'"),
        ],
    )
    def test_that_are_wrong_are_named_and_not_the_images(self, options: Any, got: str) -> None:
        with pytest.raises(ValueError, match=rf"^options: .*got {got}"):
            audit(Scaled(), images(channels=16), options=options)


class TestLeftOut:
    def test_what_cannot_be_read_is_named(self) -> None:
        model = PoolingViT()
        with pytest.warns(UserWarning, match="left out: attn_pool"):
            found = audit(model, images(sizes=(32, 32)), batch=2)
        assert [layer.name for layer in found.layers] == ["blocks.0.attn", "blocks.1.attn"]
        assert list(found.left_out) == ["attn_pool"]
        reason = found.left_out["attn_pool"]
        assert re.search("none of its queries is a token of the image", reason)
        assert str(found).endswith(f"Left out attn_pool: {reason}.")
        assert found.numbers()["left_out"] == {"attn_pool": reason}
        others = audit(model, images(sizes=(32, 32)), batch=2, layers=["blocks.0.attn", "blocks.1.attn"])
        assert others.numbers()["layers"] == found.numbers()["layers"]
        assert others.left_out == {}

    def test_layers_that_are_named_are_not(self) -> None:
        with pytest.raises(ValueError, match="module 'attn_pool' must be readable"):
            audit(PoolingViT(), images(sizes=(32, 32)), layers=["attn_pool"])

    def test_replaced_heads_are(self) -> None:
        model = replace_heads(SmallViT().eval(), images(sizes=(32, 32)), heads={"blocks.0.attn": [1, 2]}).model
        with pytest.warns(UserWarning, match=r"left out: blocks\.0\.attn"):
            found = audit(model, images(sizes=(32, 32)))
        assert [layer.name for layer in found.layers] == ["blocks.1.attn"]
        assert found.left_out["blocks.0.attn"].startswith("its heads 1, 2 were replaced")


class TestRefusals:
    def test_a_model_without_attention(self) -> None:
        with pytest.raises(ValueError, match=r"model: .*got Conv2d"):
            audit(nn.Conv2d(3, 3, 1), images())

    def test_an_attention_that_cannot_be_read(self) -> None:
        class LinearAttention(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x

        model = nn.Sequential(own()[0], LinearAttention())
        with pytest.warns(UserWarning, match="left out: 1"):
            assert "its attention was not found" in audit(model, images()).left_out["1"]

    def test_nothing_that_can_be_read(self) -> None:
        with pytest.raises(ValueError, match=r"model: .*got '1': .*queries"):
            audit(nn.Sequential(nn.Flatten(2), AttentionPool(64)), images(sizes=(8, 8)))

    def test_images_of_the_wrong_size(self) -> None:
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 3 * 64), nn.Unflatten(1, (3, 8, 8)), own()[0])
        audit(model, images(sizes=(8, 8)))
        with pytest.raises(ValueError, match=r"images: .*got .* \(3, 3, 8, 9\).*shapes"):
            audit(model, images())

    def test_channels_of_another_number(self) -> None:
        with pytest.raises(ValueError, match=r"images: .*got a batch of shape \(3, 4, 8, 9\)"):
            audit(own(), images(channels=4))

    def test_sizes_that_differ(self) -> None:
        with pytest.raises(ValueError, match=r"images: .*got \(3, 7, 9\) after \(3, 8, 9\)"):
            audit(own(), [images(), images(sizes=(7, 9))])

    def test_constant_images_are_numbered(self) -> None:
        blank = images(10)
        blank[9] = torch.tensor([0.5, 0.1, 0.7])[:, None, None]  # a single colour
        with pytest.raises(ValueError, match=r"images: .*got .*in image 9"):
            audit(own(), blank)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_numbers_that_are_none(self, value: float) -> None:
        broken = images()
        broken[1, 2, 3, 4] = value
        with pytest.raises(ValueError, match=r"images: .*got NaN or infinity in image 1"):
            audit(own(), broken)

    def test_bytes(self) -> None:
        with pytest.raises(TypeError, match=r"images: .*got torch.uint8"):
            audit(own(), images().byte())

    def test_batches_that_are_no_tensors(self) -> None:
        loader: Any = iter([(images(), torch.zeros(3))])
        with pytest.raises(TypeError, match=r"images: .*got tuple"):
            audit(own(), loader)

    def test_no_batch_axis(self) -> None:
        with pytest.raises(ValueError, match=r"images: .*got shape \(5,\)"):
            audit(own(), torch.zeros(5))

    @pytest.mark.parametrize("none", [torch.zeros(0, 3, 8, 8), []], ids=["tensor", "iterable"])
    def test_no_images(self, none: Any) -> None:
        with pytest.raises(ValueError, match=r"images: .*got 0"):
            audit(own(), none)

    @pytest.mark.parametrize("name", ["queries", "batch"])
    def test_counts_below_one(self, name: str) -> None:
        options: Any = {name: 0}
        with pytest.raises(ValueError, match=rf"{name}: .*got 0"):
            audit(own(), images(), **options)

    def test_layers_that_do_not_run(self) -> None:
        with pytest.raises(ValueError, match=r"layers: .*got \['9'\]"):
            audit(own(), images(), layers=["9"])

    def test_a_grid_that_is_not_known(self) -> None:
        with pytest.raises(ValueError, match=r"grid"):
            audit(encoder(), torch.randn(2, 30, 16))

    def test_tokens_before_the_batch(self) -> None:
        layer = nn.TransformerEncoderLayer(16, 4, 16)
        with pytest.raises(
            ValueError, match=r"images: .*at least 30 tokens.*got 2 tokens in a tensor of shape \(30, 2, 16\)"
        ):
            audit(layer, torch.randn(30, 2, 16), grid=(5, 6), batch=30)


class TestOtherLibraries:
    def test_timm(self) -> None:
        timm = pytest.importorskip("timm", exc_type=ImportError)
        model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2)
        found = audit(model, images(2, sizes=(64, 64)))
        assert [layer.sizes for layer in found.layers] == [(4, 4)] * 2
        with pytest.raises(ValueError, match=r"images: .*forward pass of VisionTransformer"):
            audit(model, images(2, sizes=(48, 64)))
