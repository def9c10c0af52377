"""An attention module in which some heads are a fixed mixing of values: a small depthwise kernel, and no softmax.

For a replaced head with values v, an image token at q and class tokens or registers p,

    out(q) = r(q) sum_delta w(delta) v(q + delta)  +  g mean_k v(k)  +  sum_p u(p) v(p)

where delta runs over the K x K shifts, v is 0 outside the image, and w, g and u are parameters. As in attention, what
falls off the border goes to the taps that stay: r (`window_taps`) makes up for it, with the head's mean attention per
shift when it was fitted. r is not trained: a trained kernel has signs, and its sum may vanish.

Where attention runs inside windows, "image" is a window, and what the mask of shifted windows blocks is outside it.

Queries of the image are computed for the other heads alone. Class tokens and registers keep their attention, exactly:
they read the whole image by its content, which no fixed weights replace, and they are few. Their scores need no keys
where these are neither normalised nor turned,

    q (x W_k)^T = (q W_k^T) x^T        (the keys' bias adds the same to all scores of a row)

which costs one row of C numbers per class token and head. Without class tokens there are no keys either.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv.inspect.module_adapters import Projection, attention_parts
from attnconv.inspect.score_modifiers import ROTATIONS, CallForm, ScoreTerms
from attnconv.surgery.window_taps import Taps


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
    """An attention module with some heads replaced by fixed mixings; see the module's formula.

    It is called as the module that it replaces. Heads are held in another order than before: those that attend come
    first. The columns of `proj` follow.

    Args:
        attention: The module to replace, as `attention_parts` takes it. Its weights are copied.
        mixing: The fixed weights of the heads in `heads`, in their order.
        heads: The heads to replace.
        grid: Tokens of the image or window, (height, width).
        call: How the module is called; None for what can be seen of it.
        added: Whether calls bring terms that are added to the scores.
        masked: Whether these block keys.

    Attributes:
        kernel: (h, K, K), a parameter.
        rest: (h,), a parameter.
        prefix: (h, p), a parameter.

    Example:
        `replace_heads` makes these modules.
    """

    def __init__(
        self,
        attention: nn.Module,
        mixing: HeadMixing,
        *,
        heads: Sequence[int],
        grid: tuple[int, int],
        call: CallForm | None = None,
        added: bool = False,
        masked: bool = False,
    ) -> None:
        super().__init__()
        source = attention_parts(attention)
        self.call = CallForm.of(attention) if call is None else call
        self.grid, self.num_heads, self.head_dim = grid, source.heads, source.head_dim
        self.batch_first, self.in_proj_bias = self.call.batch_first, None  # torch's encoder asks for these
        self.convolved = tuple(heads)
        numbers = ", ".join(map(str, heads))
        self.attention_unreadable = (
            f"its heads {numbers} were replaced by fixed kernels, which are no attention; read the model from before"
        )
        self.attending = tuple(head for head in range(self.num_heads) if head not in self.convolved)
        self.scale, self.added, self.masked = source.scale, added, masked
        kept, gone = rows_of(self.attending, self.head_dim), rows_of(self.convolved, self.head_dim)
        query, key, value = source.query, source.key, source.value
        self.qkv = _joined([(query, kept), (key, kept), (value, kept), (value, gone)])
        before = slice(mixing.prefix.shape[1])
        # What no call uses is not held: parameters without gradients stop distributed training.
        reads, attends = before.stop > 0, bool(self.attending)
        self.prefix_query = _joined([(query, gone)]) if reads else None
        self.prefix_key = _joined([(key, gone)]) if reads else None
        norms = (source.query_norm, source.key_norm) if reads or attends else (nn.Identity(), nn.Identity())
        self.q_norm, self.k_norm = (copy.deepcopy(norm) for norm in norms)
        if self.prefix_key is not None and self._folds():
            self.prefix_key.register_parameter("bias", None)
        self.bias = None if source.bias is None or not attends else source.bias.of(self.attending)
        self.prefix_bias = None if source.bias is None or not reads else source.bias.of(self.convolved, before)
        self.attn_drop, self.proj_drop = nn.Dropout(source.dropout), copy.deepcopy(source.out_dropout)
        self.norm = _reordered(source.out_norm, torch.cat((kept, gone)))
        self.proj = _columns(source.out, torch.cat((kept, gone)))
        self.kernel = nn.Parameter(mixing.kernel.clone())
        self.rest = nn.Parameter(mixing.rest.clone())
        self.prefix = nn.Parameter(mixing.prefix.clone())
        taps = Taps.of(grid, mixing.kernel.shape[-1], mixing.profile)
        self.profile: Tensor
        self.ratio: Tensor
        self.register_buffer("profile", mixing.profile.clone())
        self.register_buffer("ratio", taps.ratio(mixing.profile)[0])

    def forward(self, *args: Any, **named: Any) -> Tensor | tuple[Tensor, None]:
        """What the replaced module takes and gives, without maps: tokens (b, tokens, channels) to the same.

        Args:
            args: The tokens, and what else the module takes.
            named: The same by name.

        Raises:
            ValueError: A mask is given that was not there when heads were replaced, or the tokens are not those of
                the grid.
        """
        x, terms = self.call.read(args, named)
        before, (height, width) = self.prefix.shape[1], self.grid
        if terms.added is not None and not self.added:
            raise ValueError(bad("attn_mask", "must be None: replaced heads know no mask", "a mask"))
        if x.shape[1] != before + height * width:
            requirement = f"must be {before} before an image of {height} x {width}"
            raise ValueError(bad("tokens", requirement, x.shape[1], "Replace heads at the size that is used."))
        inner = len(self.attending) * self.head_dim
        query, key, value, mixed = self.qkv(x).split((inner, inner, inner, len(self.convolved) * self.head_dim), -1)
        parts = [self._mixed(mixed[:, :before], mixed[:, before:], terms)]
        if before > 0:
            parts = [torch.cat((self._read(x, mixed, terms.of(self.convolved)), parts[0]), 1)]
        if self.attending:
            parts.insert(0, self._attended(query, key, value, terms=terms.of(self.attending)))
        return self.call.give(self.proj_drop(self.proj(self.norm(torch.cat(parts, -1)))))

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, *, terms: ScoreTerms) -> Tensor:
        """The heads that attend as before."""
        query, key, value = (self._by_head(part) for part in (query, key, value))
        query, key = terms.turned(self.q_norm(query)), terms.turned(self.k_norm(key))
        drop = self.attn_drop.p if self.training else 0.0
        out = F.scaled_dot_product_attention(
            query, key, value, self._raise(terms, query), dropout_p=drop, scale=self.scale
        )
        return out.transpose(1, 2).flatten(2)

    def _raise(self, terms: ScoreTerms, query: Tensor) -> Tensor | None:
        """What is added to the scores of the heads that attend."""
        parts = [] if self.bias is None else [self.bias()[None]]
        parts += [] if terms.added is None else [terms.added]
        if not parts:
            return None
        mask = sum(parts[1:], parts[0]).to(query.dtype)
        return mask if len(mask) == 1 else mask.repeat(len(query) // len(mask), 1, 1, 1)

    def _mixed(self, before: Tensor, values: Tensor, terms: ScoreTerms) -> Tensor:
        """The replaced heads at the image's tokens, (b, n, h d)."""
        size = self.head_dim
        allowed = terms.allowed() if self.masked else None
        if allowed is not None:
            taps = Taps.of(self.grid, self.kernel.shape[-1], values).masked(allowed)
            weights = torch.cat((self.kernel.flatten(1), self.rest[:, None]), 1)[:, :, None, None]
            columns = taps.columns(self._by_head(values), self.profile)
            out = values.new_zeros(())
            for place, column in enumerate(columns):
                out = out + column * weights[:, place]
            out, constant = out.transpose(1, 2).flatten(2), values.new_zeros(())
        else:
            # Tokens times channels is an image in channels-last memory: nothing is copied for the convolution.
            image = values.unflatten(1, self.grid).permute(0, 3, 1, 2)
            kernel = self.kernel.repeat_interleave(size, 0)[:, None]
            out = F.conv2d(image, kernel, padding=kernel.shape[-1] // 2, groups=len(kernel))
            out = out.flatten(2).transpose(1, 2) * self.ratio.repeat_interleave(size, 0).T
            constant = values.mean(1, keepdim=True) * self.rest.repeat_interleave(size)
        return out + constant + (before * self.prefix.repeat_interleave(size, 0).T).sum(1, keepdim=True)

    def _read(self, x: Tensor, values: Tensor, terms: ScoreTerms) -> Tensor:
        """The replaced heads at class tokens and registers: their attention, (b, p, h d)."""
        before = self.prefix.shape[1]
        assert self.prefix_query is not None
        assert self.prefix_key is not None
        query = self.q_norm(self._by_head(self.prefix_query(x[:, :before])))  # before the image, nothing is turned
        if self._folds():
            folded = query @ self.prefix_key.weight.unflatten(0, (-1, self.head_dim))  # (b, h, p, c)
            scores = folded @ x[:, None].transpose(-2, -1)
        else:
            scores = query @ terms.turned(self.k_norm(self._by_head(self.prefix_key(x)))).transpose(-2, -1)
        scores = scores * self.scale
        if self.prefix_bias is not None:
            scores = scores + self.prefix_bias()
        rows = self.attn_drop(terms.raised(scores, slice(before)).softmax(-1))
        return (rows @ self._by_head(values)).transpose(1, 2).flatten(2)

    def _folds(self) -> bool:
        """Whether class tokens need no keys: these are neither normalised nor turned."""
        return isinstance(self.k_norm, nn.Identity) and not set(ROTATIONS) & set(self.call.names)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (b, h, n, d)


def rows_of(heads: Sequence[int], size: int) -> Tensor:
    """The rows of these heads in a projection with `size` channels for each head."""
    return (torch.tensor(heads, dtype=torch.int64)[:, None] * size + torch.arange(size)).flatten()


def _joined(parts: Sequence[tuple[Projection, Tensor]]) -> nn.Linear:
    """One linear map with these outputs of several; it learns where one of them does."""
    with torch.no_grad():
        weight = torch.cat([part.weight[rows] for part, rows in parts])
        biases = [part.weight.new_zeros(len(rows)) if part.bias is None else part.bias[rows] for part, rows in parts]
    vectors = [part.vector for part, _ in parts if part.vector is not None]
    made = _linear(weight, torch.cat(biases).detach() if vectors else None)
    made.weight.requires_grad_(any(part.matrix.requires_grad for part, _ in parts))
    if vectors:
        made.bias.requires_grad_(any(vector.requires_grad for vector in vectors))
    return made


def _columns(linear: nn.Linear, columns: Tensor) -> nn.Linear:
    """A linear map with its inputs in another order."""
    made = _linear(linear.weight.detach()[:, columns], linear.bias)
    for new, old in zip(made.parameters(), linear.parameters(), strict=True):
        new.requires_grad_(old.requires_grad)
    return made


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        made.weight.copy_(weight)
        if bias is not None:
            made.bias.copy_(bias)
    return made


def _reordered(norm: nn.Module, order: Tensor) -> nn.Module:
    """A norm of all heads with their channels in another order."""
    made = copy.deepcopy(norm)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(weight[order])
    return made
