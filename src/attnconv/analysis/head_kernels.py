"""Kernels fitted to heads: the fixed mixing of values that comes nearest to what a head does on given images.

Per head, with the regressors of `convolved_attention` (values at the K x K shifts times r, their mean over the image,
values of class tokens), coefficients z = (w, g, u) and the head's own mixed values y,

    least_squares    min_z  sum_{images, q, channels} |y - R z|^2 + t |z - z0|^2,    t = 1e-4 tr(R^T R) / len(z)
    mean             z0: the mean attention per shift and per class token; what is left goes evenly to the image

The small t decides where values do not: on images without contrast every kernel of the same sum does the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, TypeAlias, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64
from torch import Tensor, nn

from attnconv.analysis.attention_parts import AttentionParts, attention_parts
from attnconv.analysis.convolved_attention import HeadMixing, border_ratio
from attnconv.analysis.shift_profiles import at_shift

Fit: TypeAlias = Literal["least_squares", "mean"]
RIDGE = 1e-4  # of the mean diagonal entry of R^T R
BLOCK = 2**25  # numbers of regressors held at once


@final
@dataclass(frozen=True, eq=False)
class LayerTokens:
    """What one attention module was given, and where its tokens stand.

    Attributes:
        attention: A module that `attention_parts` takes.
        inputs: Its input, (b, tokens, c).
        grid: Tokens of the image, (height, width).
        prefix: Tokens before them.
    """

    attention: nn.Module
    inputs: Float[Tensor, "b n c"]
    grid: tuple[int, int]
    prefix: int

    @property
    def parts(self) -> AttentionParts:
        """Where the module's weights are."""
        return attention_parts(self.attention)

    def of(self, images: slice) -> "LayerTokens":
        """The same for some of the images."""
        return LayerTokens(self.attention, self.inputs[images], self.grid, self.prefix)

    def by_head(self) -> tuple[Tensor, Tensor]:
        """Attention (b, h, n, n) and values (b, h, n, d) of all heads."""
        return self.parts.maps_and_values(self.inputs)

    def blocks(self, kernel_size: int) -> Iterator["LayerTokens"]:
        """A few images at a time."""
        parts = self.parts
        count, tokens, _ = self.inputs.shape
        wide = (kernel_size**2 + 1 + self.prefix) * parts.head_dim
        step = max(1, BLOCK // (parts.heads * tokens * max(tokens, wide)))
        for start in range(0, count, step):
            yield self.of(slice(start, start + step))


@torch.no_grad()
def fit_mixing(tokens: LayerTokens, kernel_size: int = 3, *, fit: Fit = "least_squares") -> HeadMixing:
    """The fixed mixings of all heads of a layer; see the module's formulas.

    Args:
        tokens: The layer and its inputs.
        kernel_size: K, odd.
        fit: Which of the two.
    """
    profile, start = _mean_maps(tokens, kernel_size)
    taps = kernel_size**2
    if fit == "least_squares":
        size = start.shape[1]
        gram, moment = start.new_zeros(len(start), size, size), torch.zeros_like(start)
        for block in tokens.blocks(kernel_size):
            rows, values = block.by_head()
            regressors = _regressors(values, profile, block).double()
            target = (rows[:, :, block.prefix :] @ values).double()
            gram += torch.einsum("bhndi,bhndj->hij", regressors, regressors)
            moment += torch.einsum("bhndi,bhnd->hi", regressors, target)
        ridge = RIDGE * gram.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(gram.dtype).tiny)[:, None]
        start = torch.linalg.solve(gram + torch.diag_embed(ridge.expand_as(start)), moment + ridge * start)
    weights = start.to(tokens.inputs.dtype)
    return HeadMixing(
        kernel=weights[:, :taps].unflatten(1, (kernel_size, kernel_size)),
        profile=profile,
        rest=weights[:, taps],
        prefix=weights[:, taps + 1 :],
    )


@torch.no_grad()
def mixing_errors(tokens: LayerTokens, mixing: HeadMixing) -> tuple[Float[Tensor, "b h n d"], Float[Tensor, "b h n d"]]:
    """What fixed mixings of all heads leave over at the image's tokens, and what the heads give there.

    Args:
        tokens: The layer and its inputs.
        mixing: Of all its heads.

    Returns:
        R z - y and y.
    """
    missing, given = [], []
    weights = torch.cat((mixing.kernel.flatten(1), mixing.rest[:, None], mixing.prefix), 1)
    for block in tokens.blocks(mixing.kernel.shape[-1]):
        rows, values = block.by_head()
        given.append(rows[:, :, block.prefix :] @ values)
        regressors = _regressors(values, mixing.profile, block)
        missing.append(torch.einsum("bhndi,hi->bhnd", regressors, weights) - given[-1])
    return torch.cat(missing), torch.cat(given)


def chosen_heads(mixing: HeadMixing, heads: Sequence[int]) -> HeadMixing:
    """The part of some heads."""
    some = list(heads)
    return HeadMixing(mixing.kernel[some], mixing.profile[some], mixing.rest[some], mixing.prefix[some])


def _mean_maps(tokens: LayerTokens, kernel_size: int) -> tuple[Float[Tensor, "h K K"], Float64[Tensor, "h z"]]:
    """Mean attention per shift, and z0; over the queries for which the shift stays inside."""
    heads, before = tokens.parts.heads, tokens.prefix
    half = kernel_size // 2
    mass = torch.zeros(heads, kernel_size, kernel_size, dtype=torch.float64, device=tokens.inputs.device)
    on_prefix = mass.new_zeros(heads, before)
    for block in tokens.blocks(kernel_size):
        rows = block.by_head()[0][:, :, before:].double()
        share = len(block.inputs) / len(tokens.inputs)
        on_prefix += share * rows[..., :before].mean((0, 2))
        for down, right in product(range(-half, half + 1), repeat=2):
            taken = at_shift(rows[..., before:], tokens.grid, (down, right))
            if taken.shape[-1]:  # a kernel may be larger than the image
                mass[:, down + half, right + half] += share * taken.mean((0, 2))
    rest = (1 - mass.sum((1, 2)) - on_prefix.sum(1)).clamp_min(0.0)
    return mass.to(tokens.inputs.dtype), torch.cat((mass.flatten(1), rest[:, None], on_prefix), 1)


def _regressors(values: Tensor, profile: Tensor, tokens: LayerTokens) -> Float[Tensor, "b h n d z"]:
    """R of the module's formula, at the image's tokens."""
    size, (height, width) = profile.shape[-1], tokens.grid
    before, image = values[:, :, : tokens.prefix], values[:, :, tokens.prefix :]
    lattice = image.transpose(2, 3).unflatten(-1, tokens.grid)  # (b, h, d, height, width)
    padded = F.pad(lattice, (size // 2,) * 4)
    ratio = border_ratio(profile, tokens.grid)[:, None]
    shifted = [
        (padded[..., down : down + height, right : right + width] * ratio).flatten(-2).transpose(2, 3)
        for down in range(size)
        for right in range(size)
    ]
    constant = [image.mean(2, keepdim=True), *(before[:, :, token : token + 1] for token in range(tokens.prefix))]
    return torch.stack([*shifted, *(part.expand_as(image) for part in constant)], -1)
