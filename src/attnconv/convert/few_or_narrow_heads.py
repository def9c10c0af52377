"""Approximation of layers with narrow heads, and of convolutions with fewer heads than kernel positions.

Narrow heads have factored weights W_val,h W_out,h with D_h channels instead of W_h. The product has rank at most D_h.
It is exact if D_h is at least the rank of W_h; smaller D_h are exact with ceil(rank / D_h) heads per shift. Otherwise,
the truncated singular value decomposition of W_h is its best approximation.

If there are few heads, Gaussian heads are placed where they best approximate the convolution. Let Phi[s, h] be the
attention of head h to shift s on an unbounded grid, and T[s] the matrix of the convolution, which is zero except at its
taps. The layer computes Phi W instead of T. For given centres and widths, the best W solve a least-squares problem, and
their error depends on the kernel only through the small Gram matrix G of its taps (variable projection):

    min_W || T - Phi W ||^2 = tr G - tr( Phi_J (Phi^T Phi)^-1 Phi_J^T G ),        Phi_J: the rows of Phi at the taps

The search minimises this over centres and widths by L-BFGS from several starts.
"""

import copy
import math
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import whole
from attnconv.convert.layer_conversion import layer_for
from attnconv.encodings.quadratic import Quadratic
from attnconv.layers.checks import check_finite
from attnconv.layers.self_attention import SelfAttention
from attnconv.operators.base import score_dtype
from attnconv.theory.conv_taps import Forward, check_convolution, head_weights, taps

_BLUNTEST, _SHARPEST = 0.02, 40.0  # bounds of alpha, in 1 / position^2
_BEYOND = 8  # margin around the taps for the fit of few heads, in positions
_RIDGE = 1e-10  # added to the diagonal of Phi^T Phi, which is singular if heads are identical
_STEPS = 200


def head_ranks(layer: SelfAttention) -> list[int]:
    """Return the numerical rank of each head's W_h; `low_rank` is exact if `head_channels` is at least the largest one.

    Raises:
        TypeError: If `layer` is not an attention layer.
        ValueError: If the layer has factored weights or several groups, or is on the meta device.
    """
    weight = _merged(layer).detach()
    return [int(rank) for rank in torch.linalg.matrix_rank(weight.to(score_dtype(weight.dtype))).tolist()]


