"""What a Gaussian head leaves off its nearest key.

A head with centre f beside a key, |f| <= 1/2, weighs the keys at distance k from that one, relative to it, by
exp(-alpha (k^2 - 2 k f)). Over all whole numbers the weights add up to

    S(alpha, f) = sum_k exp(-alpha (k^2 - 2 k f)),                 S(alpha, 0) = sum_k exp(-alpha k^2)

so along one axis the nearest key gets 1 / S, and over several axes the mass off it is 1 - prod_a 1 / S_a. Fewer keys
(an image, a border) only take terms out of the sum: on every grid that holds the nearest key, this is an upper bound.

For small alpha the sum is taken on the other side of Poisson's formula,

    S(alpha, f) = exp(alpha f^2) sqrt(pi / alpha) (1 + 2 sum_{n >= 1} exp(-pi^2 n^2 / alpha) cos(2 pi n f)),

where three terms reach float64, as eight on either side do in the sum itself from alpha = 1 on.
"""

import math

import torch
from jaxtyping import Float64
from torch import Tensor


def mass_off_nearest(
    alpha: Float64[Tensor, "*heads dims"], offset: Float64[Tensor, "*#heads #dims"]
) -> Float64[Tensor, "*heads"]:
    """Upper bound of the attention of Gaussian heads off their nearest key: 1 - prod_a 1 / S(alpha_a, f_a).

    Args:
        alpha: Sharpness along each axis, positive, in 1 / pixel^2.
        offset: The centre's distance f from the nearest key along each axis, between -1/2 and 1/2 pixel.
    """
    return -torch.expm1(-torch.log1p(_others(alpha, offset)).sum(-1))


def _others(alpha: Tensor, offset: Tensor) -> Tensor:
    """S(alpha, f) - 1 without cancellation."""
    steps = torch.arange(1, 9, device=alpha.device, dtype=alpha.dtype)
    sharp, beside = alpha.clamp_min(1)[..., None], offset[..., None]
    direct = (torch.exp(-sharp * steps * (steps - 2 * beside)) + torch.exp(-sharp * steps * (steps + 2 * beside))).sum(
        -1
    )
    blunt, waves = alpha.clamp_max(1), steps[:3]
    ripples = torch.exp(-(math.pi**2) * waves.square() / blunt[..., None]) * torch.cos(2 * math.pi * waves * beside)
    poisson = torch.exp(blunt * offset.square()) * (math.pi / blunt).sqrt() * (1 + 2 * ripples.sum(-1)) - 1
    return torch.where(alpha < 1, poisson, direct)
