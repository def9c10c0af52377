"""The parts of an attention module, by the names that timm, Hugging Face and nn.MultiheadAttention give them.

    out = N_o( concat_h( softmax(scores_h) x W_v,h ) ) W_o        for tokens x and heads h, biases left out

with scores as in `score_modifiers` and norms that may be absent. Parts known to change the formula are refused by name;
`refuse_other_formula` catches the rest.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv.inspect.score_modifiers import ROTATIONS, PositionBias, ScoreTerms

# Where a module may hold each part of the formula; the first attribute that is there counts.
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
# Attributes beside the formula.
OTHERS = {
    "gate": "a gate",
    "gating_param": "a gate",
    "logit_scale": "scores by cosines",
    "relative_position_bias_table": "a bias by relative positions",
    "relative_position_bias": "a bias by relative positions",
    "rel_pos": "a bias by relative positions",
    "q_bias": "a bias added after the projection",
}
BIAS_HOLDERS = ("relative_position_bias", "rel_pos")  # modules that may hold the table
FIX = (
    "timm's VisionTransformer, Beit, Eva and SwinTransformer, Hugging Face's ViT family and nn.MultiheadAttention have "
    "such modules."
)
FIX_PLAIN = "timm's VisionTransformer and Hugging Face's ViT, DeiT and DINOv2 have such modules."


@final
@dataclass(frozen=True, eq=False)
class Projection:
    """Outputs `start` to `stop` of a linear map."""

    matrix: Tensor  # weight of the whole map, (outputs, c)
    vector: Tensor | None  # bias of the whole map or of these outputs only
    start: int
    stop: int

    @property
    def weight(self) -> Float[Tensor, "d c"]:
        return self.matrix[self.start : self.stop]

    @property
    def bias(self) -> Float[Tensor, "d"] | None:
        if self.vector is None or len(self.vector) == self.stop - self.start:
            return self.vector
        return self.vector[self.start : self.stop]

    def of(self, x: Float[Tensor, "*b c"]) -> Float[Tensor, "*b d"]:
        return F.linear(x, self.weight, self.bias)


@final
@dataclass(frozen=True, eq=False)
class AttentionParts:
    """The parts of one attention module; they share its weights."""

    query: Projection  # all heads, one after another, as for keys and values
    key: Projection
    value: Projection
    out: nn.Linear
    heads: int
    head_dim: int
    scale: float  # s
    query_norm: nn.Module  # N_q, applied to each head, as N_k
    key_norm: nn.Module
    out_norm: nn.Module  # N_o, applied to all heads at once
    bias: PositionBias | None
    dropout: float  # probability of dropping an attention probability in training
    out_dropout: nn.Module  # after W_o

    def maps_and_values(
        self, x: Float[Tensor, "b n c"], terms: ScoreTerms | None = None
    ) -> tuple[Float[Tensor, "b h n n"], Float[Tensor, "b h n d"]]:
        """Attention and values of all heads, without dropout."""
        query, key, value = (
            part.of(x).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        terms = ScoreTerms() if terms is None else terms
        query, key = terms.turned(self.query_norm(query)), terms.turned(self.key_norm(key))
        scores = query @ key.transpose(-2, -1) * self.scale
        if self.bias is not None:
            scores = scores + self.bias()
        return terms.raised(scores).softmax(-1), value

    def finish(self, mixed: Float[Tensor, "b h n d"]) -> Float[Tensor, "b n c"]:
        """Apply N_o and W_o to the outputs of the heads."""
        out: Tensor = self.out(self.out_norm(mixed.transpose(1, 2).flatten(2)))
        return out


def attention_parts(attention: nn.Module, name: str = "attention", *, plain: bool = False) -> AttentionParts:
    """Find the parts of an attention module; raise a ValueError if it lacks some or has others that change the formula.

    `plain` refuses all but softmax(s N_q(q) N_k(k)^T) v and an output projection. `name` is the module's in errors.
    """
    split, found = _split(attention), {part: _first(attention, paths) for part, paths in NAMES.items()}
    heads, size, out = found["num_heads"], found["head_dim"], found["proj or o_proj"]
    out = out if isinstance(out, nn.Linear) else None
    if size is None and heads and out is not None:
        size = out.in_features // heads
    scale = 1 / math.sqrt(size) if isinstance(attention, nn.MultiheadAttention) else found["scale"]
    wanted = {"num_heads": heads, "head_dim": size, "scale": scale, "proj or o_proj": out}
    wanted["qkv or q_proj, k_proj and v_proj"] = split
    lacking = [part for part, value in wanted.items() if value is None]
    others = [] if split is None else _others(attention, plain=plain)
    if split is not None and out is not None and not lacking:
        parts = AttentionParts(
            *split,
            out=out,
            heads=heads,
            head_dim=size,
            scale=float(scale),
            query_norm=_or_identity(found["q_norm"]),
            key_norm=_or_identity(found["k_norm"]),
            out_norm=_or_identity(found["norm"]),
            bias=_bias(attention),
            dropout=_probability(found["dropout"]),
            out_dropout=_or_identity(found["out_dropout"]),
        )
        others += _misfits(parts)
        if not others:
            return parts
    kind, fix = type(attention).__name__, FIX_PLAIN if plain else FIX
    if others:
        formula = "compute softmax(q k^T) v and `proj` alone" if plain else "be softmax attention of known parts"
        raise ValueError(bad(name, f"must {formula}", f"{kind} with {', '.join(others)}", fix))
    raise ValueError(bad(name, f"must be of timm's or Hugging Face's kind, with {', '.join(lacking)}", kind, fix))


def projects(module: nn.Module) -> bool:
    """Whether a module has projections to queries, keys and values under known names."""
    return _split(module) is not None


@torch.no_grad()
def refuse_other_formula(
    attention: nn.Module,
    x: Float[Tensor, "b n c"],
    out: Float[Tensor, "b n d"],
    *,
    terms: ScoreTerms | None = None,
    name: str = "attention",
) -> None:
    """Compare the formula of a module's parts with its output in evaluation mode.

    Raises a ValueError where |formula - out| / |out| is above the square root of the dtype's epsilon, 3e-4 in float32.
    """
    parts, kind = attention_parts(attention, name), type(attention).__name__
    requirement = "must compute what its parts say"
    try:
        rows, values = parts.maps_and_values(x, terms)
        expected = parts.finish(rows @ values)
    except RuntimeError as reason:
        raise ValueError(bad(name, requirement, f"{kind}, of parts that do not fit: {reason}", FIX)) from reason
    error, size = float((expected - out).norm()), float(out.norm())
    if not error <= torch.finfo(out.dtype).eps ** 0.5 * size:
        got = f"{kind}, whose output is {error / max(size, 1e-30):.2g} away from that of its parts"
        raise ValueError(bad(name, requirement, got, FIX))


def first_tensor(output: object) -> Tensor | None:
    """The first tensor of a module's input or output: a tensor, a mapping or a sequence; None if there is none."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    entries = output if isinstance(output, (tuple, list)) else (output,)
    return next((entry for entry in entries if isinstance(entry, Tensor)), None)


