"""Mixup and CutMix: blend each image with another one of its batch, and their labels alike.

Mixup (Zhang et al., 2018) blends all pixels: lambda x + (1 - lambda) x'. CutMix (Yun et al., 2019) pastes a rectangle
of x' into x; lambda is then the part of x that is left. Both draw lambda from Beta(a, a).

Whether and how an image is blended depends on (seed, epoch, sample); its partner depends on the batch.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.data.augmentation import boxes
from attnconv.data.settings import AugmentSettings


def mix(
    images: Float[Tensor, "b c height width"],
    labels: Int64[Tensor, " b"],
    uniforms: Float32[Tensor, "b 36"],
    *,
    settings: AugmentSettings,
    classes: int,
) -> tuple[Float[Tensor, "b c height width"], Float32[Tensor, "b classes"]]:
    """Apply mixup or CutMix to a batch after `augment`; returns images and a distribution over the classes for each.

    With both on, each image takes one of them at random; with both at 0 the images are returned unchanged.
    """
    soft = F.one_hot(labels, classes).to(torch.float32)
    if settings.mixup == 0.0 and settings.cutmix == 0.0:
        return images, soft
    turn, choice, row, column = uniforms[:, 8:12].unbind(dim=1)
    partner, pairs = _partners(turn), uniforms[:, 12:]
    both = settings.mixup > 0.0 and settings.cutmix > 0.0
    cuts = choice < 0.5 if both else torch.full_like(choice, settings.cutmix > 0.0, dtype=torch.bool)
    kept = torch.ones_like(pairs[:, 0])
    if settings.mixup > 0.0:
        kept = torch.where(cuts, kept, beta(settings.mixup, pairs))
    mixed = torch.lerp(images[partner], images, kept[:, None, None, None].to(images.dtype))
    if settings.cutmix > 0.0:
        share = (1.0 - beta(settings.cutmix, pairs)).sqrt()[:, None]
        height, width = images.shape[2:]
        sides = ((share * height).round().to(torch.int64), (share * width).round().to(torch.int64))
        inside = cuts[:, None, None] & boxes(row, column, (height, width), sides)
        mixed = torch.where(inside[:, None], images[partner], mixed)
        kept = torch.where(cuts, 1.0 - inside.to(torch.float32).mean(dim=(1, 2)), kept)
    return mixed, torch.lerp(soft[partner], soft, kept[:, None])


def beta(parameter: float, uniforms: Float32[Tensor, "b pairs"]) -> Float32[Tensor, " b"]:
    """Draw from Beta(a, a), 0 < a <= 1, by Jöhnk's rule: x / (x + y) for x = u^(1/a), y = v^(1/a) if x + y <= 1.

    A pair (u, v) is accepted with probability at least 1/2; the first accepted of twelve is taken, and 1/2 where none
    is (once in 4096 at a = 1, practically never at a = 0.2). `uniforms` holds first all u, then all v.
    """
    if not 0.0 < parameter <= 1.0:
        raise ValueError(bad("parameter", "must be in (0, 1]", parameter))
    # In logarithms, since u^(1/a) underflows for small a; 1 - u lies in (0, 1], where the logarithm is finite.
    log_x, log_y = (torch.log1p(-uniforms) / parameter).chunk(2, dim=1)
    accepted = torch.logaddexp(log_x, log_y) <= 0.0
    values = torch.sigmoid(log_x - log_y)
    first = accepted.to(torch.int64).argmax(dim=1, keepdim=True)
    return torch.where(accepted.any(dim=1), values.gather(1, first)[:, 0], 0.5)


def _partners(draws: Float32[Tensor, " b"]) -> Int64[Tensor, " b"]:
    """One random cycle through the batch: in batches of two and more, no image is its own partner."""
    order = torch.argsort(draws, stable=True)
    partner = torch.empty_like(order)
    partner[order] = order.roll(1)
    return partner
