"""Ablated heads: each change against loops over queries and keys, in every kind of attention call; nothing is left."""

import itertools
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnconv import SelfAttention2d, from_conv
from attnconv.inspect import attention_operators
from attnconv.layers import GatedPositionalAttention
from attnconv.models import build
from attnconv.surgery import ablated
from attnconv.surgery.head_ablation import HeadChange
from experiments.small_vit import Attention, SmallViT
from tests.tolerances import tolerance

KINDS: tuple[HeadChange, ...] = get_args(HeadChange)
HEIGHT, WIDTH = 3, 4


@torch.no_grad()
def expected(rows: Tensor, kind: HeadChange, before: int = 0) -> Tensor:
    """Change the attention of one head, (b, n, n), on a grid of 3 x 4 tokens after `before` class tokens, by loops."""
    n, out = rows.shape[1], rows.clone()
    if kind == "zero":
        return torch.zeros_like(rows)
    if kind == "uniform":
        return torch.full_like(rows, 1 / n)
    if kind == "mean":
        return torch.stack([torch.stack([image.mean(0)] * n) for image in rows])
    place = {before + token: divmod(token, WIDTH) for token in range(HEIGHT * WIDTH)}
    by_shift: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for query, key in itertools.product(place, place):
        shift = (place[key][0] - place[query][0], place[key][1] - place[query][1])
        by_shift.setdefault(shift, []).append((query, key))
    if kind == "convolution":
        for pairs in [*by_shift.values(), *([(query, key) for query in place] for key in set(range(n)) - set(place))]:
            mean = sum(float(rows[:, query, key].sum()) for query, key in pairs) / (len(pairs) * len(rows))
            for query, key in pairs:
                out[:, query, key] = mean
        return out
    frequent = [pairs for pairs in by_shift.values() if len(pairs) >= HEIGHT * WIDTH / 4]
    best = max(frequent, key=lambda pairs: sum(float(rows[:, query, key].sum()) for query, key in pairs) / len(pairs))
    out[:, list(place)] = 0
    for query, key in best:
        out[:, query, key] = 1
    return out


class TestOwnLayers:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("encoding", ["quadratic", "learned-content"])
    def test_changed_heads_by_loops(self, kind: HeadChange, encoding: str) -> None:
        layer = SelfAttention2d(3, 5, heads=4, encoding=encoding).double()
        model, images = nn.Sequential(nn.Identity(), layer), torch.randn(2, 3, HEIGHT, WIDTH, dtype=torch.float64)
        rows = layer.operator(images).to_dense().expand(2, -1, -1, -1).clone()
        for head in (0, 2):
            rows[:, head] = expected(rows[:, head], kind)
        assert layer.weight is not None
        assert layer.bias is not None
        wanted = torch.einsum("bhnm,bmc,hcd->bdn", rows, images.flatten(2).mT, layer.weight) + layer.bias[:, None]
        with ablated(model, {"1": [0, 2]}, to=kind):
            got = model(images)
        torch.testing.assert_close(got.flatten(2), wanted, **tolerance(torch.float64))

    def test_a_convolution_does_not_change(self) -> None:
        layer = from_conv(nn.Conv2d(3, 4, 3, padding=1).double())
        model, images = nn.Sequential(layer), torch.randn(1, 3, 6, 7, dtype=torch.float64)
        before = model(images)
        for kind in ("shift", "convolution"):
            with ablated(model, {"0": range(9)}, to=kind):
                torch.testing.assert_close(model(images), before, **tolerance(torch.float64))

    def test_gradients_and_other_changes_of_single_heads(self) -> None:
        layer = SelfAttention2d(3, 5, heads=4, head_channels=2)
        images = torch.randn(1, 3, 4, 4, requires_grad=True)
        with ablated(layer, {"": {1: "zero", 3: "mean"}}):
            layer(images).square().sum().backward()
        assert layer.output_weight is not None
        assert layer.output_weight.grad is not None
        assert (layer.output_weight.grad[1] == 0).all()
        assert (layer.output_weight.grad[3] != 0).any()


class Multihead(nn.Module):
    """Self-attention by nn.MultiheadAttention."""

    def __init__(self, *, weights: bool) -> None:
        super().__init__()
        self.attn, self.weights = nn.MultiheadAttention(24, 3, batch_first=True), weights

    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.attn(x, x, x, need_weights=self.weights)
        if weights is not None:
            torch.testing.assert_close(weights.sum(-1)[:, 0], torch.full((2,), 2 / 3))  # one of three heads is off
        return out


