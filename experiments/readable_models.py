"""Which vision transformers can be audited? Builds models with random weights and reads their attention once.

    python -m experiments.readable_models --out results/readable-models

Needs timm, transformers, torchvision and diffusers. Nothing is downloaded. There is at least one model for
each kind of attention or token layout that the four libraries offer.
"""

import importlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn

from attnconv.inspect import visit_attention
from attnconv.operators.base import AttentionOperator

LIBRARIES = ("timm", "transformers", "torchvision", "diffusers")
TIMM = (
    "vit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "deit3_small_patch16_224",
    "vit_srelpos_small_patch16_224",
    "vit_relpos_small_patch16_224",
    "eva02_tiny_patch14_224",
    "beit_base_patch16_224",
    "beitv2_base_patch16_224",
    "vit_small_patch14_reg4_dinov2",
    "vit_small_patch16_dinov3",
    "vit_base_patch16_siglip_224",
    "vit_small_patch16_rope_224",
    "naflexvit_base_patch16_gap",
    "samvit_base_patch16_224",
    "cait_xxs24_224",
    "convit_tiny",
    "xcit_nano_12_p16_224",
    "volo_d1_224",
    "swin_tiny_patch4_window7_224",
    "swin_s3_tiny_224",
    "swinv2_tiny_window8_256",
    "swinv2_cr_tiny_224",
    "maxvit_tiny_tf_224",
    "maxvit_rmlp_nano_rw_256",
    "coatnet_0_rw_224",
    "coatnet_rmlp_nano_rw_224",
    "davit_tiny",
    "tiny_vit_5m_224",
    "hiera_tiny_224",
    "twins_pcpvt_small",
    "twins_svt_small",
    "nest_tiny",
    "mobilevit_xxs",
    "mobilevitv2_050",
    "mvitv2_tiny",
    "levit_128s",
    "levit_conv_128s",
    "pit_ti_224",
    "crossvit_tiny_240",
    "botnet26t_256",
    "halonet26t",
    "lambda_resnet26rpt_256",
    "pvt_v2_b0",
    "edgenext_xx_small",
    "efficientformer_l1",
    "efficientformerv2_s0",
    "efficientvit_b0",
    "efficientvit_m0",
    "focalnet_tiny_srf",
    "gcvit_xxtiny",
    "visformer_tiny",
    "tnt_s_patch16_224",
    "fastvit_sa12",
    "mobilenetv4_hybrid_medium",
    "nextvit_small",
    "vitamin_small_224",
    "swiftformer_xs",
    "shvit_s1",
    "coat_lite_tiny",
    "convformer_s18",
    "caformer_s18",
    "vit_pe_spatial_tiny_patch16_512",
)


@dataclass(frozen=True)
class Settings:
    """Arguments of the script."""

    out: Path | None = None
    """Output folder for the table; None only prints it."""
    only: tuple[str, ...] = ()
    """Names of the models; all if it is empty."""


def main(settings: Settings) -> None:
    """Read the models, and print and write the table."""
    lines = []
    for name, make in models().items():
        if settings.only and name not in settings.only:
            continue
        line = row(name, make)
        print(line, flush=True)
        lines.append(line)
    if settings.out is not None:
        versions = ", ".join(f"{library} {version(library)}" for library in ("torch", *LIBRARIES))
        head = f"Versions: {versions}.\n\n| model | read | not read | reasons |\n|---|---|---|---|\n"
        settings.out.mkdir(parents=True, exist_ok=True)
        (settings.out / "table.md").write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


def models() -> dict[str, Callable[[], tuple[nn.Module, Tensor, Mapping[str, Any]]]]:
    """Return functions that build each model with its input and the options of `visit_attention`."""
    made: dict[str, Callable[[], tuple[nn.Module, Tensor, Mapping[str, Any]]]] = {}
    for name in TIMM:
        made[f"timm:{name}"] = partial(_timm, name)
    return made


def _timm(name: str) -> tuple[nn.Module, Tensor, Mapping[str, Any]]:
    timm = importlib.import_module("timm")
    model: nn.Module = timm.create_model(name)
    size = model.default_cfg["input_size"]  # type: ignore[index]
    return model, torch.randn(2, *size), {}


@torch.no_grad()
def row(name: str, make: Callable[[], tuple[nn.Module, Tensor, Mapping[str, Any]]]) -> str:
    """Return the row of one model."""
    model, images, options = make()
    read: dict[str, None] = {}
    refused: dict[str, list[str]] = defaultdict(list)

    def visit(name: str, operator: AttentionOperator) -> None:
        operator.rows(torch.arange(min(4, operator.grid.query_count)))
        read[name] = None

    try:
        visit_attention(
            model.eval(), images, visit, unreadable=lambda name, reason: refused[reason].append(name), **options
        )
    except ValueError as error:
        return f"| {name} | 0 | 0 | {error} |"
    reasons = "; ".join(f"{len(names)} modules: {reason}" for reason, names in refused.items())
    return f"| {name} | {len(read)} | {sum(map(len, refused.values()))} | {reasons} |"


if __name__ == "__main__":
    main(tyro.cli(Settings))
