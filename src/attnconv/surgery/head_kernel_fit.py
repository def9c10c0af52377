"""Kernels fitted to heads: the fixed mixing of values that comes nearest to what a head does on given images.

Per head, with the regressors of `partly_convolved_attention` (values at the K x K shifts times r, their mean over the
image or window, values of class tokens), coefficients z = (w, g, u) and the head's own mixed values y,

    least_squares    min_z  sum_{images, q, channels} |y - R z|^2 + t |z - z0|^2,    t = 1e-4 tr(R^T R) / len(z)
    mean             z0: the mean attention per shift, over the queries that can read it, and per class token; what is
                     left of 1 goes evenly to the image, and where the shifts come to more, all are scaled down

The small t decides where values do not: on images without contrast every kernel of the same sum does the same.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, final

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from attnconv.inspect.module_adapters import AttentionParts, attention_parts
from attnconv.inspect.score_modifiers import ScoreTerms
from attnconv.surgery.partly_convolved_attention import HeadMixing
from attnconv.surgery.window_taps import Taps

Fit: TypeAlias = Literal["least_squares", "mean"]
RIDGE = 1e-4  # of the mean diagonal entry of R^T R
BLOCK = 2**25  # numbers of regressors held at once


@final
@dataclass(frozen=True, eq=False)
class LayerTokens:
    """What one attention module was given, and where its tokens stand.

    Attributes:
        attention: A module that `attention_parts` takes.
        inputs: Its input, (sequences, tokens, c). Those of one image follow one another.
        grid: Tokens of the image or, where an image is cut, of a window, (height, width).
        prefix: Tokens before them.
        terms: What it was given beside; of one image, or the same for all sequences.
        sequences: How many one image has.
    """

    attention: nn.Module
    inputs: Float[Tensor, "b n c"]
    grid: tuple[int, int]
    prefix: int
    terms: ScoreTerms = field(default_factory=ScoreTerms)
    sequences: int = 1

    @property
    def parts(self) -> AttentionParts:
        """Where the module's weights are."""
        return attention_parts(self.attention)

    def of(self, images: slice) -> "LayerTokens":
        """The same for some of the images."""
        chosen = self.inputs.unflatten(0, (-1, self.sequences))[images].flatten(0, 1)
        return replace(self, inputs=chosen)

    def by_head(self) -> tuple[Tensor, Tensor]:
        """Attention (b, h, n, n) and values (b, h, n, d) of all heads."""
        return self.parts.maps_and_values(self.inputs, self.terms)

    def taps(self, kernel_size: int) -> Taps:
        """The shifts that a kernel reads."""
        taps = Taps.of(self.grid, kernel_size, self.inputs)
        allowed = self.terms.allowed()
        return taps.masked(allowed) if allowed is not None and self.terms.blocks() else taps

    def blocks(self, kernel_size: int) -> Iterator["LayerTokens"]:
        """A few images at a time."""
        parts = self.parts
        count, tokens, _ = self.inputs.shape
        wide = (kernel_size**2 + 1 + self.prefix) * parts.head_dim
        step = max(1, BLOCK // (parts.heads * self.sequences * tokens * max(tokens, wide)))
        for start in range(0, count // self.sequences, step):
            yield self.of(slice(start, start + step))


@torch.no_grad()
def fit_mixing(tokens: LayerTokens, kernel_size: int = 3, *, fit: Fit = "least_squares") -> HeadMixing:
    """The fixed mixings of all heads of a layer; see the module's formulas.

    Args:
        tokens: The layer and its inputs.
        kernel_size: K, odd.
        fit: Which of the two.
    """
    shifts, taps = tokens.taps(kernel_size), kernel_size**2
    profile, start = _mean_maps(tokens, shifts)
    if fit == "least_squares":
        gram, moment = start.new_zeros(*start.shape, start.shape[1]), torch.zeros_like(start)
        for block in tokens.blocks(kernel_size):
            rows, values = block.by_head()
            regressors = _regressors(values, profile, block, shifts).double()
            target = (rows[:, :, block.prefix :] @ values).double()
            gram += torch.einsum("bhndi,bhndj->hij", regressors, regressors)
            moment += torch.einsum("bhndi,bhnd->hi", regressors, target)
        size = gram.diagonal(dim1=1, dim2=2).mean(1)[:, None]
        ridge = RIDGE * size.where(size > 0, 1.0)  # a head whose values are zero keeps its start
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
    shifts = tokens.taps(mixing.kernel.shape[-1])
    for block in tokens.blocks(mixing.kernel.shape[-1]):
        rows, values = block.by_head()
        given.append(rows[:, :, block.prefix :] @ values)
        missing.append(_mixed(block, values, mixing, shifts) - given[-1])
    return torch.cat(missing), torch.cat(given)


@torch.no_grad()
def layer_error(tokens: LayerTokens, mixing: HeadMixing, heads: Sequence[int]) -> float:
    """|new - old| / |old| of a layer's output with some heads replaced.

    Args:
        tokens: The layer and its inputs. Tokens before the image's keep their output.
        mixing: Of all its heads.
        heads: Those that are replaced.
    """
    parts, chosen, shifts = tokens.parts, list(heads), tokens.taps(mixing.kernel.shape[-1])
    change, size = 0.0, 0.0
    for block in tokens.blocks(mixing.kernel.shape[-1]):
        rows, values = block.by_head()
        given = rows @ values
        old = parts.finish(given)
        given[:, chosen, block.prefix :] = _mixed(block, values, mixing, shifts)[:, chosen]
        change += float((parts.finish(given) - old).square().sum())
        size += float(old.square().sum())
    return float(relative_size(torch.tensor(change), torch.tensor(size))) ** 0.5


def relative_size(change: Float[Tensor, "*b"], size: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """change / size, 0 where nothing changes: layers and heads may give nothing but zeros.

    Args:
        change: Not negative.
        size: The same.

    Example:
        >>> relative_size(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0])).tolist()
        [0.5, 0.0]
    """
    return (change / size).where(change > 0, 0.0)


def chosen_heads(mixing: HeadMixing, heads: Sequence[int]) -> HeadMixing:
    """The part of some heads."""
    some = list(heads)
    return HeadMixing(mixing.kernel[some], mixing.profile[some], mixing.rest[some], mixing.prefix[some])


def _mean_maps(tokens: LayerTokens, shifts: Taps) -> tuple[Float[Tensor, "h K K"], Float64[Tensor, "h z"]]:
    """Mean attention per shift, and z0; over the queries that may read the shift."""
    heads, before = tokens.parts.heads, tokens.prefix
    inside = shifts.inside.double()  # (w, taps, n)
    queries = inside.sum((0, 2)) * len(tokens.inputs) / len(inside)
    mass = inside.new_zeros(heads, len(queries))
    on_prefix = inside.new_zeros(heads, before)
    keys = shifts.index.T + before - 1  # (n, taps)
    for block in tokens.blocks(math.isqrt(len(queries))):
        rows = block.by_head()[0][:, :, before:].double()
        share = len(block.inputs) / len(tokens.inputs)
        on_prefix += share * rows[..., :before].mean((0, 2))
        taken = rows.gather(3, keys.clamp_min(0).expand(*rows.shape[:2], -1, -1))
        taken = taken.unflatten(0, (-1, len(inside))) * inside.transpose(1, 2)[:, None]
        mass += taken.sum((0, 1, 3))
    mass = mass / queries.clamp_min(1.0)  # a kernel may be larger than the image
    profile = mass.unflatten(1, (math.isqrt(len(queries)), -1)).to(tokens.inputs.dtype)
    # Few queries can read far shifts; their means come to more than all attention where the image is small.
    mass = mass * ((1 - on_prefix.sum(1)) / mass.sum(1).clamp_min(1e-30)).clamp_max(1.0)[:, None]
    rest = (1 - mass.sum(1) - on_prefix.sum(1)).clamp_min(0.0)
    return profile, torch.cat((mass, rest[:, None], on_prefix), 1)


def _mixed(tokens: LayerTokens, values: Tensor, mixing: HeadMixing, shifts: Taps) -> Float[Tensor, "b h n d"]:
    """R z of the module's formula, at the image's tokens."""
    weights = torch.cat((mixing.kernel.flatten(1), mixing.rest[:, None], mixing.prefix), 1)
    return torch.einsum("bhndi,hi->bhnd", _regressors(values, mixing.profile, tokens, shifts), weights)


def _regressors(values: Tensor, profile: Tensor, tokens: LayerTokens, shifts: Taps) -> Float[Tensor, "b h n d z"]:
    """R of the module's formula, at the image's tokens."""
    image = values[:, :, tokens.prefix :]
    before = (values[:, :, token : token + 1].expand_as(image) for token in range(tokens.prefix))
    return torch.stack([*shifts.columns(image, profile), *before], -1)
