"""Heads of few channels: merged weights W_h as products W_val,h W_out,h through D_h numbers.

A product has rank at most D_h, so it is exact where D_h is at least the rank of W_h; min(D_in, D_out) always suffices,
and ceil(rank / D_h) heads per shift are exact for any D_h. Below that something is lost, and what is best depends on
what counts:

    without images   sum_h || W_h - W'_h ||^2                      each head's truncated singular value decomposition
    with images      E || sum_h Y_h W_h - sum_h Y_h W'_h ||^2      with the mixed pixels Y_h = A_h X that heads hand on

The second is a reduced-rank regression. For one head with the others fixed it has a closed form: the least-squares
weights B, whitened by C = E[Y_h^T Y_h], truncated, and unwhitened, W'_h = C^-1/2 trunc(C^1/2 B). Heads take turns, so
that the error never rises.
"""

import copy
import math
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.input_checks import check_dense
from attnconv._util.value_checks import whole
from attnconv.encodings.base import Encoding
from attnconv.layers.checks import check_finite
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators.base import score_dtype

_ROUNDS = 20  # turns of all heads, at most
_GAIN = 1e-4  # relative improvement of the error below which they stop
_CUT = 1e-12  # eigenvalues of a covariance up to this part of the largest count as zero
_BLOCK = 2**24  # numbers of mixed pixels held at once


