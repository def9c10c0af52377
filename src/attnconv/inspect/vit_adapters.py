"""Where the parts of a stock vision transformer live: patches, tokens, positions, blocks.

Two layouts are known, by the names of their parts:

    patch_embed, pos_embed, blocks[i].attn, .norm1, .mlp       timm's VisionTransformer
    embeddings.patch_embeddings, .position_embeddings,         Hugging Face's ViT, DeiT and DINOv2, with or without
    layers[i] or encoder.layer[i] .attention, .mlp             registers and heads on top
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from attnconv._util.errors import bad
from attnconv.inspect.module_adapters import AttentionParts, attention_parts
from attnconv.inspect.token_grid import pair_of

FIX = "timm's VisionTransformer and Hugging Face's ViT, DeiT and DINOv2 are taken."


@final
@dataclass(frozen=True, eq=False)
class VitBlock:
    """One block, normalised before its attention.

    Attributes:
        name: Name of its attention module in the model.
        attention: That module.
        parts: Its parts.
        norm: What its attention is normalised by.
        writers: The linear maps whose outputs join the residual stream: of the attention and of the MLP.
    """

    name: str
    attention: nn.Module
    parts: AttentionParts
    norm: nn.Module
    writers: tuple[nn.Linear, nn.Linear]


@final
@dataclass(frozen=True, eq=False)
class VitParts:
    """The parts of a vision transformer, which hold its own weights.

    Attributes:
        embed: Images to patches' embeddings.
        patches: Its convolution.
        positions: (1, tokens, c), with or without those before the image's.
        tokens: Class tokens and registers, (1, p, c) each.
        grid: Tokens of the image, (height, width).
        image_shape: (channels, height, width) of images.
        blocks: In the order in which they run.
    """

    embed: nn.Module
    patches: nn.Conv2d
    positions: nn.Parameter
    tokens: tuple[nn.Parameter, ...]
    grid: tuple[int, int]
    image_shape: tuple[int, int, int]
    blocks: tuple[VitBlock, ...]

    @property
    def prefix(self) -> int:
        """Tokens before those of the image."""
        return sum(token.shape[1] for token in self.tokens)


def vit_parts(model: nn.Module) -> VitParts:
    """Name the parts of a vision transformer.

    Args:
        model: timm's or Hugging Face's.

    Raises:
        ValueError: The model has other parts, blocks that are not attention and MLP one after the other, or layer
            scales that are not one number.

    Example:
        >>> vit_parts(nn.Linear(2, 2))
        Traceback (most recent call last):
        ValueError: model: must be a vision transformer with pos_embed, patch_embed and blocks, got Linear. timm's \
VisionTransformer and Hugging Face's ViT, DeiT and DINOv2 are taken.
    """
    source: Any = model
    if all(getattr(model, part, None) is not None for part in ("pos_embed", "patch_embed", "blocks")):
        found, tokens = [source], ("cls_token", "dist_token", "reg_token")
        embed, positions = source.patch_embed, source.pos_embed
        patches = getattr(embed, "proj", None)
        stem, blocks = "blocks", source.blocks
    else:
        name, base = _base(model)
        found, tokens = [base.embeddings], ("cls_token", "distillation_token", "register_tokens")
        embed, positions = base.embeddings.patch_embeddings, base.embeddings.position_embeddings
        patches = getattr(embed, "projection", None)
        stem, blocks = ("layers", base.layers) if _list(base, "layers") else ("encoder.layer", base.encoder.layer)
        stem = f"{name}.{stem}" if name else stem
    if not isinstance(patches, nn.Conv2d) or not isinstance(positions, nn.Parameter):
        raise _refusal(model, "with one convolution for patches and a parameter for positions")
    grid = _grid(embed, patches)
    parts = VitParts(
        embed,
        patches,
        positions,
        tuple(token for part in tokens if (token := getattr(found[0], part, None)) is not None),
        grid,
        (patches.in_channels, grid[0] * patches.stride[0], grid[1] * patches.stride[1]),
        tuple(_block(f"{stem}.{number}", block) for number, block in enumerate(blocks)),
    )
    if not 0 <= positions.shape[1] - grid[0] * grid[1] <= parts.prefix:
        raise _refusal(model, f"with positions for {grid} patches and at most {parts.prefix} tokens before them")
    return parts


def _base(model: nn.Module) -> tuple[str, Any]:
    """The module of Hugging Face's kind inside a model, with its name."""
    for name, module in model.named_modules():
        embeddings = getattr(module, "embeddings", None)
        known = all(getattr(embeddings, part, None) is not None for part in ("patch_embeddings", "position_embeddings"))
        if known and (_list(module, "layers") or _list(getattr(module, "encoder", None), "layer")):
            return name, module
    raise _refusal(model, "with pos_embed, patch_embed and blocks")


def _list(module: Any, name: str) -> bool:
    return isinstance(getattr(module, name, None), nn.ModuleList)


def _grid(embed: Any, patches: nn.Conv2d) -> tuple[int, int]:
    """Tokens of the image as the patches' module says it, or by the image's size."""
    grid = pair_of(getattr(embed, "grid_size", None))
    size = pair_of(getattr(embed, "image_size", None))
    if grid is None and size is not None:
        grid = (size[0] // patches.stride[0], size[1] // patches.stride[1])
    if grid is None:
        raise _refusal(embed, "that says its grid_size or image_size")
    return grid


def _block(name: str, block: Any) -> VitBlock:
    """One block; its attention is refused by `attention_parts` where it is not plain."""
    attention, norm, mlp = (
        next(_named(block, names), (None, None))
        for names in (("attn", "attention"), ("norm1", "layernorm_before"), ("mlp", "output"))
    )
    if attention[1] is None or norm[1] is None or mlp[1] is None:
        raise _refusal(block, "whose blocks have one attention, its norm and one mlp", name)
    _, out = next(_named(mlp[1], ("fc2", "down_proj", "weights_out", "dense")), (None, None))
    if not isinstance(out, nn.Linear):
        raise _refusal(mlp[1], "whose mlp ends in a linear map fc2", name)
    for part, scale in _named(block, ("ls1", "ls2", "layer_scale1", "layer_scale2")):
        if any(bool((weight != weight.flatten()[0]).any()) for weight in scale.parameters()):
            raise ValueError(bad(f"model.{name}.{part}", "must be one number for all channels", "several"))
    inner = f"{name}.{attention[0]}"
    parts = attention_parts(attention[1], f"model.{inner}", plain=True)
    return VitBlock(inner, attention[1], parts, norm[1], (parts.out, out))


def _named(module: Any, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Attributes that are there, with their names."""
    return ((name, part) for name in names if (part := getattr(module, name, None)) is not None)


def _refusal(module: nn.Module, requirement: str, name: str = "") -> ValueError:
    argument = f"model.{name}" if name else "model"
    return ValueError(bad(argument, f"must be a vision transformer {requirement}", type(module).__name__, FIX))
