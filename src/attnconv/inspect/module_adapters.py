"""Find the parts of attention modules and vision transformers by their names in timm, Hugging Face and torch.

    out = N_o( concat_h( softmax(scores_h) x W_v,h ) ) W_o        for tokens x and heads h, biases omitted

with scores as in `score_modifiers` and an optional norm N_o. Modules with parts that are known to change the formula
are rejected; `surgery.replaceable_attention` verifies the others by comparing outputs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv.inspect.score_modifiers import NO_TERMS, ROTATIONS, CallForm, PositionBias, ScoreTerms

# Attributes that may contain each part of the formula; the first that exists is used.
NAMES = {
    "num_heads": ("num_heads", "num_attention_heads", "attention.num_attention_heads"),
    "head_dim": ("head_dim", "attention_head_size", "attention.attention_head_size"),
    "scale": ("scale", "scaling", "attention.scaling"),
    "proj or o_proj": ("proj", "o_proj", "out_proj", "output.dense"),
    "q_norm": ("q_norm",),
    "k_norm": ("k_norm",),
    "norm": ("norm", "output.norm"),
    "dropout": ("attn_drop", "attention_dropout", "attention.dropout_prob", "attention.dropout", "dropout"),
    "out_dropout": ("proj_drop", "output.dropout"),
}
PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("attention.query", "attention.key", "attention.value"))
BIAS_HOLDERS = ("relative_position_bias", "rel_pos")  # submodules that may contain the bias table
OTHERS = ("gate", "gating_param", "logit_scale", "relative_position_bias_table", *BIAS_HOLDERS, "q_bias")
FIX = "Supported are timm's ViT, BEiT, EVA and Swin, Hugging Face's ViT family and nn.MultiheadAttention."
FIX_VIT = "VisionTransformer from timm and torchvision, and ViT, DeiT and DINOv2 from Hugging Face are supported."
POSITIONS, PATCHES = ("pos_embed", "position_embeddings", "pos_embedding"), ("patch_embed", "patch_embeddings")
BLOCKS = ("blocks", "layers", "layer")
TOKENS = ("cls_token", "class_token", "dist_token", "reg_token", "distillation_token", "register_tokens")


@final
class Projection(NamedTuple):
    """A linear map, possibly a slice of a larger one; its tensors are views of the module's tensors."""

    weight: Float[Tensor, "d c"]
    bias: Float[Tensor, "d"] | None


