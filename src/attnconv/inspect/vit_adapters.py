"""The parts of a vision transformer, by the names that timm and Hugging Face (ViT, DeiT, DINOv2) give them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from attnconv._util.errors import bad
from attnconv.inspect.module_adapters import AttentionParts, attention_parts
from attnconv.inspect.token_operator import pair_of

FIX = "timm's VisionTransformer and Hugging Face's ViT, DeiT and DINOv2 are supported."
TOKENS = ("cls_token", "dist_token", "reg_token", "distillation_token", "register_tokens")


@final
@dataclass(frozen=True, eq=False)
class VitBlock:
    """One block that normalises before its attention."""

    name: str  # of the attention module in the model
    attention: nn.Module
    parts: AttentionParts
    norm: nn.Module  # before the attention
    writers: tuple[nn.Linear, nn.Linear]  # the last maps of attention and MLP, which write to the residual stream


@final
@dataclass(frozen=True, eq=False)
class VitParts:
    """The parts of a vision transformer; they share its weights."""

    embed: nn.Module
    patches: nn.Conv2d
    positions: nn.Parameter  # (1, tokens, c), with or without those before the image's
    tokens: tuple[nn.Parameter, ...]  # class tokens and registers, (1, p, c) each
    grid: tuple[int, int]  # tokens of the image, (height, width)
    image_shape: tuple[int, int, int]  # (channels, height, width)
    blocks: tuple[VitBlock, ...]

    @property
    def prefix(self) -> int:
        """Number of tokens before those of the image."""
        return sum(token.shape[1] for token in self.tokens)


def vit_parts(model: nn.Module) -> VitParts:
    """Find the parts of a vision transformer; raise a ValueError for others and for layer scales per channel."""
    named: dict[str, Any] = {}
    full_names: dict[str, str] = {}
    for name, part in (*model.named_parameters(), *model.named_modules()):
        named.setdefault(name.rpartition(".")[2], part)
        full_names.setdefault(name.rpartition(".")[2], name)
    _, positions = _first(named, "pos_embed", "position_embeddings")
    _, embed = _first(named, "patch_embed", "patch_embeddings")
    stem, blocks = _first(named, "blocks", "layers", "layer")
    if embed is None or positions is None or not isinstance(blocks, nn.ModuleList | nn.Sequential):
        raise _refusal(model, "with pos_embed, patch_embed and blocks")
    _, patches = _first(dict(embed.named_children()), "proj", "projection")
    if not isinstance(patches, nn.Conv2d) or not isinstance(positions, nn.Parameter):
        raise _refusal(model, "with one convolution for patches and a parameter for positions")
    grid, stride = _grid(embed, patches), patches.stride
    parts = VitParts(
        embed,
        patches,
        positions,
        tuple(named[name] for name in TOKENS if isinstance(named.get(name), nn.Parameter)),
        grid,
        (patches.in_channels, grid[0] * stride[0], grid[1] * stride[1]),
        tuple(_block(f"{full_names[stem]}.{name}", block) for name, block in blocks.named_children()),
    )
    if not 0 <= positions.shape[1] - grid[0] * grid[1] <= parts.prefix:
        raise _refusal(model, f"with positions for {grid} patches and at most {parts.prefix} tokens before them")
    return parts


def _grid(embed: nn.Module, patches: nn.Conv2d) -> tuple[int, int]:
    """Tokens of the image, from the patch embedding or from the size of the image."""
    grid, size = pair_of(getattr(embed, "grid_size", None)), pair_of(getattr(embed, "image_size", None))
    if grid is None and size is not None:
        grid = (size[0] // patches.stride[0], size[1] // patches.stride[1])
    if grid is None:
        raise _refusal(embed, "that says its grid_size or image_size")
    return grid


def _block(name: str, block: nn.Module) -> VitBlock:
    """One block; `attention_parts` refuses attention that is not plain."""
    children = dict(block.named_children())
    inner, attention = _first(children, "attn", "attention")
    _, norm = _first(children, "norm1", "layernorm_before")
    _, mlp = _first(children, "mlp", "output")
    if attention is None or norm is None or mlp is None:
        raise _refusal(block, "whose blocks have one attention, its norm and one mlp", name)
    _, out = _first(dict(mlp.named_children()), "fc2", "down_proj", "weights_out", "dense")
    if not isinstance(out, nn.Linear):
        raise _refusal(mlp, "whose mlp ends in a linear map fc2", name)
    for part in ("ls1", "ls2", "layer_scale1", "layer_scale2"):
        weights = children[part].parameters() if part in children else ()
        if any(bool((weight != weight.flatten()[0]).any()) for weight in weights):
            raise ValueError(bad(f"model.{name}.{part}", "must be one number for all channels", "several"))
    parts = attention_parts(attention, f"model.{name}.{inner}", plain=True)
    return VitBlock(f"{name}.{inner}", attention, parts, norm, (parts.out, out))


def _first(parts: Mapping[str, Any], *names: str) -> tuple[str, Any]:
    """The first part with one of these names, and its name; None if there is none."""
    return next(((name, parts[name]) for name in names if name in parts), ("", None))


def _refusal(module: nn.Module, requirement: str, name: str = "") -> ValueError:
    argument = f"model.{name}" if name else "model"
    return ValueError(bad(argument, f"must be a vision transformer {requirement}", type(module).__name__, FIX))
