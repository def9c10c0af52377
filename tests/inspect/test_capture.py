"""The attention of models of other libraries: the fused path, the unfused path, and what the models compute."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnconv.inspect import TokenOperator, visit_attention
from attnconv.operators.base import AttentionOperator
from tests.tolerances import tolerance

GRIDS = [(14, 14), (32, 48)]
Maps = list[tuple[str, tuple[int, ...], int, Tensor, Tensor]]


def queries_of(operator: AttentionOperator) -> Tensor:
    count = operator.grid.query_count
    return torch.tensor([0, 1, count // 2 + 3, count - 1])


def maps_of(model: nn.Module, images: Tensor, **more: Any) -> Maps:
    """Return name, grid, prefix, rows and prefix rows of all attention; rows and padding mass must sum to 1."""
    found: Maps = []

    def visit(name: str, operator: AttentionOperator) -> None:
        assert isinstance(operator, TokenOperator)
        chosen = queries_of(operator)
        rows = operator.rows(chosen)
        total = rows.sum(-1) + operator.padding_mass(chosen)
        torch.testing.assert_close(total, torch.ones_like(total), **tolerance(torch.float32))
        before = operator.prefix_rows(torch.arange(operator.prefix))
        found.append((name, operator.grid.sizes, operator.prefix, rows, before))

    visit_attention(model, images, visit, **more)
    return found


def assert_same(first: Maps, second: Maps) -> None:
    assert [entry[:3] for entry in first] == [entry[:3] for entry in second]
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one[3], other[3], **tolerance(torch.float32))
        torch.testing.assert_close(one[4], other[4], **tolerance(torch.float32))


def sharpen(model: nn.Module) -> Any:
    """Enlarge the initial weights, so that attention is far from uniform."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and any(
                part in name for part in ("qkv", "q_proj", "k_proj", "in_proj", "query", "key")
            ):
                weight.mul_(4)
            if "bias_table" in name:
                weight.normal_()
    return model


def fused(model: nn.Module, on: bool) -> Any:
    for module in model.modules():
        if isinstance(getattr(module, "fused_attn", None), bool):
            setattr(module, "fused_attn", on)  # noqa: B010
    return model


TIMM = {
    "vit_tiny_patch16_224": (16, 1),
    "deit_tiny_distilled_patch16_224": (16, 2),
    "vit_small_patch14_reg4_dinov2": (14, 5),
    "eva02_tiny_patch14_224": (14, 1),
}