def head_ranks(layer: SelfAttention) -> list[int]:
    """Rank of each head's matrix W_h, to the precision of its dtype: the D_h at which `low_rank` loses nothing.

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
    """A layer with factored weights W_val,h W_out,h in place of merged ones, as near as its head width allows.

    Args:
        layer: A layer with merged weights and one group.
        head_channels: D_h, the width of each head's values, at least 1.
        images: None to come nearest in the weights; or images over which the outputs shall be nearest.
        exact: Use as many heads per shift, ceil(rank W_h / D_h), as make it exact. Needs `Quadratic` or
            `GeneralizedQuadratic` heads, which can stand beside one another.

    Returns:
        A layer of the same class, geometry, border rule, dtype and mode. `low_rank_error` says what was lost.

    Raises:
        TypeError: `layer` is no attention layer, or `images` are no dense tensor of floating-point numbers.
        ValueError: A layer on the meta device or with NaN, weights that are factored already, groups, a head width
            below 1, images of other axes or together with `exact`, or heads that cannot be repeated.

    Example:
        >>> import torch
        >>> from attnconv import from_conv
        >>> layer = from_conv(torch.nn.Conv2d(4, 6, 3, dtype=torch.float64))
        >>> x = torch.randn(2, 4, 7, 7, dtype=torch.float64)
        >>> low_rank_error(layer, low_rank(layer, 4), x) < 1e-14  # rank 4 is all there is
        True
        >>> narrow = low_rank(layer, 2, exact=True)
        >>> narrow.heads, low_rank_error(layer, narrow, x) < 1e-14
        (18, True)
    """
    weight = _merged(layer).detach().double()
    head_channels = whole("head_channels", head_channels, 1)
    check_finite(layer.named_parameters())
    if images is not None:
        check_dense(images, least=1, dims=layer.dims)
        if not bool(images.isfinite().all()):
            raise ValueError(bad("images", "must be finite", "NaN or infinite values"))
    if exact and images is not None:
        raise ValueError(bad("images", "are of no use beside exact=True, which loses nothing", tuple(images.shape)))
    with torch.no_grad():
        if exact:
            return _split(layer, weight, head_channels)
        if images is None:
            pairs = [_halves(matrix, head_channels) for matrix in weight]
        else:
            pairs = [
                _halves(matrix, head_channels) for matrix in _Regression.of(layer, images).fit(weight, head_channels)
            ]
        return _rebuilt(layer, copy.deepcopy(layer.encoding), pairs)


def low_rank_error(layer: SelfAttention, factored: SelfAttention, images: Float[Tensor, "b c *sizes"]) -> float:
    """Relative root-mean-square difference of the outputs on images, biases left out.

    sqrt( E || out - out' ||^2 / E || out - b ||^2 )
    """
    with torch.no_grad():
        expected = layer(images).double()
        apart = (factored(images).double() - expected).square().sum()
        if layer.bias is not None:
            expected = expected - layer.bias.double().reshape(-1, *(1,) * layer.dims)
        whole = expected.square().sum()
        return float((apart / whole).sqrt()) if float(whole) > 0 else 0.0


@final
class _Regression:
    """Weights judged by the outputs they make of the mixed pixels of all heads."""

    def __init__(self, covariance: Float[Tensor, "h c h c"]) -> None:
        self.covariance = covariance
        values, vectors = torch.linalg.eigh(torch.stack([covariance[h, :, h] for h in range(covariance.shape[0])]))
        kept = values > _CUT * values[:, -1:].clamp_min(0)
        roots = torch.where(kept, values, 1).sqrt()
        self._root = torch.where(kept, roots, 0)[:, :, None] * vectors.mT  # (h, c, c): C^1/2 up to a rotation
        self._inverse = vectors * torch.where(kept, 1 / roots, 0)[:, None]

    @staticmethod
    def of(layer: SelfAttention, images: Tensor) -> "_Regression":
        """From the covariance of the pixels that the heads mix, over images and queries."""
        heads, channels = layer.heads, layer.in_channels
        total = images.new_zeros((heads * channels, heads * channels), dtype=torch.float64)
        size = max(_BLOCK // (heads * channels * math.prod(images.shape[2:])), 1)
        for part in images.split(size):
            pixels = part.movedim(1, -1)[:, None].expand(-1, heads, *(-1,) * (part.dim() - 1))
            mixed = layer.operator(part).apply(pixels).flatten(2, -2)  # (b, h, n, c)
            flat = mixed.permute(0, 2, 1, 3).flatten(0, 1).flatten(1).double()
            total += flat.mT @ flat
        return _Regression(total.reshape(heads, channels, heads, channels))

    def fit(self, weight: Float[Tensor, "h c d"], rank: int) -> Float[Tensor, "h c d"]:
        """Matrices of a rank that keep the outputs: one head after the other, until nothing is gained."""
        found = torch.stack([self._truncated(h, weight[h], rank) for h in range(weight.shape[0])])
        error = self._error(weight - found)
        for _ in range(_ROUNDS):
            for h in range(weight.shape[0]):
                lost = weight - found
                lost[h] = 0
                owed = torch.einsum(
                    "cgi,gid->cd", self.covariance[h], lost
                )  # what the others leave for this one to mend
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


def _halves(matrix: Float[Tensor, "c d"], rank: int) -> tuple[Float[Tensor, "c e"], Float[Tensor, "e d"]]:
    """The best product through `rank` numbers, its size shared by both factors, filled up with zeros."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    roots = values[:rank].sqrt()
    value, output = left[:, :rank] * roots, roots[:, None] * right[:rank]
    missing = rank - roots.shape[0]
    return nn.functional.pad(value, (0, missing)), nn.functional.pad(output, (0, 0, 0, missing))


def _split(layer: SelfAttention, weight: Float[Tensor, "h c d"], width: int) -> SelfAttention:
    """Each head as many times as its rank needs, each time with the next singular directions."""
    places: list[int] = []
    pairs: list[tuple[Tensor, Tensor]] = []
    for head, (matrix, rank) in enumerate(zip(weight, head_ranks(layer), strict=True)):
        value, output = _halves(matrix, max(rank, 1))
        for start in range(0, value.shape[1], width):
            missing = max(start + width - value.shape[1], 0)
            places.append(head)
            pairs.append(
                (
                    nn.functional.pad(value[:, start : start + width], (0, missing)),
                    nn.functional.pad(output[start : start + width], (0, 0, 0, missing)),
                )
            )
    return _rebuilt(layer, layer.encoding.select_heads(places), pairs)


def _rebuilt(layer: SelfAttention, encoding: Encoding, pairs: list[tuple[Tensor, Tensor]]) -> SelfAttention:
    """A layer like another, with other heads and factored weights."""
    weight = _merged(layer)
    made = type(layer)(
        layer.in_channels,
        layer.out_channels,
        encoding.heads,
        encoding=encoding,
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        border=layer.border,
        window=layer.window,
        bias=layer.bias is not None,
        transposed=layer.transposed,
        output_padding=layer.output_padding,
        head_channels=pairs[0][0].shape[1],
        attention_dropout=layer.attention_dropout,
        backend=layer.backend,
        device=weight.device,
        dtype=weight.dtype,
    )
    assert made.value_weight is not None
    assert made.output_weight is not None
    made.value_weight.copy_(torch.stack([value for value, _ in pairs]))
    made.output_weight.copy_(torch.stack([output for _, output in pairs]))
    for parameter in (made.value_weight, made.output_weight):
        parameter.requires_grad_(weight.requires_grad)
    if made.bias is not None and layer.bias is not None:
        made.bias.copy_(layer.bias)
        made.bias.requires_grad_(layer.bias.requires_grad)
    return made.train(layer.training)
