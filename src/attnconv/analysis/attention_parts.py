"""Where the parts of a plain attention module live: the one place that knows the names other libraries give them.

Plain means, for tokens x and heads h,

    out = concat_h( softmax(s N_q(x W_q,h) N_k(x W_k,h)^T) x W_v,h ) W_o

with norms N that may be absent and biases left out. Three layouts are known:

    qkv, proj                        one map for all three, as in timm's Attention
    q_proj, k_proj, v_proj, o_proj   three maps, as in Hugging Face's ViT family
    attention.query, .key, .value,   the same family in earlier versions, 5.0 among them
    output.dense

Names promise little. Parts that are known to change the formula are refused by name, and `refuse_other_formula` holds
the parts against what the module has computed, which catches the rest.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._errors import bad

# Parts besides the formula, and what they are.
BESIDES = {
    "norm": "a norm before the output projection",
    "gate": "a gate",
    "gating_param": "a gate",
    "relative_position_bias_table": "a bias by relative positions",
    "relative_position_bias": "a bias by relative positions",
    "rel_pos": "a bias by relative positions",
    "q_bias": "a bias added after the projection",
}
ROTARY = {"rope", "position_embeddings"}  # arguments of forward passes that turn queries and keys
FIX = "timm's VisionTransformer and Hugging Face's ViT, DeiT and DINOv2 have such modules."


@final
@dataclass(frozen=True, eq=False)
class Projection:
    """Neighbouring outputs of a linear map.

    Attributes:
        linear: The map.
        start: The first output.
        stop: One beyond the last.
    """

    linear: nn.Linear
    start: int
    stop: int

    @property
    def weight(self) -> Float[Tensor, "d c"]:
        """Its rows of the weight, a view."""
        return self.linear.weight[self.start : self.stop]

    @property
    def bias(self) -> Float[Tensor, "d"] | None:
        """Its part of the bias, a view."""
        bias: Tensor | None = self.linear.bias
        return None if bias is None else bias[self.start : self.stop]

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
    dropout: float
    out_dropout: nn.Module

    def maps_and_values(self, x: Float[Tensor, "b n c"]) -> tuple[Float[Tensor, "b h n n"], Float[Tensor, "b h n d"]]:
        """Attention and values of all heads, without dropout.

        Args:
            x: What the module is given.
        """
        query, key, value = (
            part.of(x).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = self.query_norm(query) @ self.key_norm(key).transpose(-2, -1)
        return (scores * self.scale).softmax(-1), value


def attention_parts(attention: nn.Module, name: str = "attention") -> AttentionParts:
    """Name the parts of a plain attention module.

    Args:
        attention: The module.
        name: What errors call it.

    Raises:
        ValueError: The module lacks parts, has others besides that change the formula (a norm before `proj`, a gate,
            a bias by relative positions, rotary positions), or has heads of other widths for keys and values.

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
    source = _places(attention)
    heads, size = (
        _first(source, names) for names in (("num_heads", "num_attention_heads"), ("head_dim", "attention_head_size"))
    )
    scale, out = _first(source, ("scale", "scaling")), _first(source, ("proj", "o_proj", "out_proj", "dense"))
    split = _split(attention)
    given = {"qkv or q_proj, k_proj and v_proj": split, "proj or o_proj": out if isinstance(out, nn.Linear) else None}
    given |= {"num_heads": heads, "head_dim": size, "scale": scale}
    lacking = [part for part, value in given.items() if value is None]
    norms = [_or_identity(_first(source, (norm,))) for norm in ("q_norm", "k_norm")]
    besides = _besides(attention)
    if split is not None and not lacking:
        besides += _odd_widths({part.stop - part.start for part in split} | {out.in_features}, norms, heads, size)
    if split is None or lacking or besides:
        raise ValueError(_refused(type(attention).__name__, name, [] if split is None else besides, lacking))
    drop = _first(source, ("attn_drop", "attention_dropout", "dropout_prob", "dropout"))
    after = getattr(source[-1], "proj_drop" if len(source) == 1 else "dropout", None)
    return AttentionParts(
        *split,
        out=out,
        heads=heads,
        head_dim=size,
        scale=float(scale),
        query_norm=norms[0],
        key_norm=norms[1],
        dropout=_probability(drop),
        out_dropout=_or_identity(after),
    )


