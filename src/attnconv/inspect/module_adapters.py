"""Where the parts of an attention module live: the one place that knows the names other libraries give them.

For tokens x and heads h,

    out = N_o( concat_h( softmax(scores_h) x W_v,h ) ) W_o

with scores as in `score_modifiers`, norms that may be absent and biases left out. Plain is what has no N_o and nothing
in its scores but s N_q(x W_q) N_k(x W_k)^T. Four layouts are known:

    qkv, proj                        one map for all three, as in timm's Attention; q_bias and v_bias may stand apart
    q_proj, k_proj, v_proj, o_proj   three maps, as in Hugging Face's ViT family
    attention.query, .key, .value,   the same family in earlier versions, 5.0 among them
    output.dense
    in_proj_weight, out_proj         nn.MultiheadAttention

A bias by relative position is a relative_position_bias_table with a relative_position_index, in the module or in one
called relative_position_bias or rel_pos. Names promise little. Parts that are known to change the formula are refused
by name, and `refuse_other_formula` holds the parts against what the module has computed, which catches the rest.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv.inspect.score_modifiers import ROTATIONS, PositionBias, ScoreTerms

# Parts beside the formula, and what they are.
BESIDES = {
    "gate": "a gate",
    "gating_param": "a gate",
    "logit_scale": "scores by cosines",
    "relative_position_bias_table": "a bias by relative positions",
    "relative_position_bias": "a bias by relative positions",
    "rel_pos": "a bias by relative positions",
    "q_bias": "a bias added after the projection",
}
BIASES = ("relative_position_bias", "rel_pos")  # modules that may hold the table
NORM = "norm (a norm before the output projection)"
KNOWN = "timm's VisionTransformer, Beit, Eva and SwinTransformer, Hugging Face's ViT family and nn.MultiheadAttention"
FIX = f"{KNOWN} have such modules."
FIX_PLAIN = "timm's VisionTransformer and Hugging Face's ViT, DeiT and DINOv2 have such modules."
PLAIN = "must compute softmax(q k^T) v and `proj` alone"


@final
@dataclass(frozen=True, eq=False)
class Projection:
    """Neighbouring outputs of a linear map.

    Attributes:
        matrix: Weight of the map, (outputs, c).
        vector: Bias of these outputs alone or, with `matrix`, of all; None for none.
        start: The first output.
        stop: One beyond the last.
    """

    matrix: Tensor
    vector: Tensor | None
    start: int
    stop: int

    @property
    def weight(self) -> Float[Tensor, "d c"]:
        """Its rows of the weight, a view."""
        return self.matrix[self.start : self.stop]

    @property
    def bias(self) -> Float[Tensor, "d"] | None:
        """Its part of the bias, a view."""
        if self.vector is None or len(self.vector) == self.stop - self.start:
            return self.vector
        return self.vector[self.start : self.stop]

    def of(self, x: Float[Tensor, "*b c"]) -> Float[Tensor, "*b d"]:
        """The outputs for an input."""
        return F.linear(x, self.weight, self.bias)


@final
@dataclass(frozen=True, eq=False)
class AttentionParts:
    """The parts of one attention module, which hold its own weights.

    Attributes:
        query: W_q of all heads, one head after another.
        key: W_k.
        value: W_v.
        out: W_o.
        heads: Number of heads.
        head_dim: Dimensions of each.
        scale: s.
        query_norm: N_q, by head.
        key_norm: N_k.
        out_norm: N_o, of all heads at once.
        bias: B.
        dropout: Of the probabilities, while training.
        out_dropout: What follows W_o.
    """

    query: Projection
    key: Projection
    value: Projection
    out: nn.Linear
    heads: int
    head_dim: int
    scale: float
    query_norm: nn.Module
    key_norm: nn.Module
    out_norm: nn.Module
    bias: PositionBias | None
    dropout: float
    out_dropout: nn.Module

    def maps_and_values(
        self, x: Float[Tensor, "b n c"], terms: ScoreTerms | None = None
    ) -> tuple[Float[Tensor, "b h n n"], Float[Tensor, "b h n d"]]:
        """Attention and values of all heads, without dropout.

        Args:
            x: What the module is given.
            terms: What it is given beside; None for nothing.
        """
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
        """What follows the heads: N_o and W_o.

        Args:
            mixed: What the heads give.
        """
        out: Tensor = self.out(self.out_norm(mixed.transpose(1, 2).flatten(2)))
        return out


def attention_parts(attention: nn.Module, name: str = "attention", *, plain: bool = False) -> AttentionParts:
    """Name the parts of an attention module.

    Args:
        attention: The module.
        name: What errors call it.
        plain: Whether to refuse what is more than softmax(s N_q(q) N_k(k)^T) v and an output projection.

    Raises:
        ValueError: The module lacks parts, has others beside that change the formula, or has heads of other widths for
            keys and values.

    Example:
        >>> class Plain(nn.Module):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.num_heads, self.head_dim, self.scale = 2, 4, 0.5
        ...         self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        >>> parts = attention_parts(Plain())
        >>> (parts.key.start, parts.key.stop), tuple(parts.key.weight.shape)
        ((8, 16), (8, 8))
    """
    source, torchs = _places(attention), isinstance(attention, nn.MultiheadAttention)
    heads, size = (
        _first(source, names) for names in (("num_heads", "num_attention_heads"), ("head_dim", "attention_head_size"))
    )
    out = _first(source, ("proj", "o_proj", "out_proj", "dense"))
    if size is None and heads and isinstance(out, nn.Linear):
        size = out.in_features // heads
    scale = 1 / math.sqrt(size) if torchs else _first(source, ("scale", "scaling"))
    split = _split(attention)
    given: dict[str, object] = {"num_heads": heads, "head_dim": size, "scale": scale}
    given["qkv or q_proj, k_proj and v_proj"] = split
    given["proj or o_proj"] = out if isinstance(out, nn.Linear) else None
    lacking = [part for part, value in given.items() if value is None]
    norms = [_or_identity(_first(source, (norm,))) for norm in ("q_norm", "k_norm")]
    after = _or_identity(getattr(source[-1], "norm", None))
    besides = _besides(attention, plain=plain)
    if split is not None and not lacking:
        besides += _odd_widths({part.stop - part.start for part in split} | {out.in_features}, norms, heads, size)
        besides += [] if _odd_norm(after, out.in_features) is None else [f"norm ({_odd_norm(after, out.in_features)})"]
    if split is None or lacking or besides:
        kind = type(attention).__name__
        raise ValueError(_refused(kind, name, [] if split is None else besides, lacking, plain=plain))
    return AttentionParts(
        *split,
        out=out,
        heads=heads,
        head_dim=size,
        scale=float(scale),
        query_norm=norms[0],
        key_norm=norms[1],
        out_norm=after,
        bias=_bias(attention),
        dropout=_probability(_first(source, ("attn_drop", "attention_dropout", "dropout_prob", "dropout"))),
        out_dropout=_or_identity(getattr(source[-1], "proj_drop" if len(source) == 1 else "dropout", None)),
    )


def _refused(kind: str, name: str, besides: list[str], lacking: list[str], *, plain: bool) -> str:
    """Why a module is none of the known ones: what it does besides their formula, or else what it lacks."""
    fix = FIX_PLAIN if plain else FIX
    if besides:
        requirement = PLAIN if plain else "must be softmax attention of known parts"
        return bad(name, requirement, f"{kind} with {', '.join(besides)}", fix)
    return bad(name, f"must be of timm's or Hugging Face's kind, with {', '.join(lacking)}", kind, fix)


def _or_identity(module: nn.Module | None) -> nn.Module:
    return nn.Identity() if module is None else module


def projects(module: nn.Module) -> bool:
    """Whether a module has projections to queries, keys and values under a known name.

    Args:
        module: Any module.

    Example:
        >>> projects(nn.MultiheadAttention(4, 1)), projects(nn.Linear(4, 12))
        (True, False)
    """
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
    """Hold the parts of a module against what it has computed in evaluation mode.

    Args:
        attention: A module that `attention_parts` takes.
        x: What it was given.
        out: What it gave.
        terms: What it was given beside; None for nothing.
        name: What errors call it.

    Raises:
        ValueError: The formula of its parts cannot be computed, or gives another result: `|formula - out| / |out|` is
            above the square root of the dtype's epsilon, 3e-4 in float32.
    """
    parts, kind = attention_parts(attention, name), type(attention).__name__
    requirement = "must compute what its parts say"
    try:
        rows, values = parts.maps_and_values(x, terms)
        made = parts.finish(rows @ values)
    except RuntimeError as reason:
        raise ValueError(bad(name, requirement, f"{kind}, of parts that do not fit: {reason}", FIX)) from reason
    error, size = float((made - out).norm()), float(out.norm())
    if not error <= torch.finfo(out.dtype).eps ** 0.5 * size:
        got = f"{kind}, whose output is {error / max(size, 1e-30):.2g} away from that of its parts"
        raise ValueError(bad(name, requirement, got, FIX))


def first_tensor(output: object) -> Tensor | None:
    """The first tensor of what a module takes or gives.

    Args:
        output: A tensor, or a mapping or sequence that holds one, as the outputs of Hugging Face's models.

    Returns:
        None where there is none.

    Example:
        >>> first_tensor({"loss": None, "logits": torch.ones(2)})
        tensor([1., 1.])
    """
    if isinstance(output, Mapping):
        output = tuple(output.values())
    entries = output if isinstance(output, (tuple, list)) else (output,)
    return next((entry for entry in entries if isinstance(entry, Tensor)), None)


def _places(attention: Any) -> tuple[Any, ...]:
    """The module, and in the third layout those inside it that hold its parts."""
    inner, output = getattr(attention, "attention", None), getattr(attention, "output", None)
    nested = isinstance(getattr(inner, "query", None), nn.Linear) and isinstance(
        getattr(output, "dense", None), nn.Linear
    )
    return (attention, inner, output) if nested else (attention,)


def _first(places: tuple[Any, ...], names: tuple[str, ...]) -> Any:
    """The first of some attributes that is there and not None."""
    found = (getattr(place, name, None) for name in names for place in places)
    return next((value for value in found if value is not None), None)


def _probability(drop: object) -> float:
    """Of dropout, given as a module, as a number or not at all; `nn.Identity` stands for none."""
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
        apart = (getattr(source, "q_bias", None), None, getattr(source, "v_bias", None))
        bias: Tensor | None = fused.bias
        query, key, value = _thirds(fused.weight, bias)
        if bias is None:
            query, key, value = (
                Projection(part.matrix, vector, part.start, part.stop)
                for part, vector in zip((query, key, value), apart, strict=True)
            )
        return query, key, value
    places = _places(source)
    names = ("q_proj", "k_proj", "v_proj") if len(places) == 1 else ("query", "key", "value")
    found = [getattr(places[len(places) // 2], name, None) for name in names]
    linears = [part for part in found if isinstance(part, nn.Linear)]
    if len(linears) < 3:
        return None
    query, key, value = (Projection(part.weight, part.bias, 0, part.out_features) for part in linears)
    return query, key, value


def _thirds(matrix: Tensor, vector: Tensor | None) -> tuple[Projection, Projection, Projection]:
    width = len(matrix) // 3
    query, key, value = (Projection(matrix, vector, part * width, (part + 1) * width) for part in range(3))
    return query, key, value


def _bias(attention: nn.Module) -> PositionBias | None:
    """The bias by relative positions, of a table and the places in it."""
    inner = (getattr(attention, name, None) for name in BIASES)
    for holder in (attention, *inner):
        table = getattr(holder, "relative_position_bias_table", None)
        index = getattr(holder, "relative_position_index", None)
        if isinstance(table, nn.Parameter) and table.dim() == 2 and isinstance(index, Tensor):
            side = math.isqrt(index.numel())
            return PositionBias(table, index.reshape(side, side))
    return None


def _besides(attention: nn.Module, *, plain: bool) -> list[str]:
    """Parts that change the formula, by name and in words."""
    known: set[str] = set()
    if not plain and _bias(attention) is not None:
        known |= {"relative_position_bias_table", *BIASES}
    if not plain and getattr(getattr(attention, "qkv", None), "bias", None) is None:
        known.add("q_bias")  # else two biases of one projection
    found = [
        f"{name} ({words})"
        for name, words in BESIDES.items()
        if name not in known and not isinstance(_first(_places(attention), (name,)), nn.Identity | None)
    ]
    if isinstance(attention, nn.MultiheadAttention) and (attention.bias_k is not None or attention.add_zero_attn):
        found.append("keys beside those of its tokens")
    if plain:
        arguments = inspect.signature(type(attention).forward).parameters
        if "rope" in type(attention).__name__.lower() or set(ROTATIONS) & set(arguments):
            found.append("rotary positions")
        if not isinstance(getattr(_places(attention)[-1], "norm", None), nn.Identity | None):
            found.append(NORM)
    return found


def _odd_widths(widths: set[int], norms: list[nn.Module], heads: int, size: int) -> list[str]:
    """Projections and norms that are not head by head, in words."""
    found = [] if widths == {heads * size} else ["other widths of queries, keys and values"]
    if any(tuple(getattr(norm, "normalized_shape", (size,))) != (size,) for norm in norms):
        found.append("norms over several heads")
    return found


def _odd_norm(norm: nn.Module, width: int) -> str | None:
    """Why a norm before the output projection is none of all heads at once; None where it is."""
    if isinstance(norm, nn.Identity) or tuple(getattr(norm, "normalized_shape", ())) == (width,):
        return None
    return "of other channels than those of all heads"
