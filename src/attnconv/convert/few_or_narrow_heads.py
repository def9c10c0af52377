"""Factor merged weights W_h into products W_val,h W_out,h through D_h channels.

A product has rank at most D_h, so it is exact if D_h is at least the rank of W_h, and ceil(rank / D_h) heads per shift
are exact for any D_h. Otherwise the best factors depend on the measure:

    without images   sum_h || W_h - W'_h ||^2                      each head's truncated singular value decomposition
    with images      E || sum_h Y_h W_h - sum_h Y_h W'_h ||^2      with the mixed pixels Y_h = A_h X

The second is a reduced-rank regression. Heads are updated in turn, so the error never rises: for one head with the
others fixed the solution is W'_h = C^-1/2 trunc(C^1/2 B), with C = E[Y_h^T Y_h] and the least-squares weights B.
"""

import copy
import math
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import check_dense, whole
from attnconv.layers.checks import check_finite
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators.base import score_dtype

_ROUNDS = 20  # updates of all heads, at most
_GAIN = 1e-4  # relative improvement of the error below which they stop
_CUT = 1e-12  # eigenvalues of a covariance up to this part of the largest count as zero
_BLOCK = 2**24  # numbers of mixed pixels held at once


def head_ranks(layer: SelfAttention) -> list[int]:
    """Return the rank of each W_h, to the precision of its dtype: with this D_h `low_rank` is exact.

    Raises:
        ValueError: The layer has factored weights, or groups.
    """
    weight = _merged(layer).detach()
    return [int(rank) for rank in torch.linalg.matrix_rank(weight.to(score_dtype(weight.dtype))).tolist()]