def low_rank(layer: SelfAttention, head_channels: int, *, exact: bool = False) -> SelfAttention:
    """Return a copy of a layer in which factored weights replace, and best approximate, the merged weights.

    Args:
        layer: A layer with merged weights and one group.
        head_channels: D_h, the number of channels of each head's values, at least 1; see also `low_rank_error`.
        exact: Repeat each head ceil(rank W_h / D_h) times for exact weights. The encoding must declare `by_head`.

    Raises:
        TypeError: If `layer` is not an attention layer.
        ValueError: If the layer is on the meta device, contains NaN or infinity, or has factored weights or several
            groups; if `head_channels` is below 1; or if `exact` is true and the encoding's `by_head` is None.

    Example:
        >>> from attnconv import from_conv
        >>> layer, x = from_conv(torch.nn.Conv2d(4, 6, 3)), torch.randn(2, 4, 7, 7)
        >>> low_rank_error(layer, low_rank(layer, 4), x) < 1e-5  # no W_h has a higher rank
        True
    """
    weight, width = _merged(layer), whole("head_channels", head_channels, 1)
    check_finite(layer.named_parameters())
    made = copy.deepcopy(layer)
    with torch.no_grad():
        # Use each head once, or as often as its rank requires, each time with the next singular vectors.
        counts = [max(-(-rank // width), 1) for rank in head_ranks(layer)] if exact else [1] * layer.heads
        heads = [head for head, count in enumerate(counts) for _ in range(count)]
        parts = [part for count in counts for part in range(count)]
        if exact:
            made.encoding = layer.encoding.select_heads(heads)
            made.heads = len(heads)
        left, values, right = torch.linalg.svd(weight.double(), full_matrices=False)
        roots, missing = values.sqrt(), width * max(counts) - values.shape[1]  # a negative pad truncates
        value = F.pad(left * roots[:, None], (0, missing)).unflatten(2, (-1, width))[heads, :, parts]
        output = F.pad(roots[:, :, None] * right, (0, 0, 0, missing)).unflatten(1, (-1, width))[heads, parts]
        made.weight = None
        made.value_weight = nn.Parameter(value.to(weight), weight.requires_grad)
        made.output_weight = nn.Parameter(output.to(weight), weight.requires_grad)
    made.unplan()
    return made


def low_rank_error(layer: SelfAttention, factored: SelfAttention, images: Float[Tensor, "b c *sizes"]) -> float:
    """Return the root-mean-square difference between two layers' outputs, relative to `layer`'s output without bias.

    sqrt( E ||out - out'||^2 / E ||out - b||^2 )   for outputs out and out', the mean E over images and queries, bias b

    Raises:
        ValueError: If the images do not have the layers' number of channels.
    """
    with torch.no_grad():
        expected = layer(images).double()
        apart = (factored(images).double() - expected).square().sum()
        if layer.bias is not None:
            expected = expected - layer.bias.double().reshape(-1, *(1,) * layer.dims)
        size = expected.square().sum()
        return float((apart / size).sqrt()) if float(apart) != 0 else 0.0


def _merged(layer: Any) -> nn.Parameter:
    if not isinstance(layer, SelfAttention):
        raise TypeError(bad("layer", "must be an attention layer", type(layer).__name__))
    if next(layer.parameters()).is_meta:
        raise ValueError(bad("layer", "must have materialised weights", "a layer on the meta device"))
    if layer.weight is None:
        raise ValueError(bad("layer", "must have merged weights", "factored weights", "Omit head_channels."))
    if layer.groups > 1:
        raise ValueError(bad("layer", "must have a single group", layer.groups))
    return layer.weight


def place_heads(
    conv: Forward, heads: int, *, diagonal: bool = False, restarts: int = 8, seed: int = 0
) -> SelfAttention:
    """Return a layer with few Gaussian heads, placed to approximate a convolution away from the border.

    Its error is at most that of hard heads at the taps with the largest weights. See also `imitation_error`.

    Args:
        conv: nn.Conv1d, nn.Conv2d or nn.Conv3d.
        heads: Number of heads, less than the number of kernel positions.
        diagonal: Fit one width per axis in each head instead of one per head.
        restarts: Number of random starting points of the search, at least 0, besides the taps with the largest weights.
        seed: Seed of the random starts.

    Raises:
        TypeError: If `conv` is not a convolution, or is a transposed one.
        ValueError: If `heads` is not between 1 and the number of kernel positions minus 1 (with one head per position,
            `from_conv` is exact), or `conv` is on the meta device.

    Example:
        >>> blur = torch.nn.Conv1d(1, 1, 7, padding=3)
        >>> _ = blur.weight.data.copy_(torch.exp(-0.7 * torch.arange(-3.0, 4).square()))
        >>> round(place_heads(blur, 1).encoding.alpha.item(), 2)  # one head computes a Gaussian blur
        0.7
    """
    check_convolution(conv)
    if not isinstance(conv, Forward):
        raise TypeError(bad("conv", "must be an nn.Conv1d, nn.Conv2d or nn.Conv3d", type(conv).__name__))
    if conv.weight.is_meta:
        raise ValueError(bad("conv", "must have materialised weights", "a convolution on the meta device"))
    heads, restarts, seed = whole("heads", heads, 1), whole("restarts", restarts, 0), whole("seed", seed, 0)
    positions = math.prod(conv.kernel_size)
    if heads >= positions:
        fix = "Use from_conv for an exact layer with one head per kernel position."
        raise ValueError(bad("heads", f"must be between 1 and {positions - 1}", heads, fix))
    with torch.no_grad(), torch.device("cpu"):
        shifts = torch.tensor(taps(conv), dtype=torch.float64)
        problem = _Problem(shifts, head_weights(conv).detach().double().cpu(), diagonal=diagonal)
        found = problem.solve(heads, restarts=restarts, generator=torch.Generator().manual_seed(seed))
        # Large weights that nearly cancel can lose more by rounding than the search gained.
        centres, alpha = min(found, key=lambda place: problem.rounded_error(place[0], place[1], conv.weight.dtype))
        encoding = Quadratic(heads, shifts.shape[1], diagonal=diagonal)
        encoding.centres.copy_(centres)
        encoding.spread.copy_((2 * alpha).sqrt())
        return layer_for(conv, encoding, problem.weights(centres, alpha))


@final
class _Problem:
    """Minimisation of the error of approximating a kernel, as a function of the heads' centres and alphas."""

    def __init__(self, shifts: Tensor, kernel: Float[Tensor, "j i d"], *, diagonal: bool) -> None:
        self.shifts, self.kernel = shifts, kernel
        self.widths = shifts.shape[1] if diagonal else 1
        flat = kernel.flatten(1)
        self.gram = flat @ flat.mT
        low, high = shifts.amin(0).long() - _BEYOND, shifts.amax(0).long() + _BEYOND
        self.axes = [torch.arange(int(a), int(b) + 1, dtype=shifts.dtype) for a, b in zip(low, high, strict=True)]
        self.places = torch.zeros(len(shifts), dtype=torch.long)  # indices of the taps among all shifts, row-major
        for dim, axis in enumerate(self.axes):
            self.places = self.places * len(axis) + (shifts[:, dim].long() - low[dim])

    def attention(self, centres: Tensor, alpha: Tensor) -> Float[Tensor, "s h"]:
        """Return Phi, the softmax over all shifts, as a product over axes."""
        rows = centres.new_ones(len(centres), 1)
        for dim, axis in enumerate(self.axes):
            scores = -alpha[:, dim % self.widths, None] * (axis - centres[:, dim, None]).square()
            rows = (rows[..., None] * torch.softmax(scores, -1)[:, None]).flatten(1)
        return rows.mT

    def error(self, centres: Tensor, alpha: Tensor) -> Tensor:
        """Return the squared error of the best weights, relative to the squared norm of the kernel."""
        phi = self.attention(centres, alpha)
        factor = torch.linalg.cholesky(phi.mT @ phi + _RIDGE * torch.eye(phi.shape[1], dtype=phi.dtype))
        reached = torch.linalg.solve_triangular(factor, phi[self.places].mT, upper=False)  # (h, j)
        return 1 - torch.einsum("hj,jk,hk->", reached, self.gram, reached) / self.gram.trace().clamp_min(1e-300)

    def weights(self, centres: Tensor, alpha: Tensor) -> Float[Tensor, "h i d"]:
        inverse = torch.linalg.pinv(self.attention(centres, alpha), rtol=1e-8)  # (h, s)
        return torch.einsum("hj,jid->hid", inverse[:, self.places], self.kernel)

    def rounded_error(self, centres: Tensor, alpha: Tensor, dtype: torch.dtype) -> float:
        """Return the squared error with all parameters rounded to the layer's dtype."""
        weights = self.weights(centres, alpha).to(dtype).double()
        spread = (2 * alpha).sqrt().to(dtype).double()
        left = -torch.einsum("sh,hid->sid", self.attention(centres.to(dtype).double(), spread.square() / 2), weights)
        left[self.places] += self.kernel
        error = float(left.square().sum())
        return error if math.isfinite(error) else math.inf  # weights may exceed the largest number of the dtype

    def solve(self, heads: int, *, restarts: int, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
        """Return (centres, alphas) of the best result, and of hard heads at the taps with the largest weights."""
        energy = self.gram.diagonal()
        likely = energy.clamp_min(1e-12 * float(energy.max()) + 1e-300)
        largest = self.shifts[energy.argsort(descending=True, stable=True)[:heads]]
        starts = [(largest, 3.0)]
        for _ in range(restarts):
            chosen = torch.multinomial(likely, heads, generator=generator)
            jitter = torch.randn(heads, self.shifts.shape[1], generator=generator, dtype=torch.float64) / 3
            starts.append((self._clustered(self.shifts[chosen] + jitter, energy), 1.0))
        hard = largest, torch.full((heads, self.widths), _SHARPEST, dtype=torch.float64)
        found = [hard, *(self._descend(centres, alpha) for centres, alpha in starts)]
        return [min(found, key=lambda place: float(self.error(*place))), hard]

    def _clustered(self, centres: Tensor, energy: Tensor) -> Tensor:
        """Run five rounds of k-means over the taps, weighted by their squared norms."""
        for _ in range(5):
            nearest = torch.cdist(self.shifts, centres).argmin(1)
            share = F.one_hot(nearest, len(centres)).to(energy) * energy[:, None]  # (j, h)
            mass = share.sum(0)
            moved = share.mT @ self.shifts / mass.clamp_min(1e-300)[:, None]
            centres = torch.where(mass[:, None] > 0, moved, centres)
        return centres

    def _descend(self, centres: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
        """Run L-BFGS over the centres and the logarithms of alpha, within their bounds."""
        low, high = math.log(_BLUNTEST), math.log(_SHARPEST)
        part = (math.log(alpha) - low) / (high - low)
        place = centres.clone().requires_grad_()
        width = torch.full((len(centres), self.widths), math.log(part / (1 - part)), dtype=torch.float64)
        width.requires_grad_()

        def alphas() -> Tensor:
            return torch.exp(low + (high - low) * torch.sigmoid(width))

        optimiser = torch.optim.LBFGS([place, width], max_iter=_STEPS, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimiser.zero_grad()
            loss = self.error(place, alphas())
            loss.backward()
            return loss

        with torch.enable_grad():
            optimiser.step(closure)
        return place.detach(), alphas().detach()