class TestOtherModules:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("fused", [True, False])
    @pytest.mark.parametrize("prefix", [0, 2])
    def test_changed_heads_by_loops(self, prefix: int, fused: bool, kind: HeadChange) -> None:
        attention = Attention(24, 3)
        attention.fused_attn = fused
        model, tokens = nn.Sequential(nn.Identity(), attention), torch.randn(2, prefix + HEIGHT * WIDTH, 24)
        query, key, value = attention.qkv(tokens).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        rows = (attention.scale * query @ key.mT).softmax(-1)
        rows = torch.stack([expected(rows[:, 0], kind, prefix), rows[:, 1], expected(rows[:, 2], kind, prefix)], 1)
        wanted = attention.proj((rows @ value).transpose(1, 2).flatten(2))
        with ablated(model, {"1": [0, 2]}, to=kind, grid=(HEIGHT, WIDTH), prefix=prefix):
            torch.testing.assert_close(model(tokens), wanted, **tolerance(torch.float32))

    @pytest.mark.parametrize("weights", [True, False])
    def test_multihead_attention(self, weights: bool) -> None:
        model, tokens = Multihead(weights=weights), torch.randn(2, 12, 24)
        rest = model.attn.out_proj.weight.detach().clone()
        with torch.no_grad():
            with ablated(model, {"attn": [1]}, grid=(3, 4)):
                got = model(tokens)
            model.weights = False
            model.attn.out_proj.weight[:, 8:16] = 0  # the columns that read head 1
            torch.testing.assert_close(got, model(tokens), **tolerance(torch.float32))
            assert not torch.equal(rest, model.attn.out_proj.weight)

    def test_calls_of_submodules(self) -> None:
        model, images = SmallViT(prefix=1), torch.randn(2, 3, 32, 32)
        features = nn.Sequential(model.patch_embed, model.blocks)
        heads = {"blocks.0.attn": [0, 2]}
        with torch.no_grad(), ablated(model, heads):
            model(images)
            got = features(images + 1)
        with torch.no_grad(), ablated(model, heads):
            torch.testing.assert_close(features(images + 1), got)
        with torch.no_grad(), ablated(features, {"1.0.attn": [0, 2]}):
            torch.testing.assert_close(features(images + 1), got)
        with torch.no_grad():
            assert (features(images + 1) != got).any()

    def test_all_calls_of_a_module(self) -> None:
        attention, tokens = Attention(24, 3), torch.randn(2, 12, 24)
        model = nn.Sequential(attention, attention)
        with torch.no_grad(), ablated(model, {"0": range(3)}, grid=(3, 4)):
            torch.testing.assert_close(model(tokens), attention.proj.bias.expand_as(tokens))

    def test_a_whole_model_and_class_tokens(self) -> None:
        model, images = SmallViT(prefix=1), torch.randn(2, 3, 32, 32)
        with torch.no_grad():
            with ablated(model, {"blocks.1.attn": range(4)}):
                got = model(images)
            model.blocks[1].attn.proj.weight.zero_()
            torch.testing.assert_close(got, model(images), **tolerance(torch.float32))


class Windows(nn.Module):
    """Attention in windows of 4 x 4 on an image of 6 x 7, padded to 8 x 8 and rolled by 2."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention(24, 3)
        self.attn.fused_attn = False

    def windows(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 1, 0, 2)).roll((-2, -2), (2, 3))
        return x.unflatten(2, (2, 4)).unflatten(4, (2, 4)).permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(0, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(self.windows(x))


class Masked(nn.Module):
    """Attention in which only token 6 attends to token 6. The values are such that the output is the attention."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.attn, self.fused = Attention(24, 3), fused

    def forward(self, x: Tensor) -> Tensor:
        query, key, _ = self.attn.qkv(x.flatten(2).mT).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        mask = torch.zeros(16, 16)
        mask[:, 6] = -100.0
        mask[6, 6] = 0.0
        value = torch.eye(16).expand(len(x), 3, -1, -1)
        if self.fused:
            return F.scaled_dot_product_attention(query, key, value, mask)
        return (self.attn.scale * query @ key.mT + mask).softmax(-1) @ value


