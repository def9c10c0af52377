"""Where the tokens of a foreign model stand, from what the model says of itself.

Asked from the attention outwards, the first module that knows decides:

    window_size, shift_size           tokens in shifted windows (Swin of timm, torchvision, Hugging Face)
    patch_embed, num_prefix_tokens    timm: patches of the image, class tokens and registers before them
    config.patch_size                 Hugging Face: the same
    patch_size                        torchvision

A model of images that says nothing has square patches after no token or one; of other inputs the user says the grid.
What does not come out even is refused.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from attnconv.analysis.token_layout import TokenLayout, Whole, Windows
from attnconv.analysis.token_rows import TokenRows, UnreadableError


@final
@dataclass
class Running:
    """A module whose forward pass is under way.

    Attributes:
        name: Its name in the model.
        module: The module.
        shape: Shape of its first input, if that is a tensor.
        resolution: Its second input, where that is a (height, width) of tokens.
        calls: Calls of attention that were read inside so far.
    """

    name: str
    module: nn.Module
    shape: tuple[int, ...] | None
    resolution: tuple[int, int] | None
    calls: int = 0


@final
@dataclass(frozen=True)
class Places:
    """What the user says of the tokens; None for what the model is to say.

    Attributes:
        grid: Tokens of the image, (height, width).
        prefix: Tokens before them.
    """

    grid: tuple[int, ...] | None
    prefix: int | None


def layout_of(running: Sequence[Running], rows: TokenRows, images: Tensor, places: Places) -> TokenLayout:
    """The layout of one call.

    Args:
        running: The modules that the call runs in, outermost first.
        rows: The call.
        images: What the model was given.
        places: What the user says.

    Raises:
        UnreadableError: The tokens cannot be placed.
    """
    if rows.queries != rows.keys:
        raise UnreadableError(f"{rows.queries} queries look at {rows.keys} keys, which is no attention among tokens")
    for frame in reversed(running):
        if getattr(frame.module, "shift_size", None) is not None:
            return _windows(frame, rows, images)
    if images.dim() == 4 and rows.batch != len(images):
        raise UnreadableError(f"it attends in {rows.batch} sequences for {len(images)} images, cut in an unknown way")
    if images.dim() == 3 and rows.batch not in images.shape[:2]:
        raise UnreadableError(f"it attends in {rows.batch} sequences for the input {tuple(images.shape)}")
    tokens = rows.keys
    layout = _whole(running, tokens, images, places)
    if layout is None:
        if images.dim() == 3 and (tokens, rows.batch) == tuple(images.shape[:2]) and rows.batch != tokens:
            given = f"the input {tuple(images.shape)} has its tokens first. Where it is split, put the batch first"
            raise UnreadableError(f"its {tokens} tokens make no grid of grid={places.grid}: {given}")
        given = f"the input {tuple(images.shape)}" if places.grid is None else f"grid={places.grid}"
        given = given if places.prefix is None else f"{given}, prefix={places.prefix}"
        raise UnreadableError(f"its {tokens} tokens make no grid of {given}; pass grid=(height, width) and prefix=")
    return layout


def _whole(running: Sequence[Running], tokens: int, images: Tensor, places: Places) -> Whole | None:
    """The grid of one sequence of tokens: the user's word, the model's, or an image's square patches, if any fits."""
    if places.grid is not None:
        prefix = tokens - math.prod(places.grid)
        return None if prefix < 0 or places.prefix not in (None, prefix) else Whole(places.grid, prefix)
    said = False
    for frame in reversed(running):
        for sizes, prefixes in _said(frame.module, images):
            said = True
            prefix = tokens - math.prod(sizes)
            if prefix in (prefixes if places.prefix is None else {places.prefix}):
                return Whole(sizes, prefix)
    if not said and images.dim() == 4:
        for prefix in (0, 1) if places.prefix is None else (places.prefix,):
            square = _square_patches(tokens - prefix, images)
            if square is not None:
                return Whole(square, prefix)
    return None