def _refused(kind: str, name: str, besides: list[str], lacking: list[str]) -> str:
    """Why a module is none of the known ones: what it does besides their formula, or else what it lacks."""
    if besides:
        got = f"{kind} with {', '.join(besides)}"
        return bad(name, "must compute softmax(q k^T) v and `proj` alone", got, FIX)
    return bad(name, f"must be of timm's or Hugging Face's kind, with {', '.join(lacking)}", kind, FIX)


def _or_identity(module: nn.Module | None) -> nn.Module:
    return nn.Identity() if module is None else module


def projects(module: nn.Module) -> bool:
    """Whether a module has projections to queries, keys and values under a known name.

    Args:
        module: Any module.

    Example:
        >>> projects(nn.MultiheadAttention(4, 1))
        False
    """
    return _split(module) is not None


@torch.no_grad()
def refuse_other_formula(
    attention: nn.Module, x: Float[Tensor, "b n c"], out: Float[Tensor, "b n d"], *, name: str = "attention"
) -> None:
    """Hold the parts of a module against what it has computed in evaluation mode.

    Args:
        attention: A module that `attention_parts` takes.
        x: What it was given.
        out: What it gave.
        name: What errors call it.

    Raises:
        ValueError: The formula of its parts gives another result: `|formula - out| / |out|` is above the square root
            of the dtype's epsilon, 3e-4 in float32.
    """
    parts = attention_parts(attention, name)
    rows, values = parts.maps_and_values(x)
    made = parts.out((rows @ values).transpose(1, 2).flatten(2))
    error, size = float((made - out).norm()), float(out.norm())
    if not error <= torch.finfo(out.dtype).eps ** 0.5 * size:
        got = f"{type(attention).__name__}, whose output is {error / max(size, 1e-30):.2g} away from that of its parts"
        raise ValueError(bad(name, "must compute softmax(q k^T) v and `proj` alone", got, FIX))


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
    fused = getattr(source, "qkv", None)
    if isinstance(fused, nn.Linear):
        width = fused.out_features // 3
        query, key = Projection(fused, 0, width), Projection(fused, width, 2 * width)
        return query, key, Projection(fused, 2 * width, fused.out_features)
    places = _places(source)
    names = ("q_proj", "k_proj", "v_proj") if len(places) == 1 else ("query", "key", "value")
    found = [getattr(places[len(places) // 2], name, None) for name in names]
    linears = [part for part in found if isinstance(part, nn.Linear)]
    if len(linears) < 3:
        return None
    query, key, value = (Projection(part, 0, part.out_features) for part in linears)
    return query, key, value


def _besides(attention: nn.Module) -> list[str]:
    """Parts that change the formula, by name and in words."""
    found = [
        f"{name} ({words})"
        for name, words in BESIDES.items()
        if not isinstance(_first(_places(attention), (name,)), nn.Identity | None)
    ]
    arguments = inspect.signature(type(attention).forward).parameters
    if "rope" in type(attention).__name__.lower() or ROTARY & set(arguments):
        found.append("rotary positions")
    return found


def _odd_widths(widths: set[int], norms: list[nn.Module], heads: int, size: int) -> list[str]:
    """Projections and norms that are not head by head, in words."""
    found = [] if widths == {heads * size} else ["other widths of queries, keys and values"]
    if any(tuple(getattr(norm, "normalized_shape", (size,))) != (size,) for norm in norms):
        found.append("norms over several heads")
    return found
