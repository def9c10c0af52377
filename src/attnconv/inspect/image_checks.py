"""Validate images, and attribute a failing forward pass to the images, the options or the model."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import check_dense

# Errors of this library about an argument; all other errors in a forward pass are the model's own.
_OWN_ERRORS = re.compile(r"(images|model(\.\S*)?|layers|grid|prefix|queries|options|kernel_size|position_length): ")
_OTHER_ARGUMENTS = re.compile("unexpected keyword|missing .* required")


def check_images(images: Tensor, *, least: int = 1, before: int = 0, shape: tuple[int, ...] | None = None) -> None:
    """Raise an error that names the images that are constant, not finite or not of `shape`, counted from `before`."""
    check_dense(images, least=least)
    if shape is not None and tuple(images.shape[1:]) != shape:
        got = f"{tuple(images.shape[1:])} after {shape}"
        raise ValueError(bad("images", "must all have one shape", got, "Crop or scale them to one size."))
    if broken := _indices(~images.flatten(1).isfinite().all(1), before):
        raise ValueError(bad("images", "must be finite", f"NaN or infinity in image {broken}"))
    # In each channel where there are channels; a single pixel does not count as constant.
    pixels = images.flatten(2) if images.dim() > 3 else images.flatten(1)[:, None]
    constant = (pixels == pixels[..., :1]).flatten(1).all(1) & (pixels.shape[-1] > 1)
    if blank := _indices(constant, before):
        fix = "Attention on a blank image tells nothing of the model. Pass real images."
        raise ValueError(bad("images", "must have pixels that differ", f"one value everywhere in image {blank}", fix))


@contextmanager
def blaming_images(model: nn.Module, images: Tensor, options: Mapping[str, object] | None = None) -> Iterator[None]:
    """Report errors of a model's forward pass as errors of `images`, or of `options` if it wants other arguments.

    Errors of this library stay as they are.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, ValueError | TypeError) and _OWN_ERRORS.match(str(error)):
            raise
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        also = f", with {', '.join(options)}" if options else ""
        requirement = f"must be what the forward pass of {type(model).__name__} takes{also}"
        argument, got = "images", f"a batch of shape {tuple(images.shape)}"
        if isinstance(error, TypeError) and _OTHER_ARGUMENTS.search(reason):  # a part received the arguments
            argument, got = "options", ", ".join(options or ()) or "none"
        raise ValueError(bad(argument, requirement, got, f"It stopped with: {reason}.")) from error


def _indices(flags: Tensor, before: int) -> str:
    """Indices of the flagged images, at most five."""
    numbers = [before + index for index in flags.nonzero().flatten().tolist()]
    return ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