def _said(module: nn.Module, images: Tensor) -> Iterator[tuple[tuple[int, int], set[int]]]:
    """Grids of tokens that a module speaks of, with the numbers of tokens before them."""
    if images.dim() != 4:
        return
    embed = getattr(module, "patch_embed", None)
    if embed is not None:
        known = getattr(module, "num_prefix_tokens", None)
        # Class tokens may join later than the first blocks.
        prefixes = {0, 1} if known is None else {0, int(known)}
        for sizes in _patches(getattr(embed, "patch_size", None), images):
            yield sizes, prefixes
        fixed, made_for = pair_of(getattr(embed, "grid_size", None)), pair_of(getattr(embed, "img_size", None))
        if fixed is not None and made_for == tuple(images.shape[2:]):
            yield fixed, prefixes
    config = getattr(module, "config", None)
    registers = getattr(config, "num_register_tokens", None)
    for sizes in _patches(getattr(config, "patch_size", None), images):
        yield sizes, {0, 1, 2} if registers is None else {1 + int(registers)}
    for sizes in _patches(getattr(module, "patch_size", None), images):
        yield sizes, {0, 1}


def _patches(patch: Any, images: Tensor) -> Iterator[tuple[int, int]]:
    """Patches of an image, without and with those that hang over its border."""
    lengths = pair_of(patch)
    if lengths is None:
        return
    height, width = images.shape[2:]
    yield height // lengths[0], width // lengths[1]
    yield math.ceil(height / lengths[0]), math.ceil(width / lengths[1])


def pair_of(value: Any) -> tuple[int, int] | None:
    """A size as (height, width), or None for what is no size.

    Args:
        value: An integer, or two of them in a list or tuple.

    Example:
        >>> pair_of(3), pair_of([2, 5]), pair_of("a")
        ((3, 3), (2, 5), None)
    """
    if isinstance(value, int) and value > 0:
        return value, value
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(part, int) for part in value):
        return value[0], value[1]
    return None


def _square_patches(tokens: int, images: Tensor) -> tuple[int, int] | None:
    """The grid of square patches that fill the image."""
    height, width = images.shape[2:]
    if tokens < 1 or width == 0:
        return None
    rows = math.isqrt(tokens * height // width)
    if rows == 0 or rows * rows * width != tokens * height or tokens % rows:
        return None
    return rows, tokens // rows


def _windows(frame: Running, rows: TokenRows, images: Tensor) -> Windows:
    """The windows of a block, from its own sizes and the shape of its input."""
    block: Any = frame.module
    window, shift = pair_of(getattr(block, "window_size", None)), _shift(block.shift_size)
    if frame.shape is not None and len(frame.shape) == 4:
        sizes: tuple[int, int] | None = (frame.shape[1], frame.shape[2])
    else:
        sizes = frame.resolution
    if window is None or shift is None or sizes is None:
        raise UnreadableError(f"its windows are those of {frame.name!r}, whose sizes are not to be had")
    # timm moves the tokens, then pads them; the others pad first, and do not move what fits in one window. Blocks of
    # timm and of Hugging Face say for which resolution they were built, torchvision's do not.
    timms = type(block).__module__.startswith("timm.") or getattr(block, "input_resolution", None) is not None
    pad_first = hasattr(block, "maybe_pad") or not timms
    if pad_first:
        shift = (shift[0] * (sizes[0] > window[0]), shift[1] * (sizes[1] > window[1]))
    layout = Windows(sizes, window, shift=shift, pad_first=pad_first)
    if rows.keys != math.prod(window) or rows.batch != layout.parts * len(images):
        got = f"{rows.batch} sequences of {rows.keys} tokens"
        raise UnreadableError(f"{got} are no windows of {window} over {sizes} tokens of {len(images)} images")
    return layout


def _shift(value: Any) -> tuple[int, int] | None:
    """A shift as (rows, columns); 0 is one."""
    if isinstance(value, (list, tuple)) and len(value) == 2:
        return int(value[0]), int(value[1])
    return (int(value), int(value)) if isinstance(value, int) else None
