"""Models of timm and Hugging Face as they come, with random weights: heads replaced, starts set, others refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnconv.analysis import ConvolvedAttention, audit, replace_heads, start_as_convolution
from attnconv.analysis.attention_parts import first_tensor
from tests.tolerances import tolerance

SIZE = 56
TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "class token": ("vit_tiny_patch16_224", {"patch_size": 8}),
    "distillation token": ("deit_tiny_distilled_patch16_224", {"patch_size": 8}),
    "no token": ("vit_tiny_patch16_224", {"patch_size": 8, "class_token": False, "global_pool": "avg"}),
    "registers, layer scale": ("vit_small_patch14_reg4_dinov2", {"patch_size": 8, "init_values": 0.5}),
    "no bias, any size": ("vit_tiny_patch16_224", {"patch_size": 8, "qkv_bias": False, "dynamic_img_size": True}),
    "norms": ("vit_tiny_patch16_224", {"patch_size": 8, "qk_norm": True}),
}
HUGGING_FACE: dict[str, dict[str, Any]] = {
    "ViTModel": {},
    "ViTForImageClassification": {},
    "DeiTModel": {},
    "Dinov2Model": {},
    "Dinov2WithRegistersModel": {"num_register_tokens": 4},
}


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


def sharpen(model: nn.Module) -> nn.Module:
    """Attention far from uniform."""
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and any(part in name for part in ("qkv", "q_proj", "k_proj")):
            weight.data.mul_(5)
    return model.eval()


def timm_model(kind: str) -> nn.Module:
    timm = pytest.importorskip("timm")
    name, more = TIMM[kind]
    model: nn.Module = timm.create_model(name, img_size=SIZE, depth=2, num_classes=5, **more)
    return model


def hugging_face_model(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    stem = name.removesuffix("Model").removesuffix("ForImageClassification")
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
    config = getattr(transformers, f"{stem}Config")(**sizes, **HUGGING_FACE[name], image_size=SIZE, patch_size=8)
    return getattr(transformers, name)(config)


def output(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found = first_tensor(model(images()))
    assert found is not None
    return found


def assert_replaces(model: nn.Module) -> None:
    """None replaced is the model; all replaced runs and learns, and the error said is the error there is."""
    before = output(model)
    every = replace_heads(model, images(), count=0)
    torch.testing.assert_close(output(every.model), before, rtol=0, atol=0)
    heads: dict[str, list[int]] = {}
    for entry in every.candidates:
        heads.setdefault(entry.layer, []).append(entry.head)
    assert [len(some) for some in heads.values()] == [len(every.candidates) // 2] * 2
    result = replace_heads(model, images(), heads=heads)
    after = output(result.model)
    error = float((after[3:] - before[3:]).norm() / before[3:].norm())
    assert result.output_error == pytest.approx(error, rel=1e-4)
    assert 0 < error < 1
    assert all(0 < each < 1 for each in result.layer_errors.values())
    logits = first_tensor(result.model(images()))
    assert logits is not None
    logits.square().sum().backward()
    new = next(module for module in result.model.modules() if isinstance(module, ConvolvedAttention))
    assert new.kernel.grad is not None
    assert float(new.kernel.grad.abs().max()) > 0
    # One head changes its layer less than all do.
    name, first = next(iter(heads.items()))
    one = replace_heads(model, images(), heads={name: first[:1]})
    assert one.layer_errors[name] < result.layer_errors[name]


def assert_starts(model: nn.Module) -> None:
    for filters in ("random", "impulse"):
        starts = start_as_convolution(model, filters=filters, images=images(2), mass=0.99)
        assert len(starts) == 2
        for start in starts.values():
            assert float(start.mass.mean()) == pytest.approx(0.99, abs=1e-3)
            assert start.error < 0.05
    output(model)


class TestTimm:
    @pytest.mark.parametrize("kind", TIMM)
    def test_heads_are_replaced(self, kind: str) -> None:
        assert_replaces(sharpen(timm_model(kind)))

    @pytest.mark.parametrize("kind", [kind for kind in TIMM if kind != "norms"])
    def test_it_starts_as_a_convolution(self, kind: str) -> None:
        assert_starts(timm_model(kind))

    @pytest.mark.parametrize(
        ("name", "act", "message"),
        [
            ("swin_tiny_patch4_window7_224", replace_heads, r"layers.0.blocks.0.attn: .*relative_position_bias_table"),
            ("eva02_tiny_patch14_224", replace_heads, r"blocks.0.attn: .*rotary positions"),
            ("cait_xxs24_224", replace_heads, r"blocks.0.attn.*TalkingHeadAttn.*mixes its heads"),
            ("swin_tiny_patch4_window7_224", start_as_convolution, "model: must be .*got SwinTransformer"),
            ("eva02_tiny_patch14_224", start_as_convolution, r"blocks.0.attn: .*rotary positions"),
            ("vit_small_patch16_18x2_224", start_as_convolution, r"model.blocks.0: .*got ParallelThingsBlock"),
        ],
    )
    def test_others_are_refused_by_name(self, name: str, act: Callable[..., object], message: str) -> None:
        timm = pytest.importorskip("timm")
        model = timm.create_model(name, img_size=SIZE, **({"window_size": 7} if "swin" in name else {}))
        with pytest.raises(ValueError, match=message):
            act(model, images=images(2), **({"count": 1} if act is replace_heads else {}))

    def test_a_pooling_head_is_passed_over(self) -> None:
        timm = pytest.importorskip("timm")
        model = timm.create_model("vit_base_patch16_siglip_224", img_size=SIZE, patch_size=8, depth=2).eval()
        result = replace_heads(model, images(), count=1)
        assert list(result.passed_over) == ["attn_pool"]
        found = audit(model, images(), skip_unreadable=True)
        assert [layer.name for layer in found.layers] == ["blocks.0.attn", "blocks.1.attn"]
        assert list(found.left_out) == ["attn_pool"]
        assert list(start_as_convolution(model, filters="impulse", images=images(2))) == [
            layer.name for layer in found.layers
        ]

    def test_norms_of_queries_and_keys_bound_scores(self) -> None:
        with pytest.raises(ValueError, match=r"must not normalise its queries and keys, got q_norm in blocks.0.attn"):
            start_as_convolution(timm_model("norms"))


class TestHuggingFace:
    @pytest.mark.parametrize("name", HUGGING_FACE)
    def test_heads_are_replaced(self, name: str) -> None:
        assert_replaces(sharpen(hugging_face_model(name)))

    def test_it_is_the_same_fused_and_unfused(self) -> None:
        model = sharpen(hugging_face_model("ViTModel"))
        found = []
        for kind in ("sdpa", "eager"):
            model.set_attn_implementation(kind)  # type: ignore[operator]
            found.append(output(replace_heads(model, images(), count=2).model))
        torch.testing.assert_close(found[0], found[1], **tolerance(torch.float32, scale=10))

    @pytest.mark.parametrize("name", HUGGING_FACE)
    def test_it_starts_as_a_convolution(self, name: str) -> None:
        assert_starts(hugging_face_model(name))

    def test_others_are_refused_by_name(self) -> None:
        transformers = pytest.importorskip("transformers")
        sizes = {"embed_dim": 12, "depths": [2, 1], "num_heads": [3, 3], "window_size": 7}
        swin = transformers.SwinModel(transformers.SwinConfig(**sizes, image_size=SIZE, patch_size=4))
        with pytest.raises(ValueError, match=r"model.encoder.layers.0.*: .*got SwinAttention with relative_position"):
            replace_heads(swin, images(), count=1)
        with pytest.raises(ValueError, match=r"model: must be a vision transformer with .*got SwinModel"):
            start_as_convolution(swin)
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 24}
        dino = transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**sizes, image_size=SIZE, patch_size=8))
        with pytest.raises(ValueError, match="got DINOv3ViTAttention with rotary positions"):
            replace_heads(dino, images(), count=1)
