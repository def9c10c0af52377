"""Fit to each head the fixed mixing of values that is nearest to its output on given images.

A token may read some of its K x K shifts only. With the mean attention a,

    r(q) = sum_delta a(delta) / sum_{delta that q can read} a(delta)      at most K^2

gives the weight of shifts that leave the image, or lead to a masked token, to the others. With regressors R (values at
the shifts times r, their mean, values of class tokens), the coefficients z = (w, g, u) of `partly_convolved_attention`
and the head's own output y,

    least_squares    min_z  sum_{images, q, channels} |y - R z|^2 + t |z - z0|^2,    t = 1e-4 tr(R^T R) / len(z)
    mean             z0: the mean attention per shift and per class token; the image's mean has the rest of 1

The ridge t decides where values do not: on images without contrast all kernels of the same sum are equally good.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from attnconv.surgery.replaceable_attention import LayerTokens

Fit: TypeAlias = Literal["least_squares", "mean"]
_RIDGE = 1e-4  # of the mean diagonal entry of R^T R


@final
@dataclass(frozen=True, eq=False)
class Taps:
    """The shifts of a K x K kernel, row by row, at the tokens of a grid."""

    index: Int[Tensor, "taps n"]  # token at each shift, plus 1; 0 outside the grid
    inside: Float[Tensor, "w taps n"]  # 1 where a shift can be read, else 0; per sequence of an image, or one for all
    spread: Float[Tensor, "w n n"] | None  # weights of the mean over the keys that a query can read; None if all

    @classmethod
    def of_layer(cls, tokens: LayerTokens, kernel_size: int) -> "Taps":
        """The taps of a layer, where its masks allow them."""
        taps, allowed = cls.of(tokens.grid, kernel_size, tokens.inputs), tokens.terms.allowed()
        return taps.masked(allowed) if allowed is not None and tokens.terms.blocks() else taps

    @classmethod
    def of(cls, grid: tuple[int, int], kernel_size: int, like: Tensor) -> "Taps":
        """The taps of an odd kernel where nothing is masked, with the device and dtype of `like`."""
        places = torch.arange(1.0, grid[0] * grid[1] + 1, dtype=torch.float64, device=like.device)
        index = F.unfold(places.reshape(1, 1, *grid), kernel_size, padding=kernel_size // 2)[0].long()
        return cls(index, (index > 0)[None].to(like.dtype), None)

    def masked(self, allowed: Bool[Tensor, "w n n"]) -> "Taps":
        """The same shifts where `allowed` says which keys a query can read."""
        shares = allowed.to(self.inside.dtype)
        inside = F.pad(shares, (1, 0)).gather(2, self.index.T.expand(len(allowed), -1, -1)).transpose(1, 2)
        return Taps(self.index, inside, shares / shares.sum(2, keepdim=True))

    def ratio(self, profile: Float[Tensor, "h K K"]) -> Float[Tensor, "w h n"]:
        """r of the module's formula, with the profile as a."""
        mass = profile.flatten(1)
        total = mass.sum(1)[:, None]
        inside = torch.einsum("wtn,ht->whn", self.inside, mass)
        tiny = torch.finfo(profile.dtype).tiny
        return (total / inside.clamp_min(tiny)).clamp_max(mass.shape[1]).where(total > 0, 1.0)

    def mass(self, profile: Float[Tensor, "h K K"]) -> Float[Tensor, "h"]:
        """Mean attention of a query to all shifts that it can read."""
        return profile.flatten(1) @ self.inside.mean((0, 2))

    def columns(
        self, values: Float[Tensor, "b h n d"], profile: Float[Tensor, "h K K"]
    ) -> Iterator[Float[Tensor, "b h n d"]]:
        """Yield the values at each shift times r, then their mean. Sequences of one image are consecutive."""
        by_sequence = values.unflatten(0, (-1, len(self.inside)))
        padded = F.pad(by_sequence, (0, 0, 1, 0))
        weights = self.ratio(profile)[:, :, None] * self.inside[:, None]  # (w, h, taps, n)
        for tap, places in enumerate(self.index):
            yield (padded[:, :, :, places] * weights[:, :, tap, :, None]).flatten(0, 1)
        if self.spread is None:
            yield values.mean(2, keepdim=True).expand_as(values)
        else:
            yield (self.spread[:, None] @ by_sequence).flatten(0, 1)


