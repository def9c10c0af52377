"""An attention module in which some heads are a fixed mixing of values: a small depthwise kernel without a softmax.

    out(q) = r(q) sum_delta w(delta) v(q + delta)  +  g mean_k v(k)  +  sum_p u(p) v(p)

at an image token q, over the K x K shifts and the class tokens or registers p; v is 0 outside the image (or window). r
(`head_kernel_fit`) is not trained: a trained kernel has signs, and its sum may vanish.

Class tokens and registers keep their attention. Where keys are neither normalised nor rotated, their scores need no
keys: q (x W_k)^T = (q W_k^T) x^T, since the keys' bias adds the same to all scores of a row.
"""

import copy
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv.inspect.module_adapters import Projection
from attnconv.inspect.score_modifiers import ROTATIONS, ScoreTerms
from attnconv.surgery.head_kernel_fit import HeadMixing, Taps
from attnconv.surgery.replaceable_attention import LayerTokens


@final
class ConvolvedAttention(nn.Module):
    """An attention module with some heads replaced by fixed mixings; made by `replace_heads`.

    It is called like the module that it replaces. The heads that attend come first, and the columns of `proj` follow.

    Args:
        tokens: The module to replace, whose weights are copied, and how it is called.
        mixing: The mixings of all its heads.
        heads: The heads to replace.

    Attributes:
        kernel: w of the formula above, (h, K, K), a parameter.
        rest: g, (h,), a parameter.
        prefix: u, (h, p), a parameter.
    """

    @torch.enable_grad()  # which parameters are trained is read from `requires_grad` of parts of them
    def __init__(self, tokens: LayerTokens, mixing: HeadMixing, *, heads: Sequence[int]) -> None:
        super().__init__()
        source, size, chosen = tokens.parts, mixing.kernel_size, list(heads)
        self.call, self.grid = tokens.call, tokens.grid
        self.num_heads, self.head_dim, self.scale = source.heads, source.head_dim, source.scale
        self.batch_first, self.in_proj_bias = self.call.batch_first, None  # torch's encoder asks for these
        self.added, self.masked = tokens.terms.added is not None, tokens.terms.blocks()
        self.convolved = tuple(chosen)
        self.attending = tuple(head for head in range(self.num_heads) if head not in self.convolved)
        numbers = ", ".join(map(str, chosen))
        self.attention_unreadable = (
            f"its heads {numbers} were replaced by fixed kernels, which are no attention; read the model from before"
        )
        kept, gone = (_rows_of(some, self.head_dim) for some in (self.attending, self.convolved))
        query, key, value = source.query, source.key, source.value
        self.qkv = _joined([(query, kept), (key, kept), (value, kept), (value, gone)])
        # Unused parameters are left out: parameters without gradients stop distributed training.
        reads, attends = tokens.prefix > 0, bool(self.attending)
        self.prefix_query = _joined([(query, gone)]) if reads else None
        self.prefix_key = _joined([(key, gone)]) if reads else None
        norms = (source.query_norm, source.key_norm) if reads or attends else (nn.Identity(), nn.Identity())
        self.q_norm, self.k_norm = (copy.deepcopy(norm) for norm in norms)
        if self.prefix_key is not None and self._folds():
            self.prefix_key.register_parameter("bias", None)
        self.bias = source.bias.of(self.attending) if source.bias is not None and attends else None
        before = slice(tokens.prefix)
        self.prefix_bias = source.bias.of(self.convolved, before) if source.bias is not None and reads else None
        self.attn_drop, self.proj_drop = nn.Dropout(source.dropout), copy.deepcopy(source.out_dropout)
        order = torch.cat((kept, gone))
        self.norm = copy.deepcopy(source.out_norm)
        for weight in self.norm.parameters():
            weight.data = weight.data[order]
        self.proj = _linear(source.out.weight[:, order], source.out.bias)
        kernel, rest, prefix = mixing.weights[chosen].split((size**2, 1, tokens.prefix), 1)
        self.kernel = nn.Parameter(kernel.unflatten(1, (size, size)).clone())
        self.rest = nn.Parameter(rest[:, 0].clone())
        self.prefix = nn.Parameter(prefix.clone())
        self.profile: Tensor
        self.ratio: Tensor
        self.register_buffer("profile", mixing.profile[chosen])
        self.register_buffer("ratio", Taps.of(self.grid, size, self.profile).ratio(self.profile)[0])
        self.train(tokens.attention.training)

    def forward(self, *args: Any, **named: Any) -> Tensor | tuple[Tensor, None]:
        """Map tokens (b, tokens, channels) to the same; arguments and result are those of the replaced module.

        Raises:
            ValueError: A mask is given that was not there when heads were replaced, or the tokens are not those of
                the grid.
        """
        x, terms = self.call.read(args, named)
        before, (height, width) = self.prefix.shape[1], self.grid
        if terms.added is not None and not self.added:
            raise ValueError(bad("attn_mask", "must be None: heads were replaced without one", "a mask"))
        if x.shape[1] != before + height * width:
            requirement = f"must be {before} before an image of {height} x {width}"
            raise ValueError(bad("tokens", requirement, x.shape[1], "Replace heads at the size that is used."))
        inner = len(self.attending) * self.head_dim
        query, key, value, mixed = self.qkv(x).split((inner, inner, inner, len(self.convolved) * self.head_dim), -1)
        out = self._mixed(mixed[:, :before], mixed[:, before:], terms)
        if before > 0:
            out = torch.cat((self._read(x, mixed, terms.of(self.convolved)), out), 1)
        if self.attending:
            out = torch.cat((self._attended(query, key, value, terms=terms.of(self.attending)), out), -1)
        return self.call.give(self.proj_drop(self.proj(self.norm(out))))

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, *, terms: ScoreTerms) -> Tensor:
        """The heads that attend as before, (b, n, h d)."""
        query, key, value = (self._by_head(part) for part in (query, key, value))
        query, key = terms.turned(self.q_norm(query)), terms.turned(self.k_norm(key))
        mask = terms.added
        if self.bias is not None:
            mask = self.bias()[None] if mask is None else self.bias()[None] + mask
        if mask is not None:
            mask = mask.to(query.dtype)
            mask = mask if len(mask) == 1 else mask.repeat(len(query) // len(mask), 1, 1, 1)
        drop = self.attn_drop.p if self.training else 0.0
        out = F.scaled_dot_product_attention(query, key, value, mask, dropout_p=drop, scale=self.scale)
        return out.transpose(1, 2).flatten(2)

    def _mixed(self, before: Tensor, values: Tensor, terms: ScoreTerms) -> Tensor:
        """The replaced heads at the image's tokens, (b, n, h d)."""
        allowed = terms.allowed() if self.masked else None
        if allowed is None:
            out = self._convolved(values)
        else:
            taps = Taps.of(self.grid, self.kernel.shape[-1], values).masked(allowed)
            weights = torch.cat((self.kernel.flatten(1), self.rest[:, None]), 1).T[:, :, None, None]
            columns = taps.columns(self._by_head(values), self.profile)
            out = sum((column * weight for column, weight in zip(columns, weights, strict=True)), values.new_zeros(()))
            out = out.transpose(1, 2).flatten(2)
        return out + (before * self.prefix.repeat_interleave(self.head_dim, 0).T).sum(1, keepdim=True)

    def _convolved(self, values: Tensor) -> Tensor:
        """The same sum of columns where nothing is masked, as a convolution."""
        # Tokens times channels is an image in channels-last memory: nothing is copied for the convolution.
        image = values.unflatten(1, self.grid).permute(0, 3, 1, 2)
        kernel = self.kernel.repeat_interleave(self.head_dim, 0)[:, None]
        out = F.conv2d(image, kernel, padding=kernel.shape[-1] // 2, groups=len(kernel)).flatten(2).transpose(1, 2)
        ratio, rest = (each.repeat_interleave(self.head_dim, 0) for each in (self.ratio, self.rest))
        return out * ratio.T + values.mean(1, keepdim=True) * rest

    def _read(self, x: Tensor, values: Tensor, terms: ScoreTerms) -> Tensor:
        """The replaced heads at class tokens and registers: their attention, (b, p, h d)."""
        before = self.prefix.shape[1]
        assert self.prefix_query is not None
        assert self.prefix_key is not None
        query = self.q_norm(self._by_head(self.prefix_query(x[:, :before])))  # only the image's tokens are rotated
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
        """Whether class tokens need no keys: these are neither normalised nor rotated."""
        return isinstance(self.k_norm, nn.Identity) and not set(ROTATIONS) & set(self.call.names)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (b, h, n, d)


def _rows_of(heads: Sequence[int], size: int) -> Tensor:
    """The rows of these heads in a projection with `size` channels for each head."""
    return (torch.tensor(heads, dtype=torch.int64)[:, None] * size + torch.arange(size)).flatten()


def _joined(parts: Sequence[tuple[Projection, Tensor]]) -> nn.Linear:
    """One linear map with these outputs of several; it is trained if one of them is."""
    biases = [part.weight.new_zeros(len(rows)) if part.bias is None else part.bias[rows] for part, rows in parts]
    has_bias = any(part.bias is not None for part, _ in parts)
    return _linear(torch.cat([part.weight[rows] for part, rows in parts]), torch.cat(biases) if has_bias else None)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear map with a copy of this weight and bias; frozen ones stay frozen."""
    made = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return made