def low_rank(
    layer: SelfAttention,
    head_channels: int,
    *,
    images: Float[Tensor, "b c *sizes"] | None = None,
    exact: bool = False,
) -> SelfAttention:
    """Return a copy of a layer with the best factored weights of a given head width. See `low_rank_error`.

    Args:
        layer: A layer with merged weights and one group.
        head_channels: D_h, the width of each head's values, at least 1.
        images: None to minimise the error of the weights; or images on which to minimise the error of the outputs.
        exact: Use ceil(rank W_h / D_h) heads per shift. Needs an encoding whose heads can be repeated.

    Raises:
        TypeError: `layer` is no attention layer, or `images` are no dense tensor of floating-point numbers.
        ValueError: A layer on the meta device or with NaN, weights that are factored already, groups, a head width
            below 1, images of other axes or together with `exact`, or heads that cannot be repeated.

    Example:
        >>> from attnconv import from_conv
        >>> layer, x = from_conv(torch.nn.Conv2d(4, 6, 3)), torch.randn(2, 4, 7, 7)
        >>> low_rank_error(layer, low_rank(layer, 4), x) < 1e-5  # no W_h has a higher rank
        True
    """
    weight = _merged(layer).detach().double()
    width = whole("head_channels", head_channels, 1)
    check_finite(layer.named_parameters())
    if images is not None:
        check_dense(images, least=1, dims=layer.dims)
        if not bool(images.isfinite().all()):
            raise ValueError(bad("images", "must be finite", "NaN or infinite values"))
        if exact:
            raise ValueError(bad("images", "must be None with exact=True, which loses nothing", tuple(images.shape)))
    with torch.no_grad():
        if not exact:
            best = weight if images is None else _Regression(layer, images).fit(weight, width)
            return _with_factors(copy.deepcopy(layer), *_factors(best, width))
        # Each head as many times as its rank needs, each time with the next singular directions.
        counts = [max(-(-rank // width), 1) for rank in head_ranks(layer)]
        heads = [head for head, count in enumerate(counts) for _ in range(count)]
        parts = [part for count in counts for part in range(count)]
        value, output = _factors(weight, width * max(counts))
        made = copy.deepcopy(layer)
        made.encoding = layer.encoding.select_heads(heads)
        made.heads = len(heads)
        return _with_factors(
            made, value.unflatten(2, (-1, width))[heads, :, parts], output.unflatten(1, (-1, width))[heads, parts]
        )


def low_rank_error(layer: SelfAttention, factored: SelfAttention, images: Float[Tensor, "b c *sizes"]) -> float:
    """Return the relative root-mean-square difference of the outputs on images, without biases.

    sqrt( E || out - out' ||^2 / E || out - b ||^2 )
    """
    with torch.no_grad():
        expected = layer(images).double()
        apart = (factored(images).double() - expected).square().sum()
        if layer.bias is not None:
            expected = expected - layer.bias.double().reshape(-1, *(1,) * layer.dims)
        size = expected.square().sum()
        return float((apart / size).sqrt()) if float(size) > 0 else 0.0


@final
class _Regression:
    """Fits weights to the outputs of a layer, by the covariance of mixed pixels over images and queries."""

    def __init__(self, layer: SelfAttention, images: Tensor) -> None:
        heads, channels = layer.heads, layer.in_channels
        total = images.new_zeros((heads * channels, heads * channels), dtype=torch.float64)
        for part in images.split(max(_BLOCK // (heads * channels * math.prod(images.shape[2:])), 1)):
            pixels = part.movedim(1, -1)[:, None].expand(-1, heads, *(-1,) * (part.dim() - 1))
            mixed = layer.operator(part).apply(pixels).flatten(2, -2)  # (b, h, n, c)
            flat = mixed.permute(0, 2, 1, 3).flatten(0, 1).flatten(1).double()
            total += flat.mT @ flat
        self.covariance = total.reshape(heads, channels, heads, channels)  # E[Y^T Y], up to a factor
        values, vectors = torch.linalg.eigh(torch.stack([self.covariance[h, :, h] for h in range(heads)]))
        kept = values > _CUT * values[:, -1:].clamp_min(0)
        roots = torch.where(kept, values, 1).sqrt()
        self._root = torch.where(kept, roots, 0)[:, :, None] * vectors.mT  # (h, c, c): C^1/2 up to a rotation
        self._inverse = vectors * torch.where(kept, 1 / roots, 0)[:, None]

    def fit(self, weight: Float[Tensor, "h c d"], rank: int) -> Float[Tensor, "h c d"]:
        """The W' of a rank, updated one head after the other."""
        found = torch.stack([self._truncated(h, weight[h], rank) for h in range(weight.shape[0])])
        error = self._error(weight - found)
        for _ in range(_ROUNDS):
            for h in range(weight.shape[0]):
                lost = weight - found
                lost[h] = 0
                owed = torch.einsum("cgi,gid->cd", self.covariance[h], lost)  # error of the others, for this one to fix
                found[h] = self._truncated(h, weight[h] + self._inverse[h] @ (self._inverse[h].mT @ owed), rank)
            before, error = error, self._error(weight - found)
            if before - error <= _GAIN * before:
                break
        return found

    def _truncated(self, head: int, matrix: Tensor, rank: int) -> Tensor:
        left, values, right = torch.linalg.svd(self._root[head] @ matrix, full_matrices=False)
        return self._inverse[head] @ (left[:, :rank] * values[:rank] @ right[:rank])

    def _error(self, lost: Float[Tensor, "h c d"]) -> float:
        return float(torch.einsum("hcd,hcgi,gid->", lost, self.covariance, lost))


def _merged(layer: Any) -> nn.Parameter:
    if not isinstance(layer, SelfAttention):
        raise TypeError(bad("layer", "must be an attention layer", type(layer).__name__))
    if next(layer.parameters()).is_meta:
        raise ValueError(bad("layer", "must have its weights", "a layer on the meta device"))
    if layer.weight is None:
        raise ValueError(bad("layer", "must have merged weights", "factored ones"))
    if layer.groups > 1:
        raise ValueError(bad("layer", "must have one group: factored weights have no others", layer.groups))
    return layer.weight


def _factors(weight: Float[Tensor, "h c d"], rank: int) -> tuple[Float[Tensor, "h c e"], Float[Tensor, "h e d"]]:
    """The best products through `rank` channels, with equal norms of both factors, padded with zeros."""
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    roots = values[:, :rank].sqrt()
    missing = rank - roots.shape[1]
    value, output = left[:, :, :rank] * roots[:, None], roots[:, :, None] * right[:, :rank]
    return F.pad(value, (0, missing)), F.pad(output, (0, 0, 0, missing))


def _with_factors(layer: SelfAttention, value: Tensor, output: Tensor) -> SelfAttention:
    """Put factors in place of the merged weights."""
    weight = _merged(layer)
    layer.weight = None
    layer.value_weight = nn.Parameter(value.to(weight), weight.requires_grad)
    layer.output_weight = nn.Parameter(output.to(weight), weight.requires_grad)
    layer.unplan()
    return layer