class TestTimm:
    @pytest.mark.parametrize("grid", GRIDS)
    @pytest.mark.parametrize("name", TIMM)
    def test_fused_equals_unfused(self, name: str, grid: tuple[int, int]) -> None:
        timm = pytest.importorskip("timm")
        patch, prefix = TIMM[name]
        size = (patch * grid[0], patch * grid[1])
        model = sharpen(timm.create_model(name, img_size=size, depth=2, embed_dim=48, num_heads=3))
        images = torch.randn(1, 3, *size)
        maps = maps_of(fused(model, True), images)
        assert [entry[:3] for entry in maps] == [(f"blocks.{i}.attn", grid, prefix) for i in range(2)]
        assert_same(maps, maps_of(fused(model, False), images))

    def test_the_rows_are_those_of_the_formula(self) -> None:
        timm = pytest.importorskip("timm")
        model = sharpen(timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1)).eval()
        images = torch.randn(2, 3, 64, 64)
        (entry,) = maps_of(model, images)
        with torch.no_grad():
            tokens = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
            block = model.blocks[0]
            query, key, _ = block.attn.qkv(block.norm1(tokens)).unflatten(-1, (3, 3, 64)).permute(2, 0, 3, 1, 4)
            full = torch.softmax(query @ key.mT / 8, -1)
        torch.testing.assert_close(entry[3], full[:, :, [1, 2, 12, 16], 1:], **tolerance(torch.float32))
        torch.testing.assert_close(entry[4], full[:, :, :1, 1:], **tolerance(torch.float32))

    def test_an_image_of_another_size(self) -> None:
        timm = pytest.importorskip("timm")
        model = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=48, dynamic_img_size=True)
        assert maps_of(model, torch.randn(1, 3, 64, 96))[0][1:3] == ((4, 6), 1)

    @pytest.mark.parametrize("grid", GRIDS)
    @pytest.mark.parametrize("on", [True, False])
    @pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
    def test_windows_mix_values_as_the_block_does(self, name: str, grid: tuple[int, int], on: bool) -> None:
        timm = pytest.importorskip("timm")
        size = (4 * grid[0], 4 * grid[1])
        model = timm.create_model(name, img_size=size, depths=(2, 1), embed_dim=24, num_heads=(3, 6))
        model = sharpen(fused(model, on)).eval()
        images = torch.randn(2 if grid == (14, 14) else 1, 3, *size)
        inputs: dict[str, Tensor] = {}
        seen: list[tuple[int, ...]] = []
        blocks: dict[str, Any] = dict(model.named_modules())
        for number in range(2):
            block = blocks[f"layers.0.blocks.{number}"]
            make_transparent(block.attn)
            hook = keep(inputs, f"layers.0.blocks.{number}.attn")
            block.register_forward_pre_hook(hook)

        def visit(name: str, operator: AttentionOperator) -> None:
            seen.append(operator.grid.sizes)
            if name not in inputs:
                return
            block = blocks[name.removesuffix(".attn")]
            # Swin V2 applies the norm after attention.
            tokens = inputs[name] if "v2" in type(block).__name__.lower() else block.norm1(inputs[name])
            expected = block._attn(tokens)
            values = tokens.unflatten(-1, (3, -1)).movedim(3, 1)
            mixed = operator.apply(values).movedim(1, 3).flatten(3)
            torch.testing.assert_close(mixed, expected, **tolerance(torch.float32, scale=10))  # sums of a row

        visit_attention(model, images, visit)
        assert seen == [grid, grid, (grid[0] // 2, grid[1] // 2)]

    def test_convit_is_read_by_its_formula(self) -> None:
        timm = pytest.importorskip("timm")
        model = sharpen(timm.create_model("convit_tiny", img_size=224, depth=3, local_up_to_layer=2)).eval()
        images = torch.randn(1, 3, 224, 224)
        inputs: dict[str, Tensor] = {}
        for name in ("blocks.0.attn", "blocks.1.attn", "blocks.2.attn"):
            model.get_submodule(name).register_forward_pre_hook(keep(inputs, name))
        maps = maps_of(model, images)
        assert [entry[:3] for entry in maps] == [
            ("blocks.0.attn", (14, 14), 0),
            ("blocks.1.attn", (14, 14), 0),
            ("blocks.2.attn", (14, 14), 1),
        ]
        for name, _, _, rows, _ in maps[:2]:
            with torch.no_grad():
                full: Tensor = model.get_submodule(name).get_attention(inputs[name])
            torch.testing.assert_close(rows, full[:, :, [0, 1, 101, 195]], **tolerance(torch.float32))

    @pytest.mark.parametrize(
        ("name", "module", "why"),
        [
            ("cait_xxs24_224", "blocks.0.attn", "mixes its maps after"),
            ("xcit_nano_12_p16_224", "blocks.0.attn", "channels"),
            ("edgenext_xx_small", r"stages.1.blocks.1.xca", "channels"),
            ("efficientformerv2_s0", "stages.2.blocks.4.token_mixer", "mixes its maps after"),
        ],
    )
    def test_what_cannot_be_read_is_named(self, name: str, module: str, why: str) -> None:
        timm = pytest.importorskip("timm")
        with pytest.raises(ValueError, match=f"model: the attention of module '{module}' .* {why}"):
            maps_of(timm.create_model(name), torch.randn(1, 3, 224, 224))

    def test_the_difference_of_two_softmaxes_is_refused(self) -> None:
        blocks = pytest.importorskip("timm.models.vision_transformer")
        timm = pytest.importorskip("timm")
        if not hasattr(blocks, "DiffParallelScalingBlock"):
            pytest.skip("this timm has no DiffParallelScalingBlock")
        block = blocks.DiffParallelScalingBlock
        model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, block_fn=block)
        for on in (True, False):
            with pytest.raises(ValueError, match=r"the attention of module 'blocks.0' .* difference of two softmaxes"):
                maps_of(fused(model, on), torch.randn(1, 3, 64, 64))


def keep(inputs: dict[str, Tensor], name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs[name] = args[0]

    return hook


def make_transparent(attention: Any) -> None:
    """Make values and outputs equal to the input, so that the module only mixes tokens."""
    with torch.no_grad():
        attention.qkv.weight[-attention.proj.in_features :] = torch.eye(attention.proj.in_features)
        attention.proj.weight.copy_(torch.eye(attention.proj.in_features))
        for bias in (attention.qkv.bias, attention.proj.bias, getattr(attention, "v_bias", None)):
            if bias is not None:
                bias.zero_()


class ChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(1, -1)


class TestTorchvision:
    @pytest.mark.parametrize("sizes", [(14, 14), (10, 17), (5, 20)])
    @pytest.mark.parametrize("shift", [0, 3])
    def test_windows_mix_values_as_the_module_does(self, sizes: tuple[int, int], shift: int) -> None:
        swin = pytest.importorskip("torchvision.models.swin_transformer")
        module = swin.ShiftedWindowAttention(12, [7, 7], [shift, shift], 3).eval()
        make_transparent(sharpen(module))
        tokens = torch.randn(2, *sizes, 12)
        model = nn.Sequential(ChannelsLast(), module)

        def visit(name: str, operator: AttentionOperator) -> None:
            mixed = operator.apply(tokens.unflatten(-1, (3, -1)).movedim(3, 1)).movedim(1, 3).flatten(3)
            torch.testing.assert_close(mixed, module(tokens), **tolerance(torch.float32))

        visit_attention(model, tokens.movedim(3, 1), visit)

    def test_vision_transformer(self) -> None:
        vision = pytest.importorskip("torchvision.models.vision_transformer")
        model = vision.VisionTransformer(64, 16, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8)
        name = "encoder.layers.encoder_layer_0.self_attention"
        assert maps_of(model, torch.randn(2, 3, 64, 64))[0][:3] == (name, (4, 4), 1)


HUGGING_FACE = {
    "ViT": (1, {}),
    "DeiT": (2, {}),
    "Dinov2": (1, {}),
    "Dinov2WithRegisters": (5, {"num_register_tokens": 4}),
}


class TestHuggingFace:
    @pytest.mark.parametrize("grid", GRIDS)
    @pytest.mark.parametrize("family", HUGGING_FACE)
    def test_fused_equals_unfused(self, family: str, grid: tuple[int, int]) -> None:
        transformers = pytest.importorskip("transformers")
        prefix, more = HUGGING_FACE[family]
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 24}
        config = getattr(transformers, f"{family}Config")(**sizes, **more, image_size=56, patch_size=4)
        model = sharpen(getattr(transformers, f"{family}Model")(config)).eval()
        images = torch.randn(1, 3, 4 * grid[0], 4 * grid[1])
        # The DINOv2 family always interpolates.
        options = {} if "Dino" in family else {"interpolate_pos_encoding": True}
        model.set_attn_implementation("sdpa")
        maps = maps_of(model, images, options=options)
        assert [entry[1:3] for entry in maps] == [(grid, prefix)] * 2
        model.set_attn_implementation("eager")
        assert_same(maps, maps_of(model, images, options=options))
        with torch.no_grad():
            own = model(images, output_attentions=True, **options).attentions
        for (_, _, _, rows, before), full in zip(maps, own, strict=True):
            chosen = torch.tensor([0, 1, rows.shape[-1] // 2 + 3, rows.shape[-1] - 1]) + prefix
            torch.testing.assert_close(rows, full[:, :, chosen, prefix:], **tolerance(torch.float32))
            torch.testing.assert_close(before, full[:, :, :prefix, prefix:], **tolerance(torch.float32))

    def test_swin(self) -> None:
        transformers = pytest.importorskip("transformers")
        sizes = {"embed_dim": 12, "depths": [2, 1], "num_heads": [3, 3], "window_size": 7}
        model = sharpen(transformers.SwinModel(transformers.SwinConfig(**sizes, image_size=64, patch_size=4))).eval()
        images = torch.randn(2, 3, 64, 80)
        model.set_attn_implementation("sdpa")
        maps = maps_of(model, images)
        assert [entry[1] for entry in maps] == [(16, 20), (16, 20), (8, 10)]
        model.set_attn_implementation("eager")
        assert_same(maps, maps_of(model, images))

    @pytest.mark.parametrize("family", ["Swin", "Swinv2"])
    def test_windows_lie_where_the_layer_puts_them(self, family: str) -> None:
        transformers = pytest.importorskip("transformers")
        module = importlib.import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
        sizes = {"embed_dim": 12, "depths": [2], "num_heads": [3], "window_size": 7, "image_size": 64, "patch_size": 4}
        model = getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**sizes)).eval()
        layers: list[Any] = [layer for layer in model.modules() if type(layer).__name__ == f"{family}Layer"]
        found: list[Tensor] = []

        def visit(name: str, operator: AttentionOperator) -> None:
            layer, (height, width) = layers[len(found)], operator.grid.sizes
            tokens = torch.arange(1.0, height * width + 1).view(1, height, width, 1)
            moved = torch.roll(layer.maybe_pad(tokens, height, width)[0], (-layer.shift_size,) * 2, (1, 2))
            windows = module.window_partition(moved, layer.window_size).flatten(1).long()  # padding is token 0
            together = torch.zeros(height * width + 1, height * width + 1, dtype=torch.bool)
            for window in windows:
                together[window[:, None], window] = True
            rows = operator.rows(torch.arange(height * width))
            assert float(rows[..., ~together[1:, 1:]].max()) == 0, name
            found.append(rows)

        visit_attention(model, torch.randn(1, 3, 64, 80), visit)
        assert len(found) == len(layers) == 2