def _first(module: nn.Module, paths: tuple[str, ...]) -> Any:
    """The first of some attributes, with dots between names, that exists and is not None."""
    for path in paths:
        found: Any = module
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is not None:
            return found
    return None


def _or_identity(module: nn.Module | None) -> nn.Module:
    return nn.Identity() if module is None else module


def _misfits(parts: AttentionParts) -> list[str]:
    """Parts of other widths than the formula's, with an explanation."""
    width = parts.heads * parts.head_dim
    widths = {part.stop - part.start for part in (parts.query, parts.key, parts.value)} | {parts.out.in_features}
    found = [] if widths == {width} else ["other widths of queries, keys and values"]
    size = (parts.head_dim,)
    if any(tuple(getattr(norm, "normalized_shape", size)) != size for norm in (parts.query_norm, parts.key_norm)):
        found.append("norms over several heads")
    norm = parts.out_norm
    if not isinstance(norm, nn.Identity) and tuple(getattr(norm, "normalized_shape", ())) != (parts.out.in_features,):
        found.append("norm (of other channels than those of all heads)")
    return found


def _probability(drop: object) -> float:
    """Of dropout, given as a module, a number or None."""
    if isinstance(drop, nn.Module):
        return drop.p if isinstance(drop, nn.Dropout) else 0.0
    return float(drop) if isinstance(drop, (int, float)) else 0.0


def _split(source: Any) -> tuple[Projection, Projection, Projection] | None:
    """The projections to queries, keys and values."""
    if isinstance(source, nn.MultiheadAttention):
        whole: Tensor | None = source.in_proj_weight
        return None if whole is None else _thirds(whole, source.in_proj_bias)
    fused = getattr(source, "qkv", None)
    if isinstance(fused, nn.Linear):
        bias: Tensor | None = fused.bias
        query, key, value = _thirds(fused.weight, bias)
        if bias is None:
            query = replace(query, vector=getattr(source, "q_bias", None))
            value = replace(value, vector=getattr(source, "v_bias", None))
        return query, key, value
    for paths in PROJECTIONS:
        linears = [part for path in paths if isinstance(part := _first(source, (path,)), nn.Linear)]
        if len(linears) == 3:
            query, key, value = (Projection(part.weight, part.bias, 0, part.out_features) for part in linears)
            return query, key, value
    return None


def _thirds(matrix: Tensor, vector: Tensor | None) -> tuple[Projection, Projection, Projection]:
    width = len(matrix) // 3
    query, key, value = (Projection(matrix, vector, part * width, (part + 1) * width) for part in range(3))
    return query, key, value


def _bias(attention: nn.Module) -> PositionBias | None:
    """The bias by relative positions, from a table and the indices into it."""
    for holder in (attention, *(getattr(attention, name, None) for name in BIAS_HOLDERS)):
        table = getattr(holder, "relative_position_bias_table", None)
        index = getattr(holder, "relative_position_index", None)
        if isinstance(table, nn.Parameter) and table.dim() == 2 and isinstance(index, Tensor):
            side = math.isqrt(index.numel())
            return PositionBias(table, index.reshape(side, side))
    return None


def _others(attention: nn.Module, *, plain: bool) -> list[str]:
    """Parts that change the formula, with an explanation."""
    known: set[str] = set()
    if not plain and _bias(attention) is not None:
        known |= {"relative_position_bias_table", *BIAS_HOLDERS}
    if not plain and _first(attention, ("qkv.bias",)) is None:
        known.add("q_bias")  # else there are two biases of one projection
    found = [
        f"{name} ({what})"
        for name, what in OTHERS.items()
        if name not in known
        and not isinstance(_first(attention, (name, f"attention.{name}", f"output.{name}")), nn.Identity | None)
    ]
    if isinstance(attention, nn.MultiheadAttention) and (attention.bias_k is not None or attention.add_zero_attn):
        found.append("keys beside those of its tokens")
    if plain:
        arguments = inspect.signature(type(attention).forward).parameters
        if "rope" in type(attention).__name__.lower() or set(ROTATIONS) & set(arguments):
            found.append("rotary positions")
        if not isinstance(_first(attention, NAMES["norm"]), nn.Identity | None):
            found.append("norm (a norm before the output projection)")
    return found