@final
@dataclass(frozen=True, eq=False)
class AttentionParts:
    """The parts of one attention module, which share its weights."""

    query: Projection  # heads are concatenated, also in `key` and `value`
    key: Projection
    value: Projection
    out: nn.Linear
    heads: int
    head_dim: int
    scale: float  # the factor s of the scores
    query_norm: nn.Module  # N_q; like N_k, it is applied to each head
    key_norm: nn.Module
    out_norm: nn.Module  # N_o, applied to all heads at once
    bias: PositionBias | None
    dropout: float  # rate of attention dropout in training
    out_dropout: nn.Module  # after W_o

    def maps_and_values(
        self, x: Float[Tensor, "b n c"], terms: ScoreTerms = NO_TERMS
    ) -> tuple[Float[Tensor, "b h n n"], Float[Tensor, "b h n d"]]:
        """Compute the attention maps and values of all heads, without dropout."""
        query, key, value = (
            F.linear(x, *part).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        query, key = terms.turned(self.query_norm(query)), terms.turned(self.key_norm(key))
        scores = query @ key.transpose(-2, -1) * self.scale
        if self.bias is not None:
            scores = scores + self.bias()
        return terms.raised(scores).softmax(-1), value

    def finish(self, mixed: Float[Tensor, "b h n d"]) -> Float[Tensor, "b n c"]:
        """Apply N_o and W_o to the outputs of the heads."""
        out: Tensor = self.out(self.out_norm(mixed.transpose(1, 2).flatten(2)))
        return out


def attention_parts(attention: nn.Module, name: str = "attention") -> AttentionParts:
    """Find the parts of an attention module; raise a `ValueError` on `name` if one is missing or alters the formula."""
    split, found = projections(attention), {part: _first(attention, paths) for part, paths in NAMES.items()}
    heads, size, out = found["num_heads"], found["head_dim"], found["proj or o_proj"]
    out = out if isinstance(out, nn.Linear) else None
    if size is None and heads and out is not None:
        size = out.in_features // heads
    drop = getattr(found["dropout"], "p", found["dropout"])  # a module's p, a number or None
    scale = 1 / math.sqrt(size) if isinstance(attention, nn.MultiheadAttention) else found["scale"]
    wanted = {"num_heads": heads, "head_dim": size, "scale": scale, "proj or o_proj": out}
    wanted["qkv or q_proj, k_proj and v_proj"] = split
    problems = [f"no {part}" for part, value in wanted.items() if value is None] + _others(attention)
    if split is not None and out is not None and not problems:
        parts = AttentionParts(
            *split,
            out=out,
            heads=heads,
            head_dim=size,
            scale=float(scale),
            query_norm=found["q_norm"] or nn.Identity(),
            key_norm=found["k_norm"] or nn.Identity(),
            out_norm=found["norm"] or nn.Identity(),
            bias=_bias(attention),
            dropout=float(drop) if isinstance(drop, int | float) else 0.0,
            out_dropout=found["out_dropout"] or nn.Identity(),
        )
        problems = _misfits(parts)
        if not problems:
            return parts
    got = f"{type(attention).__name__} with {', '.join(problems)}"
    raise ValueError(bad(name, "must be a softmax attention module whose projections attnconv recognises", got, FIX))


def first_tensor(output: object) -> Tensor | None:
    """Return the first tensor of a module's input or output (a tensor, mapping or sequence); None if there is none."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    entries = output if isinstance(output, (tuple, list)) else (output,)
    return next((entry for entry in entries if isinstance(entry, Tensor)), None)


def _first(module: nn.Module, paths: tuple[str, ...]) -> Any:
    """Return the first of some dotted attribute paths that exists and is not None."""
    for path in paths:
        found: Any = module
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is not None:
            return found
    return None


def _misfits(parts: AttentionParts) -> list[str]:
    """List the parts whose width does not match the formula."""
    width = parts.heads * parts.head_dim
    widths = {len(part.weight) for part in (parts.query, parts.key, parts.value)} | {parts.out.in_features}
    found = [] if widths == {width} else [f"queries, keys or values whose width is not {width}"]
    size = (parts.head_dim,)
    if any(tuple(getattr(norm, "normalized_shape", size)) != size for norm in (parts.query_norm, parts.key_norm)):
        found.append("query or key norms over several heads")
    norm = parts.out_norm
    if not isinstance(norm, nn.Identity) and tuple(getattr(norm, "normalized_shape", ())) != (parts.out.in_features,):
        found.append(f"a norm that is not over the {parts.out.in_features} channels of all heads")
    return found


def projections(source: Any) -> tuple[Projection, Projection, Projection] | None:
    """Return the query, key and value projections of a module; None if it has none under known names."""
    matrix: Tensor | None = None
    vector: Tensor | None = None
    if isinstance(source, nn.MultiheadAttention):
        matrix, vector = source.in_proj_weight, source.in_proj_bias  # the weight is None if the three widths differ
    elif isinstance(fused := getattr(source, "qkv", None), nn.Linear):
        matrix, vector = fused.weight, fused.bias
    if matrix is not None:
        apart = (getattr(source, "q_bias", None), None, getattr(source, "v_bias", None))
        query, key, value = map(Projection, matrix.tensor_split(3), apart if vector is None else vector.tensor_split(3))
        return query, key, value
    for paths in PROJECTIONS:
        linears = [part for path in paths if isinstance(part := _first(source, (path,)), nn.Linear)]
        if len(linears) == 3:
            query, key, value = (Projection(part.weight, part.bias) for part in linears)
            return query, key, value
    return None


def _bias(attention: nn.Module) -> PositionBias | None:
    """Return a module's relative position bias, from its table and the indices into it; None if it has none."""
    for holder in (attention, *(getattr(attention, name, None) for name in BIAS_HOLDERS)):
        table = getattr(holder, "relative_position_bias_table", None)
        index = getattr(holder, "relative_position_index", None)
        if isinstance(table, nn.Parameter) and table.dim() == 2 and isinstance(index, Tensor):
            return PositionBias(table, index.reshape(math.isqrt(index.numel()), -1))
    return None


def _others(attention: nn.Module) -> list[str]:
    """List the parts of a module that change the formula."""
    known: set[str] = set() if _bias(attention) is None else {"relative_position_bias_table", *BIAS_HOLDERS}
    if _first(attention, ("qkv.bias",)) is None:
        known.add("q_bias")  # in addition to qkv.bias, it would be a second bias of the queries
    found = [
        name
        for name in OTHERS
        if name not in known
        and not isinstance(_first(attention, (name, f"attention.{name}", f"output.{name}")), nn.Identity | None)
    ]
    if isinstance(attention, nn.MultiheadAttention) and (attention.bias_k is not None or attention.add_zero_attn):
        found.append("additional keys (bias_k or add_zero_attn)")
    return found


@final
@dataclass(frozen=True, eq=False)
class VitBlock:
    """One pre-norm block of a vision transformer."""

    name: str  # the attention module's name in the model
    attention: nn.Module
    parts: AttentionParts
    norm: nn.Module  # before the attention
    writers: tuple[nn.Linear, nn.Linear]  # output layers of attention and MLP, which write to the residual stream


@final
@dataclass(frozen=True, eq=False)
class VitParts:
    """The parts of a vision transformer, which share its weights."""

    embed: Callable[[Tensor], Tensor]  # images to patch tokens, (b, n, c)
    patches: nn.Conv2d
    positions: nn.Parameter  # (1, tokens, c), with or without the class tokens and registers
    tokens: tuple[nn.Parameter, ...]  # class tokens and registers, (1, p, c) each
    prefix: int  # number of class tokens and registers
    grid: tuple[int, int]  # tokens of the image, (height, width)
    blocks: tuple[VitBlock, ...]


def vit_parts(model: nn.Module) -> VitParts:
    """Find the parts of a vision transformer; raise a `ValueError` for other models and per-channel layer scales."""
    inside: dict[str, Any] = {}  # the first parameter or module with each name, at any depth
    for name, part in (*model.named_parameters(), *model.named_modules()):
        inside.setdefault(name.rpartition(".")[2], part)
    positions, embed, blocks = (
        next((inside[name] for name in names if name in inside), None) for names in (POSITIONS, PATCHES, BLOCKS)
    )
    if "conv_proj" in inside:  # torchvision, where the model itself embeds the patches
        embed, patches, embedded = model, inside["conv_proj"], getattr(model, "_process_input", None)
    else:
        embedded, patches = embed, embed and _first(embed, ("proj", "projection"))
    if embedded is None or positions is None or not isinstance(blocks, nn.ModuleList | nn.Sequential):
        raise _refusal(model, "with pos_embed, patch_embed and blocks")
    if not isinstance(patches, nn.Conv2d) or not isinstance(positions, nn.Parameter):
        raise _refusal(model, "with one patch convolution and a position parameter")
    grid, size = _pair_of(getattr(embed, "grid_size", None)), _pair_of(getattr(embed, "image_size", None))
    if grid is None and size is not None:
        grid = (size[0] // patches.stride[0], size[1] // patches.stride[1])
    if grid is None:
        raise _refusal(embed or model, "with the attribute grid_size or image_size")
    tokens = tuple(inside[name] for name in TOKENS if isinstance(inside.get(name), nn.Parameter))
    prefix = sum(token.shape[1] for token in tokens)
    if not 0 <= positions.shape[1] - grid[0] * grid[1] <= prefix:
        raise _refusal(
            model, f"with positions for {grid} patches and at most its class tokens and registers ({prefix})"
        )
    stem = next(name for name, part in model.named_modules() if part is blocks)
    found = tuple(_block(f"{stem}.{name}", block) for name, block in blocks.named_children())
    return VitParts(embedded, patches, positions, tokens, prefix, grid, found)


def _block(name: str, block: nn.Module) -> VitBlock:
    """Find the parts of one block; its attention must be softmax(s q k^T) v followed by an output projection."""
    inner = next((inner for inner in ("attn", "attention", "self_attention") if hasattr(block, inner)), "")
    norm, mlp = _first(block, ("norm1", "layernorm_before", "ln_1")), _first(block, ("mlp", "output"))
    if not inner or norm is None or mlp is None:
        raise _refusal(block, "with one attention layer, a normalisation layer before it and one MLP per block", name)
    out = _first(mlp, ("fc2", "down_proj", "weights_out", "dense", "3"))
    if not isinstance(out, nn.Linear):
        raise _refusal(mlp, "with an MLP that ends in a linear layer named fc2", name)
    for part in ("ls1", "ls2", "layer_scale1", "layer_scale2"):
        weights = getattr(block, part).parameters() if hasattr(block, part) else ()
        if any(bool((weight != weight.flatten()[0]).any()) for weight in weights):
            raise ValueError(bad(f"model.{name}.{part}", "must have the same value for all channels", "several values"))
    name, attention = f"{name}.{inner}", getattr(block, inner)
    parts = attention_parts(attention, f"model.{name}")
    terms = {
        "q_norm, which bounds the scores": not isinstance(parts.query_norm, nn.Identity),
        "rotary positions": bool(set(ROTATIONS) & set(CallForm.of(attention).names)),
        "a relative position bias": parts.bias is not None,
        "a norm before the output projection": not isinstance(parts.out_norm, nn.Identity),
    }
    if more := [term for term, found in terms.items() if found]:
        got = f"{type(attention).__name__} with {', '.join(more)}"
        raise ValueError(bad(f"model.{name}", "must compute only softmax(s q k^T) v and a projection", got, FIX_VIT))
    return VitBlock(name, attention, parts, norm, (parts.out, out))


def _refusal(module: nn.Module, requirement: str, name: str = "") -> ValueError:
    argument = f"model.{name}" if name else "model"
    return ValueError(bad(argument, f"must be a vision transformer {requirement}", type(module).__name__, FIX_VIT))


def _pair_of(value: Any) -> tuple[int, int] | None:
    """Return a size of one or two integers as (height, width); None if the value is not a size."""
    if isinstance(value, int) and value > 0:
        return value, value
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(part, int) for part in value):
        return value[0], value[1]
    return None
