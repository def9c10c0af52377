"""Replacement of attention heads with depthwise kernels without a softmax, fitted to each head on given images.

At an image token q, the output of a replaced head is

    out(q) = r(q) sum_delta w(delta) v(q + delta)  +  g mean_k v(k)  +  sum_p u(p) v(p)

with the head's values v (0 outside the image or window), the K x K shifts delta, image tokens k, and class tokens or
registers p. A query cannot read shifts outside the image, or masked keys. With the mean attention a, the factor

    r(q) = sum_delta a(delta) / sum_{delta that q can read} a(delta)      at most K^2

redistributes their weight to other shifts; it is not trained, since the sum of a trained kernel can vanish. The vector
z = (w, g, u) is fitted to the head's output y by ridge regression. The columns of R are the terms above without z:

    min_z  sum_{images, q, channels} |y - R z|^2 + t |z - z0|^2,    t = 1e-4 tr(R^T R) / len(z)

z0 is the mean attention to each shift and each class token; its entry for g is the remaining attention. The penalty t
makes the solution unique: on images without contrast, all kernels with the same sum fit equally well.

Class tokens and registers keep their attention. If keys are neither normalised nor rotated, the scores are computed
without keys: q (x W_k)^T = (q W_k^T) x^T, since the bias of the keys adds the same constant to all scores of a row.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv.inspect.module_adapters import Projection
from attnconv.inspect.score_modifiers import ROTATIONS, PositionBias, ScoreTerms
from attnconv.operators.base import score_dtype
from attnconv.operators.toeplitz import fast_length
from attnconv.surgery.replaceable_attention import LayerTokens

_RIDGE = 1e-4  # t relative to the mean diagonal entry of R^T R
_DIRECT = 20  # flops of a direct convolution, including those of its padding, in the time of one flop of an FFT


@final
@dataclass(frozen=True, eq=False)
class Taps:
    """Tokens at the shifts of a K x K kernel (row-major) from each token of a grid."""

    index: Int[Tensor, "taps n"]  # index of the token at each shift, from 1; 0 outside the grid
    inside: Float[Tensor, "w taps n"]  # 1 if the query can read the shift, else 0; per window, or w = 1 for all windows
    prefix: Float[Tensor, "w n p"]  # 1 if the query can read the class token or register, else 0
    spread: Float[Tensor, "w n n"] | None = None  # weights of the mean over keys that a query can read; None for all

    @classmethod
    def of_layer(cls, tokens: LayerTokens, kernel_size: int) -> "Taps":
        taps = cls.of(tokens.grid, kernel_size, tokens.prefix, tokens.inputs)
        allowed = tokens.terms.allowed()
        return taps if allowed is None or bool(allowed.all()) else taps.masked(allowed)

    @classmethod
    def of(cls, grid: tuple[int, int], kernel_size: int, prefix: int, like: Tensor) -> "Taps":
        """Return the taps of an odd kernel without masks, with the device and dtype of `like`.

        `prefix` is the number of class tokens and registers.
        """
        places = torch.arange(1.0, grid[0] * grid[1] + 1, dtype=torch.float64, device=like.device)
        index = F.unfold(places.reshape(1, 1, *grid), kernel_size, padding=kernel_size // 2)[0].long()
        return cls(index, (index > 0)[None].to(like.dtype), like.new_ones(1, index.shape[1], prefix))

    def masked(self, allowed: Bool[Tensor, "w #tokens tokens"]) -> "Taps":
        """Return the same shifts with a mask of the keys that each query can read."""
        before, tokens = self.prefix.shape[2], allowed.shape[2]
        readable = allowed.expand(-1, tokens, -1)[:, before:].to(self.inside.dtype)
        prefix, shares = readable.split((before, tokens - before), 2)
        inside = F.pad(shares, (1, 0)).gather(2, self.index.T.expand(len(shares), -1, -1)).transpose(1, 2)
        return Taps(self.index, inside, prefix, shares / shares.sum(2, keepdim=True).clamp_min(1.0))

    def ratio(self, profile: Float[Tensor, "h K K"]) -> Float[Tensor, "w h n"]:
        """Return r(q) as defined in the module docstring, with the profile as a."""
        mass = profile.flatten(1)
        total = mass.sum(1)[:, None]
        inside = torch.einsum("wtn,ht->whn", self.inside, mass)
        tiny = torch.finfo(profile.dtype).tiny
        return (total / inside.clamp_min(tiny)).clamp_max(mass.shape[1]).where(total > 0, 1.0)

    def sources(self, values: Float[Tensor, "b h tokens d"]) -> Float[Tensor, "b h sources d"]:
        """Return the vectors of which the columns of R consist: zero, the values, and means of the image's values.

        Sequences of one image are consecutive. There is one mean for all queries, or one for each if there are masks.
        """
        image = values[:, :, values.shape[2] - self.index.shape[1] :]
        if self.spread is None:
            means = image.mean(2, keepdim=True)
        else:
            means = (self.spread[:, None] @ image.unflatten(0, (-1, len(self.spread)))).flatten(0, 1)
        return torch.cat((torch.zeros_like(values[:, :, :1]), values, means), 2)

    def columns(self, profile: Float[Tensor, "h K K"]) -> tuple[Int[Tensor, "n z"], Float[Tensor, "w h n z"]]:
        """Return, for each query and column of R, the index of the vector in `sources` and its factor."""
        count, before = self.prefix.shape[1:]
        mean = torch.full((count, 1), 1 + before + count, device=self.index.device)
        if self.spread is not None:
            mean += torch.arange(count, device=mean.device)[:, None]
        prefix = torch.arange(1, before + 1, device=mean.device).expand(count, -1)
        index = torch.cat((self.index.where(self.index == 0, self.index + before).T, mean, prefix), 1)
        factors = (self.ratio(profile)[:, :, None] * self.inside[:, None]).transpose(2, 3)  # (w, h, n, taps)
        prefix_factors = self.prefix[:, None].expand(-1, len(profile), -1, -1)
        return index, torch.cat((F.pad(factors, (0, 1), value=1.0), prefix_factors), 3)

    def mixed(
        self, values: Float[Tensor, "b h tokens d"], profile: Float[Tensor, "h K K"], weights: Float[Tensor, "h z"]
    ) -> Float[Tensor, "b h n d"]:
        """Return R z."""
        sources = self.sources(values)
        index, factors = self.columns(profile)
        rows = sources.new_zeros(*factors.shape[:3], sources.shape[2])
        rows = rows.scatter_add(3, index.expand_as(factors), (factors * weights[:, None]).to(rows.dtype))
        return (rows @ sources.unflatten(0, (-1, len(rows)))).flatten(0, 1)


@final
@dataclass(frozen=True, eq=False)
class HeadMixing:
    """Fitted coefficients of all heads of a layer."""

    weights: Float[Tensor, "h z"]  # of the K x K shifts (row-major), the image's mean, and the tokens before the image
    profile: Float[Tensor, "h K K"]  # mean attention at each shift, not negative


@torch.no_grad()
def fit_mixing(tokens: LayerTokens, kernel_size: int = 3) -> HeadMixing:
    """Fit the coefficients z of all heads of a layer."""
    shifts = Taps.of_layer(tokens, kernel_size)
    profile, weights = mean_maps(tokens, shifts, kernel_size)
    index, factors = shifts.columns(profile)
    factors = factors.double()
    # Inner products of the sources with one another and with the outputs, summed over images and channels.
    count = int(index.max()) + 1
    products, targets = (factors.new_zeros(*factors.shape[:2], size, count) for size in (count, len(index)))
    for block in tokens.blocks():
        rows, values = block.maps_and_values()
        sources = shifts.sources(values).double().unflatten(0, (-1, len(factors)))
        outputs = (rows[:, :, block.prefix :] @ values).double().unflatten(0, (-1, len(factors)))
        products += torch.einsum("iwhsd,iwhtd->whst", sources, sources)
        targets += torch.einsum("iwhnd,iwhsd->whns", outputs, sources)
    moment = (factors * targets.gather(3, index.expand_as(factors))).sum((0, 2))
    gram = weights.new_zeros(*weights.shape, weights.shape[1])
    for by_head, product in zip(factors, products, strict=True):
        for places, factor in zip(index, by_head.unbind(1), strict=True):
            inside = places.nonzero().squeeze(1)  # most shifts of a full kernel are outside the grid
            read, share = places[inside], factor[:, inside]
            gram[:, inside[:, None], inside] += share[:, :, None] * product[:, read[:, None], read] * share[:, None]
    size = gram.diagonal(dim1=1, dim2=2).mean(1)[:, None]
    ridge = _RIDGE * size.where(size > 0, 1.0)  # a head whose values are zero keeps z0
    weights = torch.linalg.solve(gram + torch.diag_embed(ridge.expand_as(weights)), moment + ridge * weights)
    return HeadMixing(weights.to(tokens.inputs.dtype), profile)


@torch.no_grad()
def mixing_errors(tokens: LayerTokens, mixing: HeadMixing) -> tuple[Float[Tensor, "b h n d"], Float[Tensor, "b h n d"]]:
    """Return the error R z - y and the output y of all heads at the image tokens."""
    errors, outputs, size = [], [], mixing.profile.shape[-1]
    shifts = Taps.of_layer(tokens, size)
    for block in tokens.blocks():
        rows, values = block.maps_and_values()
        outputs.append(rows[:, :, block.prefix :] @ values)
        errors.append(shifts.mixed(values, mixing.profile, mixing.weights) - outputs[-1])
    return torch.cat(errors), torch.cat(outputs)


@torch.no_grad()
def mean_maps(tokens: LayerTokens, shifts: Taps, size: int) -> tuple[Float[Tensor, "h K K"], Float64[Tensor, "h z"]]:
    """Return the mean attention at each shift of a kernel, and z0."""
    heads, before = tokens.parts.heads, tokens.prefix
    inside = shifts.inside.double()  # (w, taps, n)
    keys = (shifts.index.T + before - 1).clamp_min(0)  # (n, taps)
    total = inside.new_zeros(len(inside), heads, len(keys), before + len(keys))  # of the maps of all images
    for block in tokens.blocks():
        rows = block.maps_and_values()[0][:, :, before:]
        total += rows.unflatten(0, (-1, len(inside))).sum(0, dtype=torch.float64)
    on_prefix = total[..., :before].sum((0, 2))
    mass = torch.einsum("whnt,wtn->ht", total.gather(3, keys.expand(*total.shape[:2], -1, -1)), inside)
    images = len(tokens.inputs) / len(inside)
    # No query can read some shifts of a large kernel, or masked tokens.
    on_prefix = on_prefix / (images * shifts.prefix.double().sum((0, 1))).clamp_min(1.0)
    mass = mass / (images * inside.sum((0, 2))).clamp_min(1.0)
    profile = mass.unflatten(1, (size, size)).to(tokens.inputs.dtype)
    # Few queries can read distant shifts, so on a small image the means may sum to more than 1.
    mass = mass * ((1 - on_prefix.sum(1)) / mass.sum(1).clamp_min(1e-30)).clamp_max(1.0)[:, None]
    rest = (1 - mass.sum(1) - on_prefix.sum(1)).clamp_min(0.0)
    return profile, torch.cat((mass, rest[:, None], on_prefix), 1)


@final
class ConvolvedAttention(nn.Module):
    """Attention module in which depthwise kernels replace some heads; created by `replace_heads`.

    It has the same forward signature as the module that it replaces. The remaining attention heads come first, then the
    replaced heads; the columns of `proj` are in the same order.

    Args:
        tokens: The attention module to replace, with its recorded inputs. Its weights are copied.
        mixing: Fitted coefficients of all heads of the module.
        heads: Indices of the heads to replace, from 0.

    Attributes:
        kernel: Parameter with the K x K kernels of the h replaced heads, (h, K, K).
        rest: Parameter with each replaced head's weight for the mean of its values over all image tokens, (h,).
        prefix: Parameter with each replaced head's weights for the values of p class tokens and registers, (h, p).
    """

    @torch.enable_grad()  # slices must keep `requires_grad`, which the new parameters copy
    def __init__(self, tokens: LayerTokens, mixing: HeadMixing, *, heads: Sequence[int]) -> None:
        super().__init__()
        source, size, chosen = tokens.parts, mixing.profile.shape[-1], list(heads)
        self.call, self.grid = tokens.call, tokens.grid
        self.num_heads, self.head_dim, self.scale = source.heads, source.head_dim, source.scale
        self.batch_first, self.in_proj_bias = self.call.batch_first, None  # read by nn.TransformerEncoder
        self.added = tokens.terms.added is not None
        self.convolved = tuple(chosen)
        self.attending = tuple(head for head in range(self.num_heads) if head not in self.convolved)
        numbers = ", ".join(map(str, chosen))
        self.attention_unreadable = f"its heads {numbers} were replaced with kernels (heads are numbered from 0)"
        kept, gone = (_rows_of(some, self.head_dim) for some in (self.attending, self.convolved))
        query, key, value = source.query, source.key, source.value
        order = torch.cat((kept, gone))
        # Omit unused parameters, because distributed training fails for parameters without gradients.
        reads, attends = tokens.prefix > 0, bool(self.attending)
        self.query = _rows(query, kept) if attends else None
        self.key = _rows(key, kept) if attends else None
        self.value = _rows(value, order)
        self.prefix_query = _rows(query, gone) if reads else None
        self.prefix_key = _rows(key, gone) if reads else None
        norms = (source.query_norm, source.key_norm) if reads or attends else (nn.Identity(), nn.Identity())
        self.q_norm, self.k_norm = (copy.deepcopy(norm) for norm in norms)
        if self.prefix_key is not None and self._folds():
            self.prefix_key.register_parameter("bias", None)
        self.bias = source.bias.of(self.attending) if source.bias is not None and attends else None
        before = slice(tokens.prefix)
        self.prefix_bias = source.bias.of(self.convolved, before) if source.bias is not None and reads else None
        self.attn_drop, self.proj_drop = nn.Dropout(source.dropout), copy.deepcopy(source.out_dropout)
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
        self.register_buffer("ratio", Taps.of(self.grid, size, 0, self.profile).ratio(self.profile)[0])
        self.train(tokens.attention.training)

    def forward(self, *args: Any, **named: Any) -> Tensor | tuple[Tensor, None]:
        """Compute the output tokens, (b, tokens, channels); arguments and return type are those of the replaced module.

        Raises:
            ValueError: If a mask is given although heads were replaced without one, or the number of tokens is wrong.
                Images of another shape with the same number of tokens are not noticed.
        """
        x, terms = self.call.read(args, named)
        before, (height, width) = self.prefix.shape[1], self.grid
        if terms.added is not None and not self.added:
            raise ValueError(bad("attn_mask", "must be None, because heads were replaced without a mask", "a mask"))
        if x.shape[1] != before + height * width:
            requirement = f"must be {before} (class tokens and registers) + {height} x {width} (image)"
            raise ValueError(bad("tokens", requirement, x.shape[1], "Replace heads at the image size of the model."))
        value, mixed = self.value(x).split(
            [len(heads) * self.head_dim for heads in (self.attending, self.convolved)], -1
        )
        out = self._mixed(mixed, terms)
        if before > 0:
            out = torch.cat((self._read(x[:, :before], x, mixed, terms=terms.of(self.convolved)), out), 1)
        if self.query is not None and self.key is not None:
            own = terms.of(self.attending)
            query = own.turned(self.q_norm(self._by_head(self.query(x))))
            key = own.turned(self.k_norm(self._by_head(self.key(x))))
            out = torch.cat((self._attended(query, key, value, terms=own, bias=self.bias), out), -1)
        return self.call.give(self.proj_drop(self.proj(self.norm(out))))

    def _attended(
        self, query: Tensor, key: Tensor, value: Tensor, *, terms: ScoreTerms, bias: PositionBias | None
    ) -> Tensor:
        """Return the attention output of some heads at the given queries, (b, r, h d)."""
        mask = None if terms.added is None else terms.added[:, :, : query.shape[2]]
        if bias is not None:
            mask = bias()[None] if mask is None else bias()[None] + mask
        if mask is not None:
            mask = mask.to(query.dtype)
            mask = mask if len(mask) == 1 else mask.repeat(len(query) // len(mask), 1, 1, 1)
        drop = self.attn_drop.p if self.training else 0.0
        out = F.scaled_dot_product_attention(query, key, self._by_head(value), mask, dropout_p=drop, scale=self.scale)
        return out.transpose(1, 2).flatten(2)

    def _read(self, before: Tensor, x: Tensor, values: Tensor, *, terms: ScoreTerms) -> Tensor:
        """Return the attention output of the replaced heads at class tokens and registers, (b, p, h d)."""
        assert self.prefix_query is not None
        assert self.prefix_key is not None
        query = self.q_norm(self._by_head(self.prefix_query(before)))  # only image tokens are rotated
        if self._folds():
            query = query @ self.prefix_key.weight.unflatten(0, (-1, self.head_dim))  # (b, h, p, c)
            key = x[:, None].expand(-1, query.shape[1], -1, -1)
        else:
            key = terms.turned(self.k_norm(self._by_head(self.prefix_key(x))))
        return self._attended(query, key, values, terms=terms, bias=self.prefix_bias)

    def _mixed(self, values: Tensor, terms: ScoreTerms) -> Tensor:
        """Return the output of the replaced heads at the image tokens, (b, n, h d)."""
        allowed = terms.allowed()
        if allowed is not None:
            taps = Taps.of(self.grid, self.kernel.shape[-1], self.prefix.shape[1], values).masked(allowed)
            weights = torch.cat((self.kernel.flatten(1), self.rest[:, None], self.prefix), 1)
            return taps.mixed(self._by_head(values), self.profile, weights).transpose(1, 2).flatten(2)
        before, image = values.split((self.prefix.shape[1], values.shape[1] - self.prefix.shape[1]), 1)
        # Tokens x channels is an image in channels-last memory format, so the convolution needs no copy.
        out = convolved(image.unflatten(1, self.grid).permute(0, 3, 1, 2), self.kernel).flatten(2).transpose(1, 2)
        ratio, rest, prefix = (
            each.repeat_interleave(self.head_dim, 0).T for each in (self.ratio, self.rest[:, None], self.prefix)
        )
        return out * ratio + image.mean(1, keepdim=True) * rest + (before * prefix).sum(1, keepdim=True)

    def _folds(self) -> bool:
        """Return whether scores of class tokens can be computed without keys (no key norm, no rotation)."""
        return isinstance(self.k_norm, nn.Identity) and not set(ROTATIONS) & set(self.call.names)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (b, h, n, d)


def convolved(images: Float[Tensor, "b c height width"], kernels: Float[Tensor, "h K K"]) -> Tensor:
    """Convolve c / h consecutive channels with each kernel, with zero padding, by the method predicted to be faster."""
    points = math.prod(_lengths(images, kernels))
    direct = 2 * images.shape[2:].numel() * kernels[0].numel()  # flops per channel
    by_fft = 5 * points * math.log2(points)
    return convolved_directly(images, kernels) if direct <= _DIRECT * by_fft else convolved_by_fft(images, kernels)


def convolved_directly(images: Tensor, kernels: Tensor) -> Tensor:
    """Convolve with PyTorch's depthwise convolution."""
    kernels = kernels.repeat_interleave(images.shape[1] // len(kernels), 0)[:, None]
    return F.conv2d(images, kernels, padding=kernels.shape[-1] // 2, groups=len(kernels))


def convolved_by_fft(images: Tensor, kernels: Tensor) -> Tensor:
    """Convolve by FFT, in at least float32."""
    lengths, reach, dtype = _lengths(images, kernels), kernels.shape[-1] // 2, score_dtype(images.dtype)
    spectra = torch.fft.rfft2(kernels.flip(1, 2).to(dtype), lengths)
    spectra = spectra.repeat_interleave(images.shape[1] // len(kernels), 0)
    out = torch.fft.irfft2(torch.fft.rfft2(images.contiguous().to(dtype), lengths) * spectra, lengths)
    height, width = images.shape[2:]
    return out[..., reach : reach + height, reach : reach + width].to(images.dtype)


def _lengths(images: Tensor, kernels: Tensor) -> tuple[int, int]:
    """Return the sizes of transforms in which outputs inside the image do not wrap around."""
    reach = kernels.shape[-1] // 2
    height, width = (fast_length(max(size, reach + 1) + reach) for size in images.shape[2:])
    return height, width


def _rows_of(heads: Sequence[int], size: int) -> Tensor:
    """Return the row indices of some heads in a projection with `size` channels per head."""
    return (torch.tensor(heads, dtype=torch.int64)[:, None] * size + torch.arange(size)).flatten()


def _rows(part: Projection, rows: Tensor) -> nn.Linear:
    """Return a linear layer with the selected outputs of another."""
    return _linear(part.weight[rows], None if part.bias is None else part.bias[rows])


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer with copies of a weight and bias that keep `requires_grad`."""
    made = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return made
