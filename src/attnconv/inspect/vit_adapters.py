"""The parts of a vision transformer, by the names that other libraries give them.

patch_embed, pos_embed, blocks[i].attn, .norm1, .mlp       timm's VisionTransformer
embeddings.patch_embeddings, .position_embeddings,         Hugging Face's ViT, DeiT and DINOv2, with or without
layers[i] or encoder.layer[i] .attention, .mlp             registers and heads on top
"""

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
    """One block that normalises before its attention.

    Attributes:
        name, attention, parts: Its attention: the module's name in the model, the module, and its parts.
        norm: The norm before the attention.
        writers: The linear maps at the end of the attention and of the MLP, which write to the residual stream.
    """

    name: str
    attention: nn.Module
    parts: AttentionParts
    norm: nn.Module
    writers: tuple[nn.Linear, nn.Linear]


@final
@dataclass(frozen=True, eq=False)
class VitParts:
    """The parts of a vision transformer; they share its weights.

    Attributes:
        embed, patches: Patch embedding and its convolution.
        positions: (1, tokens, c), with or without those before the image's.
        tokens: Class tokens and registers, (1, p, c) each.
        grid: Tokens of the image, (height, width).
        image_shape: (channels, height, width) of images.
        blocks: The blocks, in order.
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
        """Number of tokens before those of the image."""
        return sum(token.shape[1] for token in self.tokens)


def vit_parts(model: nn.Module) -> VitParts:
    """Find the parts of a vision transformer of timm or Hugging Face.

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
        holder, tokens = source, ("cls_token", "dist_token", "reg_token")
        embed, positions, convolution = source.patch_embed, source.pos_embed, "proj"
        stem, blocks = "blocks", source.blocks
    else:
        name, base = _base(model)
        holder, tokens = base.embeddings, ("cls_token", "distillation_token", "register_tokens")
        embed, positions, convolution = holder.patch_embeddings, holder.position_embeddings, "projection"
        stem, blocks = ("layers", base.layers) if _has_list(base, "layers") else ("encoder.layer", base.encoder.layer)
        stem = f"{name}.{stem}" if name else stem
    patches = getattr(embed, convolution, None)
    if not isinstance(patches, nn.Conv2d) or not isinstance(positions, nn.Parameter):
        raise _refusal(model, "with one convolution for patches and a parameter for positions")
    grid = _grid(embed, patches)
    parts = VitParts(
        embed,
        patches,
        positions,
        tuple(token for part in tokens if (token := getattr(holder, part, None)) is not None),
        grid,
        (patches.in_channels, grid[0] * patches.stride[0], grid[1] * patches.stride[1]),
        tuple(_block(f"{stem}.{number}", block) for number, block in enumerate(blocks)),
    )
    if not 0 <= positions.shape[1] - grid[0] * grid[1] <= parts.prefix:
        raise _refusal(model, f"with positions for {grid} patches and at most {parts.prefix} tokens before them")
    return parts


def _base(model: nn.Module) -> tuple[str, Any]:
    """The module of Hugging Face's layout inside a model, with its name."""
    for name, module in model.named_modules():
        embeddings = getattr(module, "embeddings", None)
        known = all(getattr(embeddings, part, None) is not None for part in ("patch_embeddings", "position_embeddings"))
        if known and (_has_list(module, "layers") or _has_list(getattr(module, "encoder", None), "layer")):
            return name, module
    raise _refusal(model, "with pos_embed, patch_embed and blocks")


def _has_list(module: Any, name: str) -> bool:
    return isinstance(getattr(module, name, None), nn.ModuleList)


def _grid(embed: Any, patches: nn.Conv2d) -> tuple[int, int]:
    """Tokens of the image, as the patch embedding says it or from the size of the image."""
    grid, size = pair_of(getattr(embed, "grid_size", None)), pair_of(getattr(embed, "image_size", None))
    if grid is None and size is not None:
        grid = (size[0] // patches.stride[0], size[1] // patches.stride[1])
    if grid is None:
        raise _refusal(embed, "that says its grid_size or image_size")
    return grid


def _block(name: str, block: Any) -> VitBlock:
    """One block; `attention_parts` refuses attention that is not plain."""
    inner, attention = _first(block, "attn", "attention")
    _, norm = _first(block, "norm1", "layernorm_before")
    _, mlp = _first(block, "mlp", "output")
    if attention is None or norm is None or mlp is None:
        raise _refusal(block, "whose blocks have one attention, its norm and one mlp", name)
    _, out = _first(mlp, "fc2", "down_proj", "weights_out", "dense")
    if not isinstance(out, nn.Linear):
        raise _refusal(mlp, "whose mlp ends in a linear map fc2", name)
    for part in ("ls1", "ls2", "layer_scale1", "layer_scale2"):
        scale = getattr(block, part, None)
        weights = () if scale is None else scale.parameters()
        if any(bool((weight != weight.flatten()[0]).any()) for weight in weights):
            raise ValueError(bad(f"model.{name}.{part}", "must be one number for all channels", "several"))
    parts = attention_parts(attention, f"model.{name}.{inner}", plain=True)
    return VitBlock(f"{name}.{inner}", attention, parts, norm, (parts.out, out))


def _first(module: Any, *names: str) -> tuple[str, Any]:
    """The first attribute that is there, with its name; None where there is none."""
    found = ((name, getattr(module, name, None)) for name in names)
    return next(((name, part) for name, part in found if part is not None), ("", None))


def _refusal(module: nn.Module, requirement: str, name: str = "") -> ValueError:
    argument = f"model.{name}" if name else "model"
    return ValueError(bad(argument, f"must be a vision transformer {requirement}", type(module).__name__, FIX))
