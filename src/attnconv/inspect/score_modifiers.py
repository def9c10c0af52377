"""Additional terms in an attention module's scores, and the module's call signature.

    scores(q, k) = s (R_q N_q(x_q W_q)) . (R_k N_k(x_k W_k)) + B(q, k) + A(q, k)        per head

with scale s, query and key norms N, and a learned relative position bias B. Rotary positions R and the term A (a mask
of shifted windows, or a bias shared by several layers) are arguments of the forward pass, recognised by their names.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attnconv._util.errors import bad

ADDED = ("attn_mask", "attention_mask", "mask", "shared_rel_pos_bias", "shared_rel_pos")
ROTATIONS = ("rope", "position_embeddings")
BLOCKED = -50.0  # a term up to this value blocks a key: Swin adds -100, others -infinity; e^-50 = 2e-22


@final
class PositionBias(nn.Module):
    """The bias B: a table (table rows, heads), which is not copied, and the table row for each query and key."""

    def __init__(self, table: nn.Parameter, index: Int[Tensor, "r n"]) -> None:
        super().__init__()
        self.table = table
        self.index: Tensor
        self.register_buffer("index", index, persistent=False)

    def forward(self) -> Float[Tensor, "h r n"]:
        return self.table[self.index].permute(2, 0, 1)

    def of(self, heads: Sequence[int], queries: slice = slice(None)) -> "PositionBias":
        """Return a copy for some heads and queries."""
        table = nn.Parameter(self.table.detach()[:, list(heads)].clone(), requires_grad=self.table.requires_grad)
        return PositionBias(table, self.index[queries].clone())


@final
@dataclass(frozen=True, eq=False)
class ScoreTerms:
    """Rotary positions R and the added term A of one call."""

    cos: Float[Tensor, "#h m d"] | None = None  # for the image's tokens, which are the last ones
    sin: Float[Tensor, "#h m d"] | None = None
    neighbours: bool = False  # whether channels are rotated in pairs (2i, 2i + 1) instead of (i, i + d / 2)
    added: Float[Tensor, "w #h #n n"] | None = None  # A, for each sequence of an image, or one (w = 1) for all

    def of(self, heads: Sequence[int]) -> "ScoreTerms":
        def pick(x: Tensor | None, dim: int) -> Tensor | None:
            return x if x is None or x.shape[dim] == 1 else x.index_select(dim, torch.tensor(heads, device=x.device))

        return replace(self, cos=pick(self.cos, 0), sin=pick(self.sin, 0), added=pick(self.added, 1))

    def turned(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n d"]:
        """Return x rotated by R, except the tokens before the image's tokens."""
        if self.cos is None or self.sin is None:
            return x
        before = x.shape[2] - self.cos.shape[1]
        image = x[:, :, before:]
        if self.neighbours:
            pairs = image.unflatten(-1, (-1, 2))
            partner = torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
        else:
            low, high = image.chunk(2, -1)
            partner = torch.cat((-high, low), -1)
        return torch.cat((x[:, :, :before], (image * self.cos + partner * self.sin).to(x.dtype)), 2)

    def raised(self, scores: Float[Tensor, "b h n n"]) -> Float[Tensor, "b h n n"]:
        """Add A to the scores; the sequences of an image are consecutive."""
        if self.added is None:
            return scores
        added = self.added.to(scores.dtype)
        return (scores.unflatten(0, (-1, len(added))) + added).flatten(0, 1)

    def allowed(self) -> Bool[Tensor, "w #n n"] | None:
        """Return which keys a query may attend to in any head; None without A."""
        return None if self.added is None else (self.added > BLOCKED).any(1)

    def per_image(self, sequences: int, name: str) -> "ScoreTerms":
        """Return the terms with A for the `sequences` of one image; raise `ValueError` if A differs between images."""
        if self.added is None or len(self.added) in (1, sequences):
            return self
        images = self.added.unflatten(0, (-1, sequences))
        if bool((images != images[:1]).any()):
            raise ValueError(bad(name, "must add the same term to the scores of every image", "different terms"))
        return replace(self, added=images[0])


