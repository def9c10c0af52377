"""Random crops, flips, colour jitter, cutout, mixup and CutMix for whole batches, on the device of the images.

The augmentation of an image depends only on its row of random numbers, not on the batch, process or device. Mixup
(Zhang et al., 2018) and CutMix (Yun et al., 2019) combine each image x with another image x' of the batch, and their
labels with the same weights lambda and 1 - lambda. Mixup averages the pixels, lambda x + (1 - lambda) x'. CutMix pastes
a rectangle of x' into x, and lambda is the remaining fraction of x. Both sample lambda from Beta(a, a).
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float32, Int64, UInt8
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.data.settings import Augmentation, AugmentSettings, settle


def augment(
    images: UInt8[Tensor, "b c height width"],
    uniforms: Float32[Tensor, "b 36"],
    *,
    settings: AugmentSettings,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Float32[Tensor, "b c height width"]:
    """Augment and normalise a batch. Cutout squares are 0 after normalisation, which is the mean colour."""
    channels, height, width = images.shape[1:]
    chosen = settle(settings, channels=channels, size=min(height, width))
    # Each augmentation has its own columns, so that turning one off does not affect the others.
    row, column, mirror, cut_row, cut_column, *colour = uniforms[:, :8].unbind(dim=1)
    if chosen.padding > 0 or chosen.flip:
        images = _crop(images, row, column, mirror, chosen)
    if chosen.jitter > 0.0:
        factors = (1.0 - chosen.jitter + 2.0 * chosen.jitter * draw for draw in colour)
        pixels = _normalise(_jitter(images.to(torch.float32) / 255, *factors), mean, std, largest=1)
    else:
        pixels = normalise(images, mean, std)
    if chosen.cutout > 0:
        squares = boxes(cut_row, cut_column, (height, width), (chosen.cutout, chosen.cutout))
        pixels.masked_fill_(squares[:, None], 0.0)
    return pixels


def normalise(
    images: UInt8[Tensor, "b c height width"], mean: tuple[float, ...], std: tuple[float, ...]
) -> Float32[Tensor, "b c height width"]:
    """Normalise uint8 images to (x / 255 - mean) / std per channel.

    Args:
        images: Images with values from 0 to 255.
        mean: Mean of each channel, for pixels scaled to [0, 1].
        std: Standard deviation of each channel, positive.

    Raises:
        ValueError: If `mean` or `std` does not have one value per channel, or a value of `std` is not positive.

    Example:
        >>> normalise(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), (0.5,), (0.5,)).unique()
        tensor([-1.])
    """
    return _normalise(images.to(torch.float32), mean, std, largest=255)


def _normalise(
    pixels: Float32[Tensor, "b c height width"], mean: tuple[float, ...], std: tuple[float, ...], *, largest: int
) -> Float32[Tensor, "b c height width"]:
    """Compute (pixels / largest - mean) / std in place, by channel: copying a tensor of constants stalls a GPU."""
    channels = pixels.shape[1]
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != channels:
            raise ValueError(bad(name, f"must have one number per channel ({channels})", values))
    if min(std) <= 0.0:
        raise ValueError(bad("std", "must be positive", std))
    for channel, shift, scale in zip(pixels.unbind(1), mean, std, strict=True):
        channel.sub_(largest * shift).div_(largest * scale)
    return pixels


def _crop(
    images: UInt8[Tensor, "b c height width"],
    row: Float32[Tensor, " b"],
    column: Float32[Tensor, " b"],
    mirror: Float32[Tensor, " b"],
    chosen: Augmentation,
) -> UInt8[Tensor, "b c height width"]:
    """Shift each image by up to `padding` pixels along each axis, and flip it, with one gather.

    Pixel (i, j) of the result is pixel (i + row - p, j' + column - p) of the image. If the image is flipped,
    j' = width - 1 - j, otherwise j' = j.
    """
    b, c, height, width = images.shape
    shifts, p = 2 * chosen.padding + 1, chosen.padding
    i, j = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
    if chosen.flip:
        j = torch.where(mirror[:, None] < 0.5, width - 1 - j, j)  # (b, width)
    rows, columns = below(row, shifts)[:, None] + i - p, below(column, shifts)[:, None] + j - p
    if chosen.border == "reflect":
        rows, columns = _reflected(rows, height), _reflected(columns, width)
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    black = height * width  # index of the black pixel that is appended to each image
    places = torch.where(inside, rows[:, :, None] * width + columns[:, None, :], black)
    places = places.view(b, 1, height * width).expand(b, c, height * width)
    return F.pad(images.flatten(2), (0, 1)).gather(2, places).view(b, c, height, width)


def _reflected(positions: Int64[Tensor, "b n"], size: int) -> Int64[Tensor, "b n"]:
    """Reflect positions at both edges: -1 -> 1, size -> size - 2."""
    return (size - 1) - ((size - 1) - positions.abs()).abs()


def _jitter(
    pixels: Float32[Tensor, "b c height width"], *factors: Float32[Tensor, " b"]
) -> Float32[Tensor, "b c height width"]:
    """Scale brightness, contrast and saturation, in this order, by the factors of each image."""
    brightness, contrast, saturation = (factor[:, None, None, None] for factor in factors)
    pixels = (pixels * brightness).clamp_(0.0, 1.0)
    middle = grey(pixels).mean(dim=(2, 3), keepdim=True)
    pixels = torch.lerp(middle, pixels, contrast).clamp_(0.0, 1.0)
    return torch.lerp(grey(pixels), pixels, saturation).clamp_(0.0, 1.0) if pixels.shape[1] == 3 else pixels


def grey(pixels: Float[Tensor, "b c height width"]) -> Float[Tensor, "b 1 height width"]:
    """Return the luma of RGB images (ITU-R BT.601), or the mean of all channels if there are not three."""
    if pixels.shape[1] != 3:
        return pixels.mean(dim=1, keepdim=True)
    red, green, blue = pixels.split(1, dim=1)
    luma: Tensor = 0.299 * red + 0.587 * green + 0.114 * blue
    return luma


def below(uniforms: Float32[Tensor, "*shape"], limit: int) -> Int64[Tensor, "*shape"]:
    """Convert uniform random numbers to integers in [0, limit), with a bias below limit / 2^24."""
    return (uniforms * limit).to(torch.int64)


def boxes(
    row: Float32[Tensor, " b"],
    column: Float32[Tensor, " b"],
    size: tuple[int, int],
    sides: tuple[int | Int64[Tensor, "b 1"], int | Int64[Tensor, "b 1"]],
) -> Bool[Tensor, "b height width"]:
    """Return masks of rectangles of the given `sides` with random centres, clipped at the border of the image."""
    masks = []
    for draw, length, side in zip((row, column), size, sides, strict=True):
        steps = torch.arange(length, device=draw.device) - below(draw, length)[:, None] + side // 2
        masks.append((steps >= 0) & (steps < side))
    return masks[0][:, :, None] & masks[1][:, None, :]


def mix(
    images: Float[Tensor, "b c height width"],
    labels: Int64[Tensor, " b"],
    uniforms: Float32[Tensor, "b 36"],
    *,
    settings: AugmentSettings,
    classes: int,
) -> tuple[Float[Tensor, "b c height width"], Float32[Tensor, "b classes"]]:
    """Apply mixup or CutMix to an augmented batch; if both are on, one is chosen at random for each image."""
    soft = F.one_hot(labels, classes).to(torch.float32)
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
    """Sample from Beta(a, a), 0 < a <= 1, by Jöhnk's method: x / (x + y) with x = u^(1/a), y = v^(1/a) if x + y <= 1.

    Each pair (u, v) is accepted with probability at least 1/2. The result is computed from the first of twelve pairs
    that is accepted, or is 1/2 if none is (once in 4096 samples for a = 1, practically never for a = 0.2). The first
    half of the columns of `uniforms` contains u, the second half v.
    """
    # Logarithms avoid the underflow of u^(1/a) for small a. 1 - u is in (0, 1], where the logarithm is finite.
    log_x, log_y = (torch.log1p(-uniforms) / parameter).chunk(2, dim=1)
    accepted = torch.logaddexp(log_x, log_y) <= 0.0
    values = torch.sigmoid(log_x - log_y)
    first = accepted.to(torch.int64).argmax(dim=1, keepdim=True)
    return torch.where(accepted.any(dim=1), values.gather(1, first)[:, 0], 0.5)


def _partners(draws: Float32[Tensor, " b"]) -> Int64[Tensor, " b"]:
    """Choose partners by a random cycle through the batch; an image is its own partner only in a batch of one."""
    order = torch.argsort(draws, stable=True)
    partner = torch.empty_like(order)
    partner[order] = order.roll(1)
    return partner