class TestWindows:
    @pytest.mark.parametrize("kind", KINDS)
    def test_changed_heads_by_loops(self, kind: HeadChange) -> None:
        model, images = Windows(), torch.randn(2, 24, 6, 7)
        places = model.windows(torch.arange(1.0, 43.0).view(1, 1, 6, 7))[:, :, 0].long() - 1  # -1: padding
        tokens = model.windows(images)
        query, key, value = model.attn.qkv(tokens).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        rows = (model.attn.scale * query @ key.mT).softmax(-1).detach()
        changed = self.changed(rows[:, 1], places.repeat(2, 1), kind)
        rows = torch.stack([rows[:, 0], changed, rows[:, 2]], 1)
        wanted = model.attn.proj((rows @ value).transpose(1, 2).flatten(2))
        with ablated(model, {"attn": [1]}, to=kind):
            torch.testing.assert_close(model(images), wanted, **tolerance(torch.float32))

    def changed(self, rows: Tensor, places: Tensor, kind: HeadChange) -> Tensor:
        if kind not in ("shift", "convolution"):
            return expected(rows, kind)
        pairs: dict[Any, list[tuple[int, int, int]]] = {}
        for window, query, key in itertools.product(range(len(rows)), range(16), range(16)):
            q, k = int(places[window, query]), int(places[window, key])
            if q >= 0:
                shift = (k // 7 - q // 7, k % 7 - q % 7) if k >= 0 else f"other key {key}"
                pairs.setdefault(shift, []).append((window, query, key))
        values = {shift: [float(rows[each]) for each in some] for shift, some in pairs.items()}
        if kind == "convolution":
            means = {shift: sum(some) / len(some) for shift, some in values.items()}
        else:
            shifts = {shift: some for shift, some in values.items() if isinstance(shift, tuple)}
            least = max(map(len, shifts.values())) / 4
            best = max(
                shifts, key=lambda shift: sum(some := shifts[shift]) / len(some) if len(shifts[shift]) >= least else -1
            )
            means = {shift: float(shift == best) for shift in pairs}
        out = rows.clone()
        for shift, some in pairs.items():
            for each in some:
                out[each] = means[shift]
        return out

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("fused", [True, False])
    def test_masked_keys_stay_masked(self, fused: bool, kind: HeadChange) -> None:
        model, images = Masked(fused=fused), torch.randn(2, 24, 4, 4)
        before = model(images)
        with ablated(model, {"": [1]}, to=kind):
            rows = model(images)
        torch.testing.assert_close(rows[:, [0, 2]], before[:, [0, 2]])
        others = [token for token in range(16) if token != 6]
        assert (rows[:, 1, others, 6] == 0).all()
        if kind == "uniform":
            torch.testing.assert_close(rows[:, 1, 0, others], torch.full((2, 15), 1 / 15))
            torch.testing.assert_close(rows[:, 1, 6], torch.full((2, 16), 1 / 16))
        if kind == "mean":
            torch.testing.assert_close(rows[:, 1, 6, 6], before[:, 1, 6, 6])  # only one query can read this key
            torch.testing.assert_close(rows[:, 1, 0, others], before[:, 1, :, others].mean(1))

    def test_model_with_windows(self) -> None:
        transformers: Any = pytest.importorskip("transformers")
        settings = transformers.SwinConfig(
            image_size=16, patch_size=2, embed_dim=8, depths=[2], num_heads=[2], window_size=4
        )
        model, images = transformers.SwinModel(settings).eval(), torch.randn(1, 3, 16, 16)
        names = dict.fromkeys(attention_operators(model, images), (1,))
        for kind in KINDS:
            with torch.no_grad(), ablated(model, names, to=kind):
                changed = model(images).last_hidden_state
            with torch.no_grad():
                assert (changed != model(images).last_hidden_state).any()


class TestErrors:
    @pytest.mark.usefixtures("unhooked")
    def test_what_does_not_exist(self) -> None:
        model, images = build("quadratic-digits"), torch.rand(1, 1, 8, 8)
        cases: list[tuple[Any, Any, str]] = [
            ({"blocks.9.attention": [0]}, "zero", "heads: must contain only names .*got 'blocks.9.attention'"),
            ({"blocks.0.attention": [9]}, "zero", r"heads\['blocks.0.attention'\]: must be .* from 0 to 8"),
            ({"blocks.0.attention": {0: "half"}}, "zero", "to: must be one of zero, mean, .*got 'half'"),
            ({"blocks.0.attention": 0}, "zero", "heads: must map names"),
            (["blocks.0.attention"], "zero", "heads: must map names"),
            ({"head": [0]}, "zero", "layers: must be names of modules that compute attention"),
        ]
        for heads, to, message in cases:
            with pytest.raises(ValueError, match=message), ablated(model, heads, to=to):
                model(images)

    def test_blocks_that_change_the_same_module(self) -> None:
        model, images, name = build("quadratic-digits", layers=2).eval(), torch.rand(1, 1, 8, 8), "blocks.0.attention"
        with ablated(model, {name: [0]}), ablated(model, {"blocks.1.attention": [0]}):
            model(images)
            with pytest.raises(ValueError, match=f"heads: .*in one call .*got '{name}'"), ablated(model, {name: [1]}):
                pass
        with ablated(model, {name: [1]}):
            model(images)

    def test_gated_attention(self) -> None:
        model = nn.Sequential(GatedPositionalAttention(24, 2))
        with (
            pytest.raises(ValueError, match="without gates, got GatedPositionalAttention"),
            ablated(model, {"0": [0]}, grid=(3, 3)),
        ):
            model(torch.randn(1, 9, 24))

    def test_nothing_is_left_after_an_error(self) -> None:
        model, images = build("quadratic-digits").eval(), torch.rand(1, 1, 8, 8)
        before = model(images)
        with pytest.raises(ValueError, match="images: must"), ablated(model, {"blocks.0.attention": [0]}):
            model(images[:, :, 1:, 0])
        assert torch.equal(model(images), before)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        with ablated(model, {}):
            assert torch.equal(model(images), before)
