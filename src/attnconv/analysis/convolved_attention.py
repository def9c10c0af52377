"""An attention module in which some heads are a fixed mixing of values: a small depthwise kernel, and no softmax.

For a replaced head with values v, an image token at q and class tokens or registers p,

    out(q) = r(q) sum_delta w(delta) v(q + delta)  +  g mean_k v(k)  +  sum_p u(p) v(p)

where delta runs over the K x K shifts, v is 0 outside the image, and w, g and u are parameters. As in attention, what
falls off the border goes to the taps that stay: r(q) = sum_delta a(delta) / sum_{delta inside at q} a(delta) with a the
head's mean attention per shift when it was fitted, at most K^2. r is not trained: a trained kernel has signs, and its
sum may vanish.

Queries and keys are computed for the other heads alone. Class tokens and registers keep their attention, exactly: they
read the whole image by its content, which no fixed weights replace, and they are few. Their scores need no keys,

    q (x W_k)^T = (q W_k^T) x^T        (the keys' bias adds the same to all scores of a row)

which costs one row of C numbers per class token and head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._errors import bad


@final
@dataclass(frozen=True, eq=False)
class HeadMixing:
    """The fixed weights of some heads of one layer; the letters are those of the module's formula.

    Attributes:
        kernel: w, (h, K, K).
        profile: a, the mean attention per shift, (h, K, K), not negative.
        rest: g, (h,).
        prefix: u, (h, p).
    """

    kernel: Float[Tensor, "h K K"]
    profile: Float[Tensor, "h K K"]
    rest: Float[Tensor, "h"]
    prefix: Float[Tensor, "h p"]


@final
class ConvolvedAttention(nn.Module):
    """timm's `Attention` with some heads replaced by fixed mixings; see the module's formula.

    Heads are held in another order than before: those that attend come first. The columns of `proj`
    follow.

    Args:
        attention: The module to replace, as `refuse_foreign` takes it. Its weights are copied.
        mixing: The fixed weights of the heads in `heads`, in their order.
        heads: The heads to replace.
        grid: Tokens of the image, (height, width).

    Attributes:
        kernel: (h, K, K), a parameter.
        rest: (h,), a parameter.
        prefix: (h, p), a parameter.

    Example:
        `replace_heads` makes these modules.
    """

    def __init__(
        self, attention: nn.Module, mixing: HeadMixing, *, heads: Sequence[int], grid: tuple[int, int]
    ) -> None:
        super().__init__()
        refuse_foreign(attention)
        source: Any = attention
        self.grid, self.num_heads, self.head_dim = grid, source.num_heads, source.head_dim
        self.convolved = tuple(heads)
        self.attending = tuple(head for head in range(self.num_heads) if head not in self.convolved)
        self.scale = float(source.scale)
        size = self.head_dim
        kept, gone = rows_of(self.attending, size), rows_of(self.convolved, size)
        width = self.num_heads * size
        rows = torch.cat((kept, width + kept, 2 * width + kept, 2 * width + gone))
        self.qkv = _part(source.qkv, rows)
        self.prefix_query, self.prefix_key = _part(source.qkv, gone), _part(source.qkv, width + gone)
        self.q_norm, self.k_norm = source.q_norm, source.k_norm
        self.attn_drop, self.proj_drop = source.attn_drop, source.proj_drop
        self.proj = _columns(source.proj, torch.cat((kept, gone)))
        self.kernel = nn.Parameter(mixing.kernel.clone())
        self.rest = nn.Parameter(mixing.rest.clone())
        self.prefix = nn.Parameter(mixing.prefix.clone())
        self.profile: Tensor
        self.register_buffer("profile", mixing.profile.clone())

    def forward(
        self, x: Float[Tensor, "b n c"], attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Float[Tensor, "b n d"]:
        """Tokens (b, tokens, channels) to the same, as timm's.

        Raises:
            ValueError: A mask is given, or the tokens are not those of the grid.
        """
        before = self.prefix.shape[1]
        height, width = self.grid
        if attn_mask is not None or is_causal:
            raise ValueError(bad("attn_mask", "must be None: replaced heads know no mask", "a mask"))
        if x.shape[1] != before + height * width:
            requirement = f"must be {before} before an image of {height} x {width}"
            raise ValueError(bad("tokens", requirement, x.shape[1], "Replace heads at the size that is used."))
        inner = len(self.attending) * self.head_dim
        query, key, value, mixed = self.qkv(x).split((inner, inner, inner, len(self.convolved) * self.head_dim), -1)
        parts = [self._mixed(mixed[:, :before], mixed[:, before:])]
        if before > 0:
            parts = [torch.cat((self._read(x, mixed), parts[0]), 1)]
        if self.attending:
            parts.insert(0, self._attended(query, key, value))
        out: Tensor = self.proj_drop(self.proj(torch.cat(parts, -1)))
        return out

    def _attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The heads that attend as before."""
        query, key, value = (self._by_head(part) for part in (query, key, value))
        drop = self.attn_drop.p if self.training else 0.0
        out = F.scaled_dot_product_attention(
            self.q_norm(query), self.k_norm(key), value, dropout_p=drop, scale=self.scale
        )
        return out.transpose(1, 2).flatten(2)

    def _mixed(self, before: Tensor, values: Tensor) -> Tensor:
        """The replaced heads at the image's tokens, (b, n, h d)."""
        size = self.head_dim
        # Tokens times channels is an image in channels-last memory: nothing is copied for the convolution.
        image = values.unflatten(1, self.grid).permute(0, 3, 1, 2)
        kernel = self.kernel.repeat_interleave(size, 0)[:, None]
        out = F.conv2d(image, kernel, padding=kernel.shape[-1] // 2, groups=len(kernel))
        ratio = border_ratio(self.profile, self.grid).repeat_interleave(size, 0)
        out = (out * ratio).flatten(2).transpose(1, 2)
        constant = values.mean(1, keepdim=True) * self.rest.repeat_interleave(size)
        if before.shape[1] > 0:
            constant = constant + (before * self.prefix.repeat_interleave(size, 0).T).sum(1, keepdim=True)
        return out + constant

    def _read(self, x: Tensor, values: Tensor) -> Tensor:
        """The replaced heads at class tokens and registers: their attention, (b, p, h d)."""
        query = self.q_norm(self._by_head(self.prefix_query(x[:, : self.prefix.shape[1]])))
        if isinstance(self.k_norm, nn.Identity):
            folded = query @ self.prefix_key.weight.unflatten(0, (-1, self.head_dim))  # (b, h, p, c)
            scores = folded @ x[:, None].transpose(-2, -1)
        else:
            scores = query @ self.k_norm(self._by_head(self.prefix_key(x))).transpose(-2, -1)
        rows = self.attn_drop((scores * self.scale).softmax(-1))
        return (rows @ self._by_head(values)).transpose(1, 2).flatten(2)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (b, h, n, d)


def border_ratio(profile: Float[Tensor, "h K K"], grid: tuple[int, int]) -> Float[Tensor, "h height width"]:
    """r(q) of the module's formula.

    Args:
        profile: Mean attention per shift, not negative.
        grid: Tokens of the image, (height, width).

    Returns:
        1 inside, up to K^2 at the border.

    Example:
        >>> border_ratio(torch.full((1, 3, 3), 1.0), (3, 3))[0].tolist()
        [[2.25, 1.5, 2.25], [1.5, 1.0, 1.5], [2.25, 1.5, 2.25]]
    """
    heads, size, _ = profile.shape
    image = profile.new_ones(1, 1, *grid)
    inside = F.conv2d(image, profile[:, None], padding=size // 2)[0]  # cross-correlation: tap delta reads q + delta
    total = profile.sum((1, 2)).reshape(heads, 1, 1)
    return (total / inside.clamp_min(torch.finfo(profile.dtype).tiny)).clamp_max(size**2).where(total > 0, 1.0)


def refuse_foreign(attention: nn.Module, name: str = "attention") -> None:
    """Refuse a module whose forward pass is not that of timm's plain `Attention`.

    Raises:
        ValueError: It lacks `qkv`, `proj`, `num_heads`, `head_dim` or `scale`, or has parts that a fixed mixing would
            lose: a norm before `proj`, a gate, rotary positions.
    """
    lacking = [part for part in ("qkv", "proj", "num_heads", "head_dim", "scale") if getattr(attention, part, 0) == 0]
    fix = "timm's VisionTransformer has such modules; torch's nn.MultiheadAttention is not taken."
    if lacking:
        requirement = f"must be of timm's kind, with {', '.join(lacking)}"
        raise ValueError(bad(name, requirement, type(attention).__name__, fix))
    source: Any = attention
    extra = [part for part in ("norm", "gate") if not isinstance(getattr(source, part, None), nn.Identity | None)]
    odd = source.qkv.out_features != 3 * source.num_heads * source.head_dim
    if extra or odd or turns(source):
        got = ", ".join(extra) or ("other widths of queries, keys and values" if odd else "rotary positions")
        raise ValueError(bad(name, "must compute softmax(q k^T) v and `proj` alone", f"{got} besides", fix))


def turns(attention: nn.Module) -> bool:
    """Whether a module turns queries and keys by their positions, as its class is named."""
    return "rope" in type(attention).__name__.lower()


def rows_of(heads: Sequence[int], size: int) -> Tensor:
    """The rows of these heads in a projection with `size` channels for each head."""
    return (torch.tensor(heads, dtype=torch.int64)[:, None] * size + torch.arange(size)).flatten()


def _part(linear: nn.Linear, rows: Tensor) -> nn.Linear:
    """A linear map with some of the outputs."""
    part = _like(linear, linear.in_features, len(rows))
    with torch.no_grad():
        part.weight.copy_(linear.weight[rows])
        if linear.bias is not None:
            part.bias.copy_(linear.bias[rows])
    return part


def _columns(linear: nn.Linear, columns: Tensor) -> nn.Linear:
    """A linear map with its inputs in another order."""
    part = _like(linear, len(columns), linear.out_features)
    with torch.no_grad():
        part.weight.copy_(linear.weight[:, columns])
        if linear.bias is not None:
            part.bias.copy_(linear.bias)
    return part


def _like(linear: nn.Linear, inputs: int, outputs: int) -> nn.Linear:
    weight = linear.weight
    made = nn.Linear(inputs, outputs, bias=linear.bias is not None, device=weight.device, dtype=weight.dtype)
    made.weight.requires_grad_(weight.requires_grad)
    return made
