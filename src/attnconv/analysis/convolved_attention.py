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

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._errors import bad
from attnconv.analysis.attention_parts import Projection, attention_parts


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
    """A plain attention module with some heads replaced by fixed mixings; see the module's formula.

    Heads are held in another order than before: those that attend come first. The columns of `proj`
    follow.

    Args:
        attention: The module to replace, as `attention_parts` takes it. Its weights are copied.
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
        source = attention_parts(attention)
        self.grid, self.num_heads, self.head_dim = grid, source.heads, source.head_dim
        self.convolved = tuple(heads)
        self.attending = tuple(head for head in range(self.num_heads) if head not in self.convolved)
        self.scale = source.scale
        kept, gone = rows_of(self.attending, self.head_dim), rows_of(self.convolved, self.head_dim)
        query, key, value = source.query, source.key, source.value
        self.qkv = _joined([(query, kept), (key, kept), (value, kept), (value, gone)])
        self.prefix_query, self.prefix_key = _joined([(query, gone)]), _joined([(key, gone)])
        self.q_norm, self.k_norm = copy.deepcopy(source.query_norm), copy.deepcopy(source.key_norm)
        self.attn_drop, self.proj_drop = nn.Dropout(source.dropout), copy.deepcopy(source.out_dropout)
        self.proj = _columns(source.out, torch.cat((kept, gone)))
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


@final
class PairedAttention(nn.Module):
    """`ConvolvedAttention` where a model of Hugging Face expects its own: it gives the output and no maps.

    Args:
        attention: The module.

    Example:
        `replace_heads` makes these modules.
    """

    def __init__(self, attention: ConvolvedAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self, hidden_states: Float[Tensor, "b n c"], attention_mask: Tensor | None = None, **_options: object
    ) -> tuple[Float[Tensor, "b n d"], None]:
        """The output and None in the place of the maps.

        Args:
            hidden_states: Tokens.
            attention_mask: Must be None.
            _options: What says which outputs to give; there is one.

        Raises:
            ValueError: As `ConvolvedAttention`.
        """
        return self.attention(hidden_states, attention_mask), None


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


def rows_of(heads: Sequence[int], size: int) -> Tensor:
    """The rows of these heads in a projection with `size` channels for each head."""
    return (torch.tensor(heads, dtype=torch.int64)[:, None] * size + torch.arange(size)).flatten()


def _joined(parts: Sequence[tuple[Projection, Tensor]]) -> nn.Linear:
    """One linear map with these outputs of several."""
    with torch.no_grad():
        weight = torch.cat([part.weight[rows] for part, rows in parts])
        biases = [part.weight.new_zeros(len(rows)) if part.bias is None else part.bias[rows] for part, rows in parts]
        first = next((part.linear for part, _ in parts if part.bias is not None), parts[0][0].linear)
        made = _like(first, weight.shape[1], len(weight))
        made.weight.copy_(weight)
        if made.bias is not None:
            made.bias.copy_(torch.cat(biases))
    return made


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
