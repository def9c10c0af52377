"""Random changes to whole batches of images, on the device the images are on.

A batch goes through crop and mirror (one gather on bytes), colour, normalisation and cutout; there is no loop over
images. An image's changes are a function of its row of random numbers, which depends only on (seed, epoch, sample), see
`attnconv.data.random_numbers`: it is changed in the same way in every batch, in every process and on every device.

The black border of a shifted crop is black before normalisation, as in the paper's code; cutout's square is zero after
it, the mean colour.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float32, Int64, UInt8
from torch import Tensor

from attnconv._util.errors import bad
from attnconv.data.random_numbers import below
from attnconv.data.settings import Augmentation, AugmentSettings, CropBorder, settle

# ITU-R BT.601 luma: what "grey" means when contrast and saturation change.
_LUMA = (0.299, 0.587, 0.114)


def augment(
    images: UInt8[Tensor, "b c height width"],
    uniforms: Float32[Tensor, "b 36"],
    *,
    settings: AugmentSettings,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Float32[Tensor, "b c height width"]:
    """Change a batch at random and normalise it.

    Args:
        images: pixels as bytes.
        uniforms: rows of `uniform` for these images, as `Batch.uniforms` has them.
        settings: which changes, how strong.
        mean: mean of each channel, of pixels scaled to [0, 1].
        std: deviation of each channel, positive.

    Returns:
        The batch as normalised floats, of the same shape and on the same device.

    Raises:
        ValueError: if the images are smaller than the settings ask, or the constants do not fit the channels.

    Example:
        >>> batch = torch.full((2, 1, 8, 8), 255, dtype=torch.uint8)
        >>> out = augment(batch, torch.rand(2, 36), settings=AugmentSettings("none"), mean=(0.5,), std=(0.25,))
        >>> out.unique().item()
        2.0
    """
    channels, height, width = images.shape[1:]
    chosen = settle(settings, channels=channels, size=min(height, width))
    if not chosen.random:
        return normalise(images, mean, std)
    # Every change has columns of its own: one that is switched off leaves the others as they are.
    row, column, mirror, cut_row, cut_column, brightness, contrast, saturation = uniforms[:, :8].unbind(dim=1)
    if chosen.padding > 0 or chosen.flip:
        images = _crop(images, row, column, mirror, chosen)
    if chosen.jitter > 0.0:
        factors = (1.0 - chosen.jitter + 2.0 * chosen.jitter * part for part in (brightness, contrast, saturation))
        pixels = _normalise(_jitter(images.to(torch.float32) / 255, *factors), mean, std)
    else:
        pixels = normalise(images, mean, std)
    if chosen.cutout > 0:
        squares = boxes(cut_row, cut_column, (height, width), (chosen.cutout, chosen.cutout))
        pixels.masked_fill_(squares[:, None], 0.0)
    return pixels


def normalise(
    images: UInt8[Tensor, "b c height width"], mean: tuple[float, ...], std: tuple[float, ...]
) -> Float32[Tensor, "b c height width"]:
    """Turn bytes into floats of mean 0 and deviation 1: (x / 255 - mean) / std per channel; nothing random.

    Args:
        images: pixels as bytes.
        mean: mean of each channel, of pixels scaled to [0, 1].
        std: deviation of each channel, positive.

    Returns:
        The images as float32, on the same device.

    Raises:
        ValueError: if the constants do not fit the channels.

    Example:
        >>> normalise(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), (0.5,), (0.5,)).unique()
        tensor([-1.])
    """
    return _normalise(images.to(torch.float32), tuple(255 * m for m in mean), tuple(255 * s for s in std))


def _normalise(
    pixels: Float32[Tensor, "b c height width"], mean: tuple[float, ...], std: tuple[float, ...]
) -> Float32[Tensor, "b c height width"]:
    """(pixels - mean) / std in place: the pixels are always a fresh tensor of this module.

    Channel by channel: constants in a tensor would be copied to the device, and a GPU's queue runs empty for that.
    """
    channels = pixels.shape[1]
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != channels:
            raise ValueError(bad(name, f"must have one number for each of the {channels} channels", values))
    if min(std) <= 0.0:
        raise ValueError(bad("std", "must be positive", std))
    for channel, shift, scale in zip(pixels.unbind(1), mean, std, strict=True):
        channel.sub_(shift).div_(scale)
    return pixels


def _crop(
    images: UInt8[Tensor, "b c height width"],
    row: Float32[Tensor, " b"],
    column: Float32[Tensor, " b"],
    mirror: Float32[Tensor, " b"],
    chosen: Augmentation,
) -> UInt8[Tensor, "b c height width"]:
    """Shift each image by up to ``padding`` pixels along each axis and mirror it, by one gather.

    Pixel (i, j) of the result is pixel (i + row - p, j' + column - p) of the image, j' = width - 1 - j when mirrored.
    A black pixel is appended to each image; whatever falls outside looks there.
    """
    b, c, height, width = images.shape
    shifts, p = 2 * chosen.padding + 1, chosen.padding
    i, j = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
    if chosen.flip:
        j = torch.where(mirror[:, None] < 0.5, width - 1 - j, j)  # (b, width)
    rows, row_inside = _border(below(row, shifts)[:, None] + i - p, height, chosen.border)
    columns, column_inside = _border(below(column, shifts)[:, None] + j - p, width, chosen.border)
    inside = row_inside[:, :, None] & column_inside[:, None, :]
    places = torch.where(inside, rows[:, :, None] * width + columns[:, None, :], height * width)
    places = places.view(b, 1, height * width).expand(b, c, height * width)
    return F.pad(images.flatten(2), (0, 1)).gather(2, places).view(b, c, height, width)


def _border(
    positions: Int64[Tensor, "b n"], size: int, border: CropBorder
) -> tuple[Int64[Tensor, "b n"], Bool[Tensor, "b n"]]:
    """Positions inside the image for positions that may lie outside, and whether each one shows the image."""
    if border == "reflect":  # -1 -> 1, size -> size - 2: the edge itself is not repeated
        return (size - 1) - ((size - 1) - positions.abs()).abs(), torch.ones_like(positions, dtype=torch.bool)
    return positions, (positions >= 0) & (positions < size)


def _jitter(
    pixels: Float32[Tensor, "b c height width"], *factors: Float32[Tensor, " b"]
) -> Float32[Tensor, "b c height width"]:
    """Scale brightness, contrast and saturation, in this order, by each image's factors."""
    brightness, contrast, saturation = (factor[:, None, None, None] for factor in factors)
    pixels = (pixels * brightness).clamp_(0.0, 1.0)
    middle = grey(pixels).mean(dim=(2, 3), keepdim=True)
    pixels = torch.lerp(middle, pixels, contrast).clamp_(0.0, 1.0)
    return torch.lerp(grey(pixels), pixels, saturation).clamp_(0.0, 1.0) if pixels.shape[1] == 3 else pixels


def grey(pixels: Float[Tensor, "b c height width"]) -> Float[Tensor, "b 1 height width"]:
    """The luma of colour images; the mean of the channels for any other number of them."""
    if pixels.shape[1] != 3:
        return pixels.mean(dim=1, keepdim=True)
    red, green, blue = pixels.split(1, dim=1)
    luma: Tensor = _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue
    return luma


def boxes(
    row: Float32[Tensor, " b"],
    column: Float32[Tensor, " b"],
    size: tuple[int, int],
    sides: tuple[int | Int64[Tensor, "b 1"], int | Int64[Tensor, "b 1"]],
) -> Bool[Tensor, "b height width"]:
    """Masks of rectangles of the given height and width, centred on any pixel, cut off at the border."""
    masks = []
    for draw, length, side in zip((row, column), size, sides, strict=True):
        steps = torch.arange(length, device=draw.device) - below(draw, length)[:, None] + side // 2
        masks.append((steps >= 0) & (steps < side))
    return masks[0][:, :, None] & masks[1][:, None, :]
