"""Which models of timm, torchvision, Hugging Face and diffusers can be audited, with random weights.

    python -m experiments.readable_models --out results/readable-models
    python -m experiments.readable_models swin_tiny_patch4_window7_224 Sam

A model is read *whole* if all of its attention among tokens of the image can be read, and *partly* if only some of it
can. Attention that is not among tokens of the image (among channels, or from latents, text or whole images) is listed
with the reason, but does not count. Nothing is downloaded: models of Hugging Face and diffusers are small ones with the
structure of the originals. The libraries are those of the extra `models`, and diffusers.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnconv.inspect import visit_attention
from attnconv.operators import AttentionOperator
from experiments.torchvision_operators import declare_missing

# At least one name of each family of timm with attention, and some without.
TIMM = (
    "beit_base_patch16_224 bat_resnext26ts botnet26t_256 cait_xxs24_224 caformer_s18 coat_tiny coatnet_0_rw_224 "
    "coatnet_rmlp_nano_rw_224 convit_tiny crossvit_9_240 csatv2 cs3se_edgenet_x davit_tiny deit3_small_patch16_224 "
    "deit_tiny_distilled_patch16_224 edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientvit_b0 "
    "efficientvit_m0 eva02_tiny_patch14_224 fastvit_sa12 fastvit_ma36 flexivit_small focalnet_tiny_srf gcvit_xxtiny "
    "ghostnetv2_100 halonet26t hiera_tiny_224 hgnet_tiny inception_next_tiny lambda_resnet26t levit_128s "
    "levit_conv_128s maxvit_tiny_tf_224 maxxvit_rmlp_nano_rw_256 mobilenetv4_hybrid_medium mobilevit_xxs "
    "mobilevitv2_050 mvitv2_tiny naflexvit_base_patch16_gap nest_tiny nextvit_small pit_ti_224 poolformer_s12 "
    "pvt_v2_b0 repvit_m0_9 resnet50 samvit_base_patch16_224 sehalonet33ts sequencer2d_s shvit_s1 swiftformer_xs "
    "swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 swinv2_tiny_window8_256 tiny_vit_5m_224 tnt_s_patch16_224 "
    "twins_pcpvt_small twins_svt_small visformer_tiny vit_base_patch16_siglip_224 vit_relpos_small_patch16_224 "
    "vit_small_patch14_reg4_dinov2 vit_small_patch16_dinov3 vit_srelpos_small_patch16_224 vit_tiny_patch16_224 "
    "vit_tiny_r_s16_p8_224 vitamin_small_224 volo_d1_224 xcit_nano_12_p16_224"
)

TORCHVISION = ("maxvit_t", "swin_t", "swin_v2_t", "vit_b_16", "mvit_v2_s", "swin3d_t")

HEADER = "| library | model | attention layers read | verdict | left out |\n|---|---|---|---|---|"
NOT_TOKENS = ("channels", "none of its queries is a token", "none of its keys is a token")


@dataclass(frozen=True)
class Entry:
    """What could be read of one model."""

    library: str
    model: str
    read: int  # number of attention layers that were read
    others: tuple[str, ...]  # reasons for layers whose attention is not among tokens of the image
    refused: tuple[str, ...]  # reasons for all other layers that could not be read

    @property
    def verdict(self) -> str:
        if self.read and self.refused:
            return "partly"
        if self.read:
            return "whole"
        return "refused" if self.refused else "no attention among tokens"

    def row(self) -> str:
        """Return the row of the Markdown table."""
        reasons = "; ".join((*self.refused, *self.others))
        return f"| {self.library} | {self.model} | {self.read} | {self.verdict} | {reasons} |"


def examine(library: str, name: str, model: nn.Module, images: Tensor, options: dict[str, Any]) -> Entry:
    """Run a model once and collect what can be read."""
    read, reasons = set[str](), dict[str, str]()

    def visit(layer: str, operator: AttentionOperator) -> None:
        operator.rows([0])
        read.add(layer)

    try:
        visit_attention(
            model.eval(),
            images,
            visit,
            grid=TOKENS.get(name),
            prefix=0 if name in TOKENS else None,
            options=options,
            unreadable=reasons.setdefault,
        )
    except ValueError as error:
        if "must contain an attention layer" not in str(error):
            raise
    others = {why for why in reasons.values() if any(part in why for part in NOT_TOKENS)}
    return Entry(library, name, len(read), tuple(sorted(others)), tuple(sorted({*reasons.values()} - others)))


def timm_model(name: str) -> tuple[nn.Module, Tensor, dict[str, Any]]:
    """Return a model of timm, its input and further inputs, like the three functions below."""
    import timm

    model = timm.create_model(name)
    return model, torch.randn(1, *timm.get_pretrained_cfg(name).input_size), {}


def torchvision_model(name: str) -> tuple[nn.Module, Tensor, dict[str, Any]]:
    """Return a model of torchvision."""
    import torchvision

    video = name in ("mvit_v2_s", "swin3d_t")
    models = torchvision.models.video if video else torchvision.models
    sizes = (3, 16, 224, 224) if video else (3, 224, 224)
    return getattr(models, name)(), torch.randn(1, *sizes), {}


SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48, "patch_size": 8}
IMAGE = {**SMALL, "image_size": 64}
# Name of the configuration and of the model (without the endings Config and Model), its settings, size of the input.
HUGGING_FACE: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "ViT": ("ViTModel", IMAGE, (3, 64, 64)),
    "DeiT": ("DeiTModel", IMAGE, (3, 64, 64)),
    "Beit": ("BeitModel", {**IMAGE, "use_relative_position_bias": True}, (3, 64, 64)),
    "Data2VecVision": ("Data2VecVisionModel", IMAGE, (3, 64, 64)),
    "ViTMSN": ("ViTMSNModel", IMAGE, (3, 64, 64)),
    "IJepa": ("IJepaModel", IMAGE, (3, 64, 64)),
    "Dinov2": ("Dinov2Model", IMAGE, (3, 64, 64)),
    "Dinov2WithRegisters": ("Dinov2WithRegistersModel", {**IMAGE, "num_register_tokens": 4}, (3, 64, 64)),
    "DINOv3ViT": ("DINOv3ViTModel", {**IMAGE, "num_register_tokens": 4}, (3, 64, 64)),
    "CLIPVision": ("CLIPVisionModel", IMAGE, (3, 64, 64)),
    "SiglipVision": ("SiglipVisionModel", IMAGE, (3, 64, 64)),
    "Siglip2Vision": ("Siglip2VisionModel", {**SMALL, "num_patches": 64}, (64, 192)),
    "PixtralVision": (
        "PixtralVisionModel",
        {**IMAGE, "head_dim": 16},
        (3, 64, 64),
    ),
    "Hiera": ("HieraModel", {"embed_dim": 24, "image_size": [64, 64], "depths": [1, 1, 2, 1]}, (3, 64, 64)),
    "Swin": ("SwinModel", {"embed_dim": 12, "depths": [2, 1], "num_heads": [3, 3], "image_size": 64}, (3, 64, 64)),
    "Swinv2": ("Swinv2Model", {"embed_dim": 12, "depths": [2, 1], "num_heads": [3, 3], "image_size": 64}, (3, 64, 64)),
    "Segformer": ("SegformerModel", {}, (3, 64, 64)),
    "Pvt": ("PvtModel", {"image_size": 224}, (3, 224, 224)),
    "PvtV2": ("PvtV2Model", {}, (3, 224, 224)),
    "Cvt": ("CvtModel", {}, (3, 64, 64)),
    "MobileViT": ("MobileViTModel", {"image_size": 64}, (3, 64, 64)),
    "Levit": ("LevitModel", {}, (3, 224, 224)),
    "Glpn": ("GLPNModel", {}, (3, 64, 64)),
    "PoolFormer": ("PoolFormerModel", {}, (3, 64, 64)),
    "SamVision": (
        "SamVisionModel",
        {**IMAGE, "window_size": 3, "global_attn_indexes": [1], "output_channels": 16},
        (3, 64, 64),
    ),
    "VitDet": ("VitDetModel", {**IMAGE, "window_size": 3, "window_block_indices": [0]}, (3, 64, 64)),
    "Yolos": ("YolosModel", {**IMAGE, "image_size": [64, 64], "num_detection_tokens": 5}, (3, 64, 64)),
    "VideoMAE": ("VideoMAEModel", {**IMAGE, "num_frames": 4}, (4, 3, 64, 64)),
    "Vivit": ("VivitModel", {**SMALL, "image_size": 64, "num_frames": 4, "tubelet_size": [2, 8, 8]}, (4, 3, 64, 64)),
    "Timesformer": ("TimesformerModel", {**IMAGE, "num_frames": 4}, (4, 3, 64, 64)),
    "VJEPA2": (
        "VJEPA2Model",
        {
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "crop_size": 64,
            "patch_size": 8,
            "frames_per_clip": 4,
            "pred_hidden_size": 48,
            "pred_num_attention_heads": 3,
            "pred_num_hidden_layers": 1,
        },
        (4, 3, 64, 64),
    ),
}
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "Siglip2Vision": lambda: {
        "pixel_attention_mask": torch.ones(1, 64, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[8, 8]]),
    },
    "PixtralVision": lambda: {"image_sizes": [(64, 64)]},
    "VJEPA2": lambda: {"skip_predictor": True},
}


def hugging_face_model(name: str) -> tuple[nn.Module, Tensor, dict[str, Any]]:
    """Return a small model of Hugging Face."""
    import transformers

    kind, settings, sizes = HUGGING_FACE[name]
    config = getattr(transformers, f"{kind.removesuffix('Model')}Config")(**settings)
    return getattr(transformers, kind)(config), torch.randn(1, *sizes), OPTIONS.get(name, dict)()


HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "in_channels": 4}
PATCHES = {**HEADS, "sample_size": 16, "patch_size": 2}
# Name of the model without the ending Model, its settings, size of the input, further inputs.
DIFFUSERS: dict[str, tuple[dict[str, Any], tuple[int, ...], Callable[[], dict[str, Any]]]] = {
    "DiTTransformer2D": (
        PATCHES,
        (4, 16, 16),
        lambda: {"timestep": torch.tensor([1]), "class_labels": torch.tensor([1])},
    ),
    "PixArtTransformer2D": (
        {**PATCHES, "cross_attention_dim": 16, "caption_channels": 16},
        (4, 16, 16),
        lambda: {
            "encoder_hidden_states": torch.randn(1, 5, 16),
            "timestep": torch.tensor([1]),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    "SD3Transformer2D": (
        {
            **PATCHES,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 16,
            "pos_embed_max_size": 16,
        },
        (4, 16, 16),
        lambda: {
            "encoder_hidden_states": torch.randn(1, 5, 16),
            "pooled_projections": torch.randn(1, 16),
            "timestep": torch.tensor([1]),
        },
    ),
    "FluxTransformer2D": (
        {
            **HEADS,
            "num_single_layers": 1,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 16,
            "axes_dims_rope": [2, 2, 4],
        },
        (64, 4),
        lambda: {
            "encoder_hidden_states": torch.randn(1, 5, 16),
            "pooled_projections": torch.randn(1, 16),
            "timestep": torch.tensor([1.0]),
            "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(8.0), torch.arange(8.0)),
            "txt_ids": torch.zeros(5, 3),
        },
    ),
    "SanaTransformer2D": (
        {
            **HEADS,
            "sample_size": 16,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 16,
            "caption_channels": 16,
        },
        (4, 16, 16),
        lambda: {"encoder_hidden_states": torch.randn(1, 5, 16), "timestep": torch.tensor([1])},
    ),
    "CogVideoXTransformer3D": (
        {
            **HEADS,
            "sample_width": 16,
            "sample_height": 16,
            "sample_frames": 9,
            "text_embed_dim": 16,
            "max_text_seq_length": 5,
        },
        (5, 4, 16, 16),
        lambda: {"encoder_hidden_states": torch.randn(1, 5, 16), "timestep": torch.tensor([1])},
    ),
    "LatteTransformer3D": (
        {**PATCHES, "cross_attention_dim": 16, "caption_channels": 16, "video_length": 5},
        (4, 5, 16, 16),
        lambda: {"encoder_hidden_states": torch.randn(1, 5, 16), "timestep": torch.tensor([1])},
    ),
    "WanTransformer3D": (
        {**HEADS, "attention_head_dim": 12, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32},
        (4, 5, 16, 16),
        lambda: {"encoder_hidden_states": torch.randn(1, 5, 16), "timestep": torch.tensor([1])},
    ),
    "UNet2D": (
        {
            "sample_size": 32,
            "block_out_channels": (32, 64),
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        (3, 32, 32),
        lambda: {"timestep": torch.tensor([1])},
    ),
    "AutoencoderKL": ({"block_out_channels": (32,)}, (3, 32, 32), dict),
}


def diffusers_model(name: str) -> tuple[nn.Module, Tensor, dict[str, Any]]:
    """Return a small model of diffusers."""
    import diffusers

    settings, sizes, options = DIFFUSERS[name]
    kind = name if hasattr(diffusers, name) else f"{name}Model"
    return getattr(diffusers, kind)(**settings), torch.randn(1, *sizes), options()


LIBRARIES: dict[str, tuple[Sequence[str], Callable[[str], tuple[nn.Module, Tensor, dict[str, Any]]]]] = {
    "timm": (TIMM.split(), timm_model),
    "torchvision": (TORCHVISION, torchvision_model),
    "transformers": (tuple(HUGGING_FACE), hugging_face_model),
    "diffusers": (tuple(DIFFUSERS), diffusers_model),
}
TOKENS = {"FluxTransformer2D": (8, 8), "Siglip2Vision": (8, 8)}  # grid of models whose input are tokens


def main() -> None:
    """Examine all models, or those with the given names, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names of models; all by default")
    parser.add_argument("--out", type=Path, help="folder for the results")
    arguments = parser.parse_args()
    declared = declare_missing()
    entries = []
    for library, (names, make) in LIBRARIES.items():
        for name in names:
            if arguments.models and name not in arguments.models:
                continue
            torch.manual_seed(0)
            entries.append(examine(library, name, *make(name)))
            print(entries[-1].row(), flush=True)
    del declared
    versions = {name: version(name) for name in ("torch", *LIBRARIES)}
    counts = Counter(entry.verdict for entry in entries)
    attention = [entry for entry in entries if entry.read or entry.refused]
    summary = f"{counts['whole']} of {len(attention)} models with attention among tokens are read whole."
    print(summary)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        table = "\n".join([HEADER, *(entry.row() for entry in entries)])
        used = ", ".join(f"{name} {number}" for name, number in versions.items())
        (arguments.out / "table.md").write_text(f"{summary}\n\nVersions: {used}.\n\n{table}\n")


if __name__ == "__main__":
    main()