NO_TERMS = ScoreTerms()


@final
@dataclass(frozen=True)
class CallForm:
    """Call signature of an attention module."""

    names: tuple[str, ...]  # arguments of the forward pass; the first is the tokens
    torch_style: bool = False  # whether it is called like `nn.MultiheadAttention`, with queries, keys and values
    batch_first: bool = True  # whether sequences come before tokens
    neighbours: bool = False  # as in `ScoreTerms`
    pair: bool = False  # whether it returns (output, maps or None)

    @classmethod
    def of(cls, attention: nn.Module) -> "CallForm":
        torch_style = isinstance(attention, nn.MultiheadAttention)
        return cls(
            tuple(inspect.signature(type(attention).forward).parameters)[1:],
            torch_style=torch_style,
            batch_first=not torch_style or bool(attention.batch_first),
            neighbours=not getattr(attention, "rotate_half", True),  # timm sets it; Hugging Face rotates halves
            pair=torch_style,
        )

    def read(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Float[Tensor, "b n c"], ScoreTerms]:
        """Return the tokens and score terms of one call; raise a `ValueError` for unsupported arguments."""
        given = {**dict(zip(self.names, args, strict=False)), **named}
        x = given.pop(self.names[0], None)
        if self.torch_style and any(given.pop(name, x) is not x for name in ("key", "value")):
            raise ValueError(bad("key, value", "must be the same tensor as query", "different tensors"))
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise ValueError(bad(self.names[0], "must be a tensor of tokens with 3 axes", _shape_of(x)))
        if given.pop("is_causal", False):
            raise ValueError(bad("is_causal", "must be False", True))
        rotations = [given.pop(name, None) for name in ROTATIONS]
        masks = {name: given.pop(name, None) for name in ADDED}
        if unknown := [name for name, value in given.items() if isinstance(value, Tensor)]:
            fix = "Its effect on the attention is unknown."
            raise ValueError(bad(", ".join(unknown), "must be None", "a tensor", fix))
        cos, sin = next((_rotation(part) for part in rotations if part is not None), (None, None))
        added = [self._added(name, mask) for name, mask in masks.items() if mask is not None]
        terms = ScoreTerms(cos, sin, self.neighbours, sum(added[1:], added[0]) if added else None)
        return (x if self.batch_first else x.transpose(0, 1)), terms

    def give(self, out: Float[Tensor, "b n d"]) -> Tensor | tuple[Tensor, None]:
        out = out if self.batch_first else out.transpose(0, 1)
        return (out, None) if self.pair else out

    def _added(self, name: str, mask: Tensor) -> Tensor:
        """Return A with shape (sequences, heads, n, n)."""
        if mask.dim() not in ((2,) if self.torch_style else (2, 3, 4)):
            raise ValueError(bad(name, f"must have 2{'' if self.torch_style else ' to 4'} axes", _shape_of(mask)))
        if mask.dtype == torch.bool:  # True blocks a key in nn.MultiheadAttention and allows it in all other modules
            blocked = mask if self.torch_style else ~mask
            mask = torch.zeros_like(mask, dtype=torch.get_default_dtype()).masked_fill(blocked, -torch.inf)
        return mask[None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask


def _rotation(given: Any) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, (heads or 1, tokens, d), from one tensor (timm) or a pair (Hugging Face)."""
    cos, sin = reversed(given.chunk(2, -1)) if isinstance(given, Tensor) else given
    if not 2 <= cos.dim() <= 4 or (cos.dim() == 4 and len(cos) > 1):
        raise ValueError(bad("rotary positions", "must be the same for every image", f"shape {tuple(cos.shape)}"))
    return cos.reshape(-1, *cos.shape[-2:]), sin.reshape(-1, *sin.shape[-2:])


def _shape_of(x: object) -> str:
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
