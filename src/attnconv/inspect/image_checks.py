"""What images must be to say anything of a model, and whose fault it is when its forward pass stops."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.input_checks import check_dense

# What the library itself says of an argument; all other errors in a forward pass are the model's own.
_OWN_WORDS = re.compile(r"(images|model(\.\S*)?|layers|grid|prefix|queries|options|kernel_size|position_length): ")
_OTHER_ARGUMENTS = re.compile("unexpected keyword|missing .* required")


def check_images(images: Tensor, *, least: int = 1, before: int = 0, shape: tuple[int, ...] | None = None) -> None:
    """Refuse images that cannot tell anything, by their number among all.

    Args:
        images: The batch first.
        least: Number of images that are needed.
        before: Number of images that were checked before these.
        shape: What each of those had; None for the first.

    Raises:
        TypeError: They are no dense tensor of 16 to 64 bit floating point numbers.
        ValueError: There are too few, they are on the meta device, or an image has no pixels, is constant, holds NaN or
            infinity, or has another shape.

    Example:
        >>> check_images(torch.zeros(1, 3, 2, 2))
        Traceback (most recent call last):
        ValueError: images: must have pixels that differ, got one value everywhere in image 0. Attention on a blank \
image tells nothing of the model. Pass real images.
    """
    check_dense(images, least=least)
    if shape is not None and tuple(images.shape[1:]) != shape:
        got = f"{tuple(images.shape[1:])} after {shape}"
        raise ValueError(bad("images", "must all have one shape", got, "Crop or scale them to one size."))
    flat = images.flatten(1)
    if broken := _where(~flat.isfinite().all(1), before):
        raise ValueError(bad("images", "must be finite", f"NaN or infinity in image {broken}"))
    if blank := _where(constant_images(images), before):
        fix = "Attention on a blank image tells nothing of the model. Pass real images."
        raise ValueError(bad("images", "must have pixels that differ", f"one value everywhere in image {blank}", fix))


def constant_images(images: Tensor) -> Tensor:
    """Which images have one value everywhere, in each channel where there are channels; a single pixel does not count.

    Args:
        images: (b, c, height, width), or (b, ...) without channels.

    Example:
        >>> constant_images(torch.tensor([[[[1.0, 1.0]]], [[[1.0, 2.0]]]])).tolist()
        [True, False]
    """
    pixels = images.flatten(2) if images.dim() > 3 else images.flatten(1)[:, None]
    return (pixels == pixels[..., :1]).flatten(1).all(1) & (pixels.shape[-1] > 1)


@contextmanager
def blaming_images(model: nn.Module, images: Tensor, options: Mapping[str, object] | None = None) -> Iterator[None]:
    """What a model itself says against its input is said of `images`, or of `options` where it wants other arguments.

    Args:
        model: Runs inside.
        images: What it is given.
        options: What it is given besides.

    Raises:
        ValueError: It stopped; its words are passed on. Errors of this library stay what they are.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, ValueError | TypeError) and _OWN_WORDS.match(str(error)):
            raise
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        also = f", with {', '.join(options)}" if options else ""
        requirement = f"must be what the forward pass of {type(model).__name__} takes{also}"
        argument, got = "images", f"a batch of shape {tuple(images.shape)}"
        if isinstance(error, TypeError) and _OTHER_ARGUMENTS.search(reason):
            argument, got = "options", ", ".join(options or ()) or "none"  # of a part that is handed the arguments
        raise ValueError(bad(argument, requirement, got, f"It stopped with: {reason}.")) from error


def _where(flags: Tensor, before: int) -> str:
    """Numbers of the images that are flagged, the first few."""
    numbers = [before + index for index in flags.nonzero().flatten().tolist()]
    return ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
