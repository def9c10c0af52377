"""Heads that are Gaussians over the shift, and their mass off the nearest key: a bound on every grid that holds it.

With the centre f from that key, |f| <= 1/2, keys at distance k weigh exp(-alpha (k^2 - 2 k f)), so the nearest one gets
at least 1 / S along an axis; the second form is Poisson's formula:

    S(alpha, f) = sum_k exp(-alpha (k^2 - 2 k f))
                = exp(alpha f^2) sqrt(pi / alpha) (1 + 2 sum_{n >= 1} exp(-pi^2 n^2 / alpha) cos(2 pi n f))
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn


@final
@dataclass(frozen=True, eq=False)
class Gaussians:
    """Heads whose score is -1/2 |S_h^T (delta - Delta_h)|^2: Gaussians over the shift.

    Attributes:
        centres: Delta, (h, dims) in pixels: the parameter itself.
        root_precision: S, (h, dims, dims); the precision is P = S S^T, in 1 / pixel^2.
        spread: The parameter that S is proportional to.
    """

    centres: nn.Parameter
    root_precision: Float[Tensor, "h dims dims"]
    spread: nn.Parameter

    @property
    def precision(self) -> Float64[Tensor, "h dims dims"]:
        """P = S S^T, in float64 on the CPU."""
        root = self.root_precision.detach().cpu().double()
        return root @ root.mT

    @property
    def alpha(self) -> Float64[Tensor, "h dims"] | None:
        """Sharpness along each axis, s^2 / 2; None where a head's axes are not the image's."""
        precision = self.precision
        along = precision.diagonal(dim1=-2, dim2=-1)
        return along / 2 if bool((torch.diag_embed(along) == precision).all()) else None


def mass_off_nearest(
    alpha: Float64[Tensor, "*heads dims"], offset: Float64[Tensor, "*#heads #dims"]
) -> Float64[Tensor, "*heads"]:
    """1 - prod_a 1 / S(alpha_a, f_a), with alpha in 1 / pixel^2 and `offset` f between -1/2 and 1/2 pixel."""
    return -torch.expm1(-torch.log1p(_others(alpha, offset)).sum(-1))


def _others(alpha: Tensor, offset: Tensor) -> Tensor:
    """S(alpha, f) - 1 without cancellation."""
    # From alpha = 1 on, eight terms on either side reach float64; below, three of Poisson's formula.
    steps = torch.arange(1, 9, device=alpha.device, dtype=alpha.dtype)
    sharp, beside = alpha.clamp_min(1)[..., None], offset[..., None]
    direct = torch.exp(-sharp * steps * (steps - 2 * beside)) + torch.exp(-sharp * steps * (steps + 2 * beside))
    blunt, waves = alpha.clamp_max(1), steps[:3]
    ripples = torch.exp(-(math.pi**2) * waves.square() / blunt[..., None]) * torch.cos(2 * math.pi * waves * beside)
    poisson = torch.exp(blunt * offset.square()) * (math.pi / blunt).sqrt() * (1 + 2 * ripples.sum(-1)) - 1
    return torch.where(alpha < 1, poisson, direct.sum(-1))
