"""The attention of plain PyTorch modules, modules that raise errors, and the operator passed to `visit`."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnconv import SelfAttention2d
from attnconv.inspect import TokenOperator, attention_moments, attention_operators, visit_attention
from attnconv.inspect.attention_calls import product_rows
from attnconv.inspect.position_codes import PositionCodes
from attnconv.inspect.token_layout import TokenLayout, layout_of
from attnconv.layers import GatedPositionalAttention
from attnconv.operators.base import AttentionOperator
from tests.tolerances import tolerance


class Attends(nn.Module):
    """`nn.MultiheadAttention` as self-attention over the pixels of an image, or over tokens (b, n, c)."""

    def __init__(self, *, batch_first: bool = True, mask: Tensor | None = None, **more: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=batch_first, **more)
        self.mask, self.batch_first = mask, batch_first

    def forward(self, x: Tensor, weights: bool = False) -> Any:
        tokens = x.flatten(2).mT if x.dim() == 4 else x
        tokens = tokens if self.batch_first else tokens.transpose(0, 1)
        return self.inner(
            tokens, tokens, tokens, need_weights=weights, average_attn_weights=False, attn_mask=self.mask
        )[1 if weights else 0]


class Kernel(nn.Module):
    """Self-attention over pixels by PyTorch's fused function, with further arguments."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT[:, None]
        return F.scaled_dot_product_attention(query=tokens, key=tokens, value=tokens, **self.more)


def layout(sizes: tuple[int, int], tokens: int, *, images: int, heads: int) -> TokenLayout:
    """Return the layout of images with one class token."""
    codes = PositionCodes(sizes)
    places = codes.of_tokens(images, tokens, 1, torch.device("cpu")).repeat_interleave(heads, 0)
    return layout_of(codes, places, places, images)


def only_operator(model: nn.Module, images: Tensor, **more: Any) -> TokenOperator:
    found: list[AttentionOperator] = []
    visit_attention(model, images, lambda name, operator: found.append(operator), **more)
    (operator,) = found
    assert isinstance(operator, TokenOperator)
    return operator


class TestTorch:
    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("kind", ["none", "bool", "float", "heads"])
    def test_multihead_attention(self, batch_first: bool, kind: str) -> None:
        later = torch.ones(30, 30).triu(1)
        masks = {"none": None, "bool": later.bool(), "float": -later, "heads": torch.randn(4, 30, 30)}
        model = Attends(batch_first=batch_first, mask=masks[kind]).eval()
        images = torch.randn(2, 8, 5, 6)
        operator = only_operator(model, images)
        assert operator.grid.sizes == (5, 6)
        with torch.no_grad():
            expected = model(images, weights=True)
        torch.testing.assert_close(operator.to_dense(), expected, **tolerance(torch.float32))

    def test_keys_of_another_width(self) -> None:
        model, images = Attends(kdim=8, vdim=8), torch.randn(2, 8, 4, 4)
        model.inner._qkv_same_embed_dim = False
        weights = model.inner.in_proj_weight.detach().split(8)
        for name, weight in zip(("q", "k", "v"), weights, strict=True):
            setattr(model.inner, f"{name}_proj_weight", nn.Parameter(weight.clone()))
        with torch.no_grad():
            expected = model.eval()(images, weights=True)
        torch.testing.assert_close(only_operator(model, images).to_dense(), expected, **tolerance(torch.float32))

    @pytest.mark.parametrize("grid", [(14, 14), (32, 48)])
    def test_encoder(self, grid: tuple[int, int]) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        count = grid[0] * grid[1] + 1
        given = 3 * torch.randn(2, count, 8)
        found: dict[str, AttentionOperator] = {}
        visit_attention(model, given, found.__setitem__, grid=grid)
        assert list(found) == ["layers.0.self_attn", "layers.1.self_attn"]
        with torch.no_grad():
            first = model.layers[0].self_attn
            full = first(given, given, given, average_attn_weights=False)[1]
        rows = torch.tensor([0, 7, count - 2])
        expected = full[:, :, rows + 1]
        torch.testing.assert_close(
            found["layers.0.self_attn"].rows(rows), expected[..., 1:], **tolerance(torch.float32)
        )
        mass = found["layers.0.self_attn"].padding_mass(rows)
        torch.testing.assert_close(mass, expected[..., 0], **tolerance(torch.float32))

    def test_padded_keys(self) -> None:
        layer, tokens = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 9, 8)
        padding = torch.zeros(2, 9, dtype=torch.bool)
        padding[1, 6:] = True
        operator = only_operator(layer, tokens, grid=(3, 3), options={"src_key_padding_mask": padding})
        with torch.no_grad():
            expected = layer.eval().self_attn(
                tokens, tokens, tokens, key_padding_mask=padding, average_attn_weights=False
            )[1]
        torch.testing.assert_close(operator.to_dense(), expected, **tolerance(torch.float32))

    @pytest.mark.parametrize(
        "more",
        [
            {},
            {"scale": 0.3},
            {"is_causal": True},
            {"attn_mask": torch.randn(12, 12)},
            {"attn_mask": torch.randn(2, 1, 1, 12)},
            {"attn_mask": torch.eye(12, dtype=torch.bool).roll(1, 0)},
            {"attn_mask": (torch.arange(12) > 3)[:, None].expand(12, 12)},  # the first queries have no keys
        ],
        ids=["plain", "scale", "causal", "bias", "bias of keys", "one key", "none of some"],
    )
    def test_what_the_kernel_is_given(self, more: dict[str, Any]) -> None:
        model, images = Kernel(**more), torch.randn(2, 8, 3, 4)
        operator = only_operator(model, images)
        mixed = operator.apply(images[:, None].movedim(2, 4)).flatten(2, 3)
        torch.testing.assert_close(mixed, model(images), **tolerance(torch.float32))

    def test_groups_of_heads_share_keys(self) -> None:
        query, key, value = torch.randn(2, 6, 4, 8), torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 8)
        rows = product_rows(query, key).rows(torch.arange(4))
        expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        mixed = rows.unflatten(0, (2, 6)) @ value.repeat_interleave(2, 1)
        torch.testing.assert_close(mixed, expected, **tolerance(torch.float32))


class Softmaxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT[:, None]
        out: Tensor = self.softmax(tokens @ tokens.mT) @ tokens
        return out


class Headless(nn.Module):
    """Single-head attention over pixels, without an axis for heads."""

    def __init__(self, repeats: int = 1) -> None:
        super().__init__()
        self.repeats = repeats

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT.repeat(self.repeats, 1, 1)
        return (tokens @ tokens.mT).softmax(-1) @ tokens


class LinearAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT
        return tokens @ (tokens.mT @ tokens)


class TestRefusals:
    def test_an_unfused_model_keeps_no_scores(self) -> None:
        operator = only_operator(nn.Sequential(Softmaxed()), torch.randn(1, 2, 3, 3))
        with pytest.raises(ValueError, match=r"operator: .* inside `visit`"):
            operator.rows(torch.tensor([0]))

    def test_a_softmax_module_is_named_after_its_owner(self) -> None:
        assert list(attention_operators(nn.Sequential(Softmaxed()), torch.randn(1, 2, 3, 3))) == ["0"]

    def test_scores_without_an_axis_of_heads_are_one_head(self) -> None:
        images = torch.randn(2, 2, 3, 4)
        one, with_heads = Headless(), Softmaxed()
        rows: list[Tensor] = []
        for model in (one, with_heads):
            visit_attention(model, images, lambda _name, operator: rows.append(operator.rows(torch.tensor([0, 7]))))
        torch.testing.assert_close(rows[0], rows[1], **tolerance(torch.float32))

    def test_copies_of_the_images_are_heads(self) -> None:
        images = torch.randn(2, 2, 3, 4)
        operator = only_operator(Headless(repeats=3), images)
        assert (operator.batch, operator.heads) == (2, 3)

    def test_a_softmax_over_classes_is_no_attention(self) -> None:
        model = nn.Sequential(Kernel(), nn.Flatten(1, 2), nn.Linear(2, 5), nn.Softmax(-1))
        assert list(attention_operators(model, torch.randn(1, 2, 3, 3))) == ["0"]

    def test_an_attention_that_is_not_seen(self) -> None:
        model, images = nn.Sequential(Kernel(), LinearAttention()), torch.randn(1, 2, 3, 3)
        model[0].register_forward_hook(lambda module, args, out: args[0])
        with pytest.raises(ValueError, match="module '1' must be readable, got LinearAttention"):
            only_operator(model, images)
        assert only_operator(model, images, layers=["0"]).grid.sizes == (3, 3)
        assert not any(module._forward_pre_hooks for module in model.modules())

    @pytest.mark.parametrize("fused", [True, False])
    def test_attention_among_channels(self, fused: bool) -> None:
        class Channels(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                channels = x.flatten(2)[:, None]
                if fused:
                    return F.scaled_dot_product_attention(channels, channels, channels)
                return (channels @ channels.mT).softmax(-1) @ channels

        with pytest.raises(ValueError, match=r"module '' .* channels"):
            only_operator(Channels(), torch.randn(1, 16, 8, 8))

    def test_a_pooled_image(self) -> None:
        model = nn.Sequential(nn.AvgPool2d(2), Kernel())  # 8 x 2 tokens, as many as 4 x 4
        assert only_operator(model, torch.randn(1, 2, 16, 4)).grid.sizes == (8, 2)
        model = nn.Sequential(nn.AdaptiveAvgPool2d((1, 7)), Kernel())
        assert only_operator(model, torch.randn(1, 2, 3, 14)).grid.sizes == (1, 7)

    def test_of_inputs_that_are_no_images_the_grid_is_asked_for(self) -> None:
        tokens = torch.randn(2, 16, 8)  # 4 x 4 tokens, one axis, or text
        with pytest.raises(ValueError, match=r"do not come from the images; pass grid="):
            only_operator(Attends(), tokens)
        assert only_operator(Attends(), tokens, grid=(2, 8)).grid.sizes == (2, 8)

    def test_keys_that_are_no_tokens(self) -> None:
        with pytest.raises(ValueError, match=r"module 'inner' .* got MultiheadAttention.*keys .*bias_k"):
            only_operator(Attends(add_bias_kv=True), torch.randn(1, 8, 2, 2))

    def test_a_scripted_module(self) -> None:
        scripted = torch.jit.trace(nn.ReLU(), torch.zeros(1))
        model, images = nn.Sequential(scripted, Kernel()), torch.randn(1, 2, 3, 3)
        with pytest.raises(ValueError, match=r"module '0' must be readable, .* scripted"):
            only_operator(model, images)
        assert only_operator(model, images, layers=["1"]).grid.sizes == (3, 3)

    def test_a_layer_that_does_not_run(self) -> None:
        with pytest.raises(ValueError, match=r"layers: .*got \['1'\]\. .*: 0\."):
            only_operator(nn.Sequential(Kernel()), torch.randn(1, 2, 3, 3), layers=["0", "1"])

    def test_a_prefix_token_that_is_not_there(self) -> None:
        operator = only_operator(Kernel(), torch.randn(1, 2, 3, 3))
        with pytest.raises(ValueError, match=r"tokens: .*got \[0\]"):
            operator.prefix_rows(torch.tensor([0]))


class TestOperator:
    def test_layers_of_this_library_are_seen_once(self) -> None:
        model = nn.Sequential(SelfAttention2d(4, 4, 2, encoding="learned-content"), Kernel())
        operators = attention_operators(model, torch.randn(2, 4, 5, 6))
        assert {name: type(operator).__name__ for name, operator in operators.items()} == {
            "0": "Content",
            "1": "TokenOperator",
        }

    def test_contract_equals_the_dense_form(self) -> None:
        query, key = torch.randn(2, 3, 7, 4).double(), torch.randn(2, 3, 7, 4).double()
        operator = TokenOperator(product_rows(query, key), layout((2, 3), 7, images=2, heads=3))
        x, weight = torch.randn(2, 2, 3, 5).double(), torch.randn(3, 5, 6).double()
        full = torch.softmax(query @ key.mT / 2, -1)[:, :, 1:, 1:]
        expected = torch.einsum("bhqk,bkc,hcd->bqd", full, x.flatten(1, 2), weight).unflatten(1, (2, 3))
        torch.testing.assert_close(operator.contract(x, weight), expected, **tolerance(torch.float64))

    def test_half_precision_is_scored_in_single(self) -> None:
        query = torch.randn(1, 1, 4, 8).bfloat16()
        assert product_rows(query, query).rows(torch.arange(4)).dtype == torch.float32

    def test_moments(self) -> None:
        """Uniform attention over 3 x 4 tokens and a class token: attention to the class token is padding mass."""
        query = torch.zeros(2, 1, 13, 4)
        moments = attention_moments(TokenOperator(product_rows(query, query), layout((3, 4), 13, images=2, heads=1)))
        expected = torch.diag(torch.tensor([8 / 12, 15 / 12])).double()
        torch.testing.assert_close(moments.covariance[0, 0], expected, **tolerance(torch.float32))
        mass = torch.full((2, 1), 1 / 13).double()
        torch.testing.assert_close(moments.padding_mass, mass, **tolerance(torch.float32))
        assert moments.content_share is not None
        torch.testing.assert_close(moments.content_share, torch.zeros(1).double(), **tolerance(torch.float32))


@pytest.mark.parametrize("sizes", [None, (2, 8)])
def test_gated_attention_of_this_library_is_read_with_its_gate(sizes: tuple[int, int] | None) -> None:
    torch.manual_seed(0)
    layer, tokens = GatedPositionalAttention(12, 3), torch.randn(2, 16, 12)
    with torch.no_grad():
        layer.gating_param.copy_(torch.tensor([-1.0, 0.0, 2.0]))
    found: list[Tensor] = []
    options = None if sizes is None else {"sizes": sizes}
    grid = sizes or (4, 4)
    visit_attention(
        layer, tokens, lambda name, operator: found.append(operator.rows(torch.arange(16))), grid=grid, options=options
    )
    q, k = layer.qk(tokens).unflatten(-1, (2, 3, 4)).permute(2, 0, 3, 1, 4)
    gate = torch.sigmoid(layer.gating_param)[:, None, None]
    position = layer.position_operator(grid).rows(torch.arange(16))
    expected = (1 - gate) * (q @ k.mT * layer.scale).softmax(-1) + gate * position
    torch.testing.assert_close(found, [expected], **tolerance(torch.float32))
