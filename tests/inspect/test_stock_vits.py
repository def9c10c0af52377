"""Models of timm, Hugging Face and torchvision with random weights: replaced heads, initialisation, rejected models."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnconv.inspect import audit
from attnconv.inspect.module_adapters import first_tensor
from attnconv.surgery import ConvolvedAttention, initialize, replace_heads
from tests.tolerances import tolerance

SIZE = 56
TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "class token": ("vit_tiny_patch16_224", {"patch_size": 7}),
    "distillation token": ("deit_tiny_distilled_patch16_224", {"patch_size": 7}),
    "no token": ("vit_tiny_patch16_224", {"patch_size": 7, "class_token": False, "global_pool": "avg"}),
    "registers, layer scale": ("vit_small_patch14_reg4_dinov2", {"patch_size": 7, "init_values": 0.5}),
    "no bias, any size": ("vit_tiny_patch16_224", {"patch_size": 7, "qkv_bias": False, "dynamic_img_size": True}),
    "norms": ("vit_tiny_patch16_224", {"patch_size": 7, "qk_norm": True}),
}
# Other kinds of attention: their heads can be replaced, but they cannot be initialised as a convolution.
SMALL = {"patch_size": 8}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "relative bias": ("beit_base_patch16_224", {**SMALL, "embed_dim": 48, "num_heads": 3}),
    "shared bias": ("vit_srelpos_small_patch16_224", SMALL),
    "rotary": ("eva02_tiny_patch14_224", SMALL),
    "rotary, norm before proj": ("eva02_base_patch16_clip_224", {**SMALL, "embed_dim": 48, "num_heads": 3}),
    "rotary halves, registers": ("vit_small_patch16_dinov3", SMALL),
    "rotary by head": ("vit_small_patch16_rope_mixed_224", SMALL),
}
HF_OTHERS: dict[str, dict[str, Any]] = {
    "CLIPVisionModel": {},
    "IJepaModel": {},
    "BeitModel": {"use_relative_position_bias": True},
    "DINOv3ViTModel": {"num_register_tokens": 2},
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
    """Enlarge weights, so that attention is far from uniform."""
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and any(part in name for part in ("qkv", "q_proj", "k_proj", "in_proj")):
            weight.data.mul_(5)
        elif "bias_table" in name or "attn.norm" in name or name == "heads.head.weight":
            nn.init.normal_(weight)
        elif any(part in name for part in ("gamma", "layer_scale", "ls1", "ls2")):
            nn.init.constant_(weight, 0.2)
    return model.eval()


def timm_model(kind: str) -> nn.Module:
    timm = pytest.importorskip("timm")
    name, more = {**TIMM, **OTHERS}[kind]
    model: nn.Module = timm.create_model(name, img_size=SIZE, depth=2, num_classes=5, **more)
    return model


def hugging_face_model(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    stem = name.removesuffix("Model").removesuffix("ForImageClassification")
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
    config = getattr(transformers, f"{stem}Config")(
        **sizes, **{**HUGGING_FACE, **HF_OTHERS}[name], image_size=SIZE, patch_size=8
    )
    return getattr(transformers, name)(config)


def output(model: nn.Module, x: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        found = first_tensor(model(images() if x is None else x))
    assert found is not None
    return found


def layer_output(model: nn.Module, name: str, x: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_hook(
        lambda _module, _args, out: seen.append(out[0] if isinstance(out, tuple) else out)
    )
    output(model, x)
    handle.remove()
    return seen[0]


def assert_layers_change_as_said(model: nn.Module, x: Tensor, names: list[str]) -> None:
    """Compare `layer_errors` with the measured change of each layer's output."""
    for name in names:
        result = replace_heads(model, x, heads={name: [1]})
        old, new = (layer_output(each, name, x[-1:]) for each in (model, result.model))
        error = float((new - old).norm() / old.norm())
        assert result.layer_errors[name] == pytest.approx(error, rel=1e-3)
        assert 0 < error < 1


