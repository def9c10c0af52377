"""Quadratic encodings: each head is a Gaussian centred on a shift, equations (9), (14), (18) and (19).

    isotropic     score_h(delta) = -alpha_h |delta - Delta_h|^2,                       alpha_h = s_h^2 / 2
    diagonal      score_h(delta) = -sum_a alpha_h,a (delta_a - Delta_h,a)^2,           alpha_h,a = s_h,a^2 / 2
    generalised   score_h(delta) = -1/2 (delta - Delta_h)^T P_h (delta - Delta_h),     P_h = S_h S_h^T

Scores are computed relative to a shift d0 near the centre, which avoids overflow and cancellation in the softmax:

    |delta - Delta|^2 - |d0 - Delta|^2 = (delta - d0) . (delta + d0 - 2 Delta)
"""

import itertools
import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnconv.encodings.base import Encoding, Gaussians, JointEncoding, SeparableEncoding, gaussians_of
from attnconv.operators.base import score_dtype


@final
class Quadratic(SeparableEncoding):
    """The paper's quadratic encoding: Gaussian attention, with a centre and one or more inverse widths per head.

    Args:
        heads, dims: Number of heads and number of axes.
        diagonal: Use one inverse width per axis in each head instead of one per head.
        centre_std: Standard deviation of the initial centres, in positions. The paper states a variance of 2; its code
            uses a standard deviation of 2, which is the default here.
        spread_std: Standard deviation of the initial spreads s (inverse widths), in 1 / position; their mean is 1.

    Attributes:
        centres: Delta, the shift on which each head is centred, (h, dims), in positions.
        spread: s, the inverse standard deviation of each Gaussian, (h, 1) or (h, dims), in 1 / position.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If `heads` is below 1, or `dims` is not 1, 2 or 3.

    Example:
        >>> encoding = Quadratic(9, dims=2)
        >>> sum(p.numel() for p in encoding.parameters())
        27
    """

    undecayed = ("centres", "spread")
    by_head = ("centres", "spread")
    smooth = True

    def __init__(
        self, heads: int, dims: int = 2, *, diagonal: bool = False, centre_std: float = 2.0, spread_std: float = 0.01
    ) -> None:
        super().__init__(heads, dims)
        self.centres = nn.Parameter(torch.randn(heads, dims) * centre_std)
        self.spread = nn.Parameter(1 + torch.randn(heads, dims if diagonal else 1) * spread_std)

    @property
    def alpha(self) -> Float[Tensor, "h #dims"]:
        """Sharpness of each head, alpha = s^2 / 2, (h, 1) or (h, dims), in 1 / position^2."""
        return self.spread.to(score_dtype(self.spread.dtype)).square() / 2

    def gaussians(self) -> Gaussians:
        return Gaussians(self.centres, torch.diag_embed(self.spread.expand(self.heads, self.dims)), self.spread)

    def axis_scores(self, axis: int, shifts: Float[Tensor, "n lattice"]) -> Float[Tensor, "h n lattice"]:
        alpha = self.alpha[:, axis if self.spread.shape[1] > 1 else 0].to(shifts.dtype)[:, None, None]
        centre = self.centres[:, axis].to(shifts.dtype)[:, None, None]
        nearest = centre.detach().round().clamp(shifts[:, :1], shifts[:, -1:])  # (h, n, 1)
        return -alpha * (shifts - nearest) * (shifts + nearest - 2 * centre)


@final
class GeneralizedQuadratic(JointEncoding):
    """The paper's generalised quadratic encoding, with a full covariance matrix per head (Appendix E).

    Normalise the images: rounding errors of the gradients grow with the images' mean. In float32, the relative error of
    `root_precision.grad` can be 1e-3 for images with mean 100 and standard deviation 0.3, but only 1e-5 with mean 0.

    Args:
        heads, dims: Number of heads and number of axes.
        centre_std: Standard deviation of the initial centres, in positions.
        spread_std: Standard deviation of each entry of the initial S, in 1 / position; the mean is the identity matrix.

    Attributes:
        centres: Delta, the shift on which each head is centred, (h, dims), in positions.
        root_precision: S, (h, dims, dims), unconstrained; the precision matrix is P = S S^T, in 1 / position^2.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If `heads` is below 1, or `dims` is not 1, 2 or 3.

    Example:
        >>> encoding = GeneralizedQuadratic(9, dims=2)
        >>> sum(p.numel() for p in encoding.parameters())
        54
    """

    undecayed = ("centres", "root_precision")
    by_head = ("centres", "root_precision")

    def __init__(self, heads: int, dims: int = 2, *, centre_std: float = 2.0, spread_std: float = 0.01) -> None:
        super().__init__(heads, dims)
        self.centres = nn.Parameter(torch.randn(heads, dims) * centre_std)
        self.root_precision = nn.Parameter(torch.eye(dims) + torch.randn(heads, dims, dims) * spread_std)

    def gaussians(self) -> Gaussians:
        return Gaussians(self.centres, self.root_precision, self.root_precision)

    def scores(self, shifts: Float[Tensor, "*shifts dims"]) -> Float[Tensor, "h *shifts"]:
        flat, root = shifts.flatten(0, -2), self.root_precision.to(shifts.dtype)
        centres = self.centres.to(shifts.dtype)[:, None]
        near = centres.detach().round().clamp(flat.amin(0), flat.amax(0))  # (h, 1, dims)
        left = (flat - near) @ root  # (h, points, dims): S^T (delta - d0)
        right = (flat + near - 2 * centres) @ root
        return (-0.5 * (left * right).sum(-1)).unflatten(1, shifts.shape[:-1])


def start_at_neighbours(encoding: Encoding) -> None:
    """Move the centres of Gaussian heads to the shifts nearest to 0 and double the spreads, in place.

    In 2-D, a head with spread (inverse width) 2 gives 62 % of its attention to the key at its centre; with 1, 16 %.
    """
    found = gaussians_of(encoding, "encoding")
    with torch.no_grad():
        found.centres.copy_(torch.tensor(nearest_shifts(encoding.heads, encoding.dims)))
        found.spread.mul_(2)


def nearest_shifts(count: int, dims: int) -> list[tuple[int, ...]]:
    """Return the `count` shifts along `dims` axes nearest to 0, sorted by length, with ties in row-major order."""
    # A ball of this radius contains more than `count` points, and the box contains the ball.
    radius = range(-math.ceil(count ** (1 / dims)), math.ceil(count ** (1 / dims)) + 1)
    box = itertools.product(radius, repeat=dims)
    return sorted(box, key=lambda shift: (sum(step * step for step in shift), shift))[:count]