@final
@dataclass(frozen=True, eq=False)
class HeadMixing:
    """The fixed weights of the heads of one layer."""

    weights: Float[Tensor, "h z"]  # the K x K shifts row by row, the mean, the tokens before the image
    profile: Float[Tensor, "h K K"]  # mean attention per shift, not negative

    @property
    def kernel_size(self) -> int:
        """K."""
        return self.profile.shape[-1]


@torch.no_grad()
def fit_mixing(tokens: LayerTokens, kernel_size: int = 3, *, fit: Fit = "least_squares") -> HeadMixing:
    """Fit the mixings of all heads of a layer with the formulas above."""
    shifts = Taps.of_layer(tokens, kernel_size)
    profile, weights = _mean_maps(tokens, shifts, kernel_size)
    if fit == "least_squares":
        gram, moment = weights.new_zeros(*weights.shape, weights.shape[1]), torch.zeros_like(weights)
        for block in tokens.blocks(kernel_size):
            rows, values = block.maps_and_values()
            regressors = _regressors(values, profile, block, shifts).double()
            target = (rows[:, :, block.prefix :] @ values).double()
            gram += torch.einsum("bhndi,bhndj->hij", regressors, regressors)
            moment += torch.einsum("bhndi,bhnd->hi", regressors, target)
        size = gram.diagonal(dim1=1, dim2=2).mean(1)[:, None]
        ridge = _RIDGE * size.where(size > 0, 1.0)  # a head whose values are zero keeps z0
        weights = torch.linalg.solve(gram + torch.diag_embed(ridge.expand_as(weights)), moment + ridge * weights)
    return HeadMixing(weights.to(tokens.inputs.dtype), profile)


@torch.no_grad()
def mixing_errors(tokens: LayerTokens, mixing: HeadMixing) -> tuple[Float[Tensor, "b h n d"], Float[Tensor, "b h n d"]]:
    """Return R z - y and y at the image's tokens, of all heads."""
    errors, outputs = [], []
    shifts = Taps.of_layer(tokens, mixing.kernel_size)
    for block in tokens.blocks(mixing.kernel_size):
        rows, values = block.maps_and_values()
        outputs.append(rows[:, :, block.prefix :] @ values)
        mixed = torch.einsum("bhndi,hi->bhnd", _regressors(values, mixing.profile, block, shifts), mixing.weights)
        errors.append(mixed - outputs[-1])
    return torch.cat(errors), torch.cat(outputs)


def relative_size(change: Float[Tensor, "*b"], size: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return change / size, or 0 where nothing changes: heads and layers may output only zeros."""
    return (change / size).where(change > 0, 0.0)


def _mean_maps(tokens: LayerTokens, shifts: Taps, size: int) -> tuple[Float[Tensor, "h K K"], Float64[Tensor, "h z"]]:
    """The mean attention per shift of a kernel, and z0."""
    heads, before = tokens.parts.heads, tokens.prefix
    inside = shifts.inside.double()  # (w, taps, n)
    mass, on_prefix = inside.new_zeros(heads, size**2), inside.new_zeros(heads, before)
    keys = (shifts.index.T + before - 1).clamp_min(0)  # (n, taps)
    for block in tokens.blocks(size):
        rows = block.maps_and_values()[0][:, :, before:].double()
        on_prefix += rows[..., :before].sum((0, 2))
        taken = rows.gather(3, keys.expand(*rows.shape[:2], -1, -1)).unflatten(0, (-1, len(inside)))
        mass += torch.einsum("iwhnt,wtn->ht", taken, inside)
    images = len(tokens.inputs) / len(inside)
    on_prefix = on_prefix / (len(tokens.inputs) * inside.shape[2])
    mass = mass / (images * inside.sum((0, 2))).clamp_min(1.0)  # a kernel may be larger than the image
    profile = mass.unflatten(1, (size, size)).to(tokens.inputs.dtype)
    # Few queries can read far shifts; on a small image their means sum to more than all attention.
    mass = mass * ((1 - on_prefix.sum(1)) / mass.sum(1).clamp_min(1e-30)).clamp_max(1.0)[:, None]
    rest = (1 - mass.sum(1) - on_prefix.sum(1)).clamp_min(0.0)
    return profile, torch.cat((mass, rest[:, None], on_prefix), 1)


def _regressors(values: Tensor, profile: Tensor, tokens: LayerTokens, shifts: Taps) -> Float[Tensor, "b h n d z"]:
    """R, at the image's tokens."""
    image = values[:, :, tokens.prefix :]
    before = (values[:, :, token : token + 1].expand_as(image) for token in range(tokens.prefix))
    return torch.stack([*shifts.columns(image, profile), *before], -1)