def assert_replaces(model: nn.Module, x: Tensor | None = None) -> None:
    """Replacing no heads changes nothing; if all are replaced, gradients exist and the reported errors are correct."""
    x = images() if x is None else x
    before = output(model, x)
    every = replace_heads(model, x, count=0)
    torch.testing.assert_close(output(every.model, x), before, rtol=0, atol=0)
    heads: dict[str, list[int]] = {}
    for entry in every.candidates:
        heads.setdefault(entry.layer, []).append(entry.head)
    assert [len(some) for some in heads.values()] == [len(every.candidates) // 2] * 2
    assert_layers_change_as_said(model, x, sorted(heads))
    result = replace_heads(model, x, heads=heads)
    old, new = (output(each, x[3:]) for each in (model, result.model))  # rounding depends on the number of images
    error = float((new - old).norm() / old.norm())
    assert result.output_error == pytest.approx(error, rel=1e-4)
    assert 0 < error < 1
    assert all(0 < each < 1 for each in result.layer_errors.values())
    logits = first_tensor(result.model(x))
    assert logits is not None
    logits.square().sum().backward()
    made = next(module for module in result.model.modules() if isinstance(module, ConvolvedAttention))
    assert made.kernel.grad is not None
    assert float(made.kernel.grad.abs().max()) > 0
    # Replacing one head changes its layer less than replacing all heads.
    name, first = next(iter(heads.items()))
    one = replace_heads(model, x, heads={name: first[:1]})
    assert one.layer_errors[name] < result.layer_errors[name]


def assert_starts(model: nn.Module) -> None:
    for values in ("unchanged", "mimetic"):
        starts = initialize(model, values=values, images=images(2), mass=0.99, position_length=1.0)
        assert len(starts) == 2
        for start in starts.values():
            assert float(start.mass.mean()) == pytest.approx(0.99, abs=1e-3)
            assert start.error < 0.05
    for method in ("mimetic", "impulse", "conditioned"):
        assert len(initialize(model, method)) == 2
        assert bool(output(model).isfinite().all())


class TestTimm:
    @pytest.mark.parametrize("kind", [*TIMM, *OTHERS])
    def test_heads_are_replaced(self, kind: str) -> None:
        assert_replaces(sharpen(timm_model(kind)))

    def test_heads_are_replaced_in_shifted_windows(self) -> None:
        timm = pytest.importorskip("timm")
        sizes = {"img_size": 112, "depths": (2,), "num_heads": (4,), "embed_dim": 32, "num_classes": 5}
        model = sharpen(timm.create_model("swin_tiny_patch4_window7_224", **sizes))
        x = torch.randn(4, 3, 112, 112, generator=torch.Generator().manual_seed(1))
        assert_replaces(model, x)
        changed = replace_heads(model, x, heads={"layers.0.blocks.1.attn": [0]}).model
        assert [changed.get_submodule(f"layers.0.blocks.{block}").attn_mask is None for block in range(2)] == [
            True,
            False,
        ]

    @pytest.mark.parametrize("kind", [kind for kind in TIMM if kind != "norms"])
    def test_it_is_initialised(self, kind: str) -> None:
        assert_starts(timm_model(kind))

    @pytest.mark.parametrize(
        ("name", "act", "message"),
        [
            ("swinv2_tiny_window8_256", replace_heads, r"layers.0.blocks.0.attn: .*logit_scale"),
            ("vit_relpos_small_patch16_224", replace_heads, r"blocks.0.attn: .*rel_pos"),
            ("convit_tiny", replace_heads, r"blocks.0.attn: .*got GPSA"),
            ("cait_xxs24_224", replace_heads, r"blocks.0.attn.*TalkingHeadAttn.*mixes its maps"),
            ("swin_tiny_patch4_window7_224", initialize, "model: must be .*got SwinTransformer"),
            ("eva02_tiny_patch14_224", initialize, r"blocks.0.attn: .*rotary positions"),
            ("vit_small_patch16_18x2_224", initialize, r"model.blocks.0: .*got ParallelThingsBlock"),
        ],
    )
    def test_others_are_refused_by_name(self, name: str, act: Callable[..., object], message: str) -> None:
        timm = pytest.importorskip("timm")
        more = {"swin_tiny_patch4_window7_224": {"window_size": 7}, "swinv2_tiny_window8_256": {"window_size": 7}}
        size = 112 if "v2" in name else SIZE
        model = timm.create_model(name, img_size=size, **more.get(name, {}))
        if name == "convit_tiny":
            act = partial(act, layers=["blocks.0.attn"])
        with pytest.raises(ValueError, match=message):
            act(
                model,
                images=torch.randn(2, 3, size, size),
                **({} if act is initialize else {"count": 1}),
            )

    def test_a_pooling_head_is_left_out(self) -> None:
        timm = pytest.importorskip("timm")
        model = timm.create_model("vit_base_patch16_siglip_224", img_size=SIZE, patch_size=8, depth=2).eval()
        result = replace_heads(model, images(), count=1)
        assert list(result.left_out) == ["attn_pool"]
        with pytest.warns(UserWarning, match="attn_pool"):
            found = audit(model, images())
        assert [layer.name for layer in found.layers] == ["blocks.0.attn", "blocks.1.attn"]
        assert list(found.left_out) == ["attn_pool"]
        assert list(initialize(model, images=images(2))) == [layer.name for layer in found.layers]

    def test_norms_of_queries_and_keys_bound_scores(self) -> None:
        with pytest.raises(ValueError, match=r"model.blocks.0.attn: .*got Attention with q_norm"):
            initialize(timm_model("norms"))


class TestHuggingFace:
    @pytest.mark.parametrize("name", [*HUGGING_FACE, *HF_OTHERS])
    def test_heads_are_replaced(self, name: str) -> None:
        assert_replaces(sharpen(hugging_face_model(name)))

    def test_heads_are_replaced_in_shifted_windows(self) -> None:
        transformers = pytest.importorskip("transformers")
        sizes = {"embed_dim": 24, "depths": [2], "num_heads": [3], "window_size": 7, "image_size": 112}
        model = sharpen(transformers.SwinModel(transformers.SwinConfig(**sizes, patch_size=4)))
        assert_replaces(model, torch.randn(4, 3, 112, 112, generator=torch.Generator().manual_seed(1)))

    def test_it_is_the_same_fused_and_unfused(self) -> None:
        model = sharpen(hugging_face_model("ViTModel"))
        found = []
        for kind in ("sdpa", "eager"):
            model.set_attn_implementation(kind)  # type: ignore[operator]
            found.append(output(replace_heads(model, images(), count=2).model))
        torch.testing.assert_close(found[0], found[1], **tolerance(torch.float32, scale=10))

    @pytest.mark.parametrize("name", HUGGING_FACE)
    def test_it_is_initialised(self, name: str) -> None:
        assert_starts(hugging_face_model(name))

    def test_others_are_refused_by_name(self) -> None:
        transformers = pytest.importorskip("transformers")
        sizes = {"embed_dim": 12, "depths": [2, 1], "num_heads": [3, 3], "window_size": 7}
        swin = transformers.SwinModel(transformers.SwinConfig(**sizes, image_size=SIZE, patch_size=4))
        with pytest.raises(ValueError, match=r"model: .*got SwinModel"):
            initialize(swin)
        swin = transformers.Swinv2Model(transformers.Swinv2Config(**sizes, image_size=SIZE, patch_size=4))
        with pytest.raises(ValueError, match=r"model.encoder.layers.0.*: .*got Swinv2SelfAttention"):
            replace_heads(swin, images(), count=1)


class Patches(nn.Module):
    """PyTorch's encoder on the patches of an image."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.batch_first, self.embed = batch_first, nn.Conv2d(3, 48, 8, stride=8)
        layer = nn.TransformerEncoderLayer(48, 4, 64, dropout=0.1, batch_first=batch_first, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).permute((0, 2, 1) if self.batch_first else (2, 0, 1))
        out: Tensor = self.encoder(tokens).mean(1 if self.batch_first else 0)
        return out


class TestTorch:
    @pytest.mark.parametrize("batch_first", [False, True])
    def test_heads_of_its_encoder_are_replaced(self, batch_first: bool) -> None:
        torch.manual_seed(0)
        assert_replaces(sharpen(Patches(batch_first=batch_first)))

    def test_heads_of_torchvision_s_are_replaced(self) -> None:
        torchvision = pytest.importorskip("torchvision")
        model = torchvision.models.VisionTransformer(SIZE, 8, 2, 3, 48, 48, num_classes=5)
        assert_replaces(sharpen(model))
        swin = torchvision.models.swin_transformer.SwinTransformer([4, 4], 24, [2], [3], [7, 7])
        with pytest.raises(ValueError, match=r"model.features.1.0.attn.x: .*3 axes"):
            replace_heads(swin, images(), count=1)

    def test_torchvision_s_is_initialised(self) -> None:
        torchvision = pytest.importorskip("torchvision")
        assert_starts(torchvision.models.VisionTransformer(SIZE, 8, 2, 3, 48, 48, num_classes=5))
