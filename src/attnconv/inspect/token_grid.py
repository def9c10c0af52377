"""Where the tokens of a foreign model stand, from what the model says of itself.

Asked from the attention outwards, the first module that knows decides:

    window_size, shift_size           tokens in shifted windows (Swin of timm, torchvision, Hugging Face)
    patch_embed, num_prefix_tokens    timm: patches of the image, class tokens and registers before them
    config.patch_size                 Hugging Face: the same, with num_register_tokens after the class token
    config.num_detection_tokens       Hugging Face's YOLOS: after a class token and the patches
    patch_size                        torchvision

A model of images that says nothing has square patches after no token or one; of other inputs the user says the grid.
Where the user says the grid, one token more than it holds stands before the image. Of several, the model or the user
says how many do: taken wrongly, they would move every map. The others stand after it. What does not come out even is
refused.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from attnconv.inspect.attention_rows import TokenRows, UnreadableError
from attnconv.inspect.token_layout import TokenLayout, Whole, Windows


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
        prefix: Tokens before them. What neither is stands after them.
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
        raise UnreadableError(_no_grid(tokens, images, places))
    return layout


def _no_grid(tokens: int, images: Tensor, places: Places) -> str:
    """Why tokens cannot be placed, and what would help."""
    said = "" if places.prefix is None else f", prefix={places.prefix}"
    if places.grid is None:
        given = f"the input {tuple(images.shape)}{said}"
        return f"its {tokens} tokens make no grid of {given}; pass grid=(height, width) and prefix="
    wanted = math.prod(places.grid) + (places.prefix or 0)
    return f"its {tokens} tokens make no grid of grid={places.grid}{said}, which has {wanted}; pass a smaller grid="


def _whole(running: Sequence[Running], tokens: int, images: Tensor, places: Places) -> Whole | None:
    """The grid of one sequence of tokens: the user's word, the model's, or an image's square patches, if any fits."""
    said = [word for frame in reversed(running) for word in _said(frame.module, images)]
    if places.grid is not None:
        return _of_grid(running, tokens, places.grid, places.prefix, said)
    for word in said:
        prefix = tokens - math.prod(word.sizes) - word.suffix
        if prefix in (word.prefixes if places.prefix is None else {places.prefix}):
            return Whole(word.sizes, prefix, word.suffix)
    if not said and images.dim() == 4:
        for prefix in (0, 1) if places.prefix is None else (places.prefix,):
            square = _square_patches(tokens - prefix, images)
            if square is not None:
                return Whole(square, prefix)
    return None


def _of_grid(
    running: Sequence[Running], tokens: int, grid: tuple[int, ...], prefix: int | None, said: Sequence["_Word"]
) -> Whole | None:
    """The user's grid, unless it is too large: which surplus tokens stand before it says the user too, or the model."""
    surplus = tokens - math.prod(grid)
    if surplus < (prefix or 0):
        return None
    whole = [word for word in said if tokens - math.prod(word.sizes) - word.suffix in word.prefixes]
    if prefix is not None:
        if prefix < surplus and whole and all(word.sizes != grid for word in whole):
            given = f"grid={grid}, prefix={prefix} leave {surplus - prefix} of its {tokens} tokens over"
            raise UnreadableError(f"{given}, while the model itself says a grid of {whole[0].sizes}; pass that or none")
        return Whole(grid, prefix, surplus - prefix)
    if surplus < 2:
        return Whole(grid, surplus)
    for word in whole:
        if word.sizes == grid:
            return Whole(grid, surplus - word.suffix, word.suffix)
    for frame in reversed(running):
        known = _known_others(frame.module)
        if known is not None and sum(known) == surplus:
            return Whole(grid, *known)
    given = f"its {tokens} tokens are {surplus} more than those of grid={grid}"
    raise UnreadableError(f"{given}; pass prefix= with grid=, how many of the {surplus} stand before the image")


@final
@dataclass(frozen=True)
class _Word:
    """What a module says of its tokens: those of the image, how many may stand before, how many stand after."""

    sizes: tuple[int, int]
    prefixes: frozenset[int]
    suffix: int = 0


def _said(module: nn.Module, images: Tensor) -> Iterator[_Word]:
    """What a module says of the tokens of some images."""
    if images.dim() != 4:
        return
    known = _known_others(module)
    embed = getattr(module, "patch_embed", None)
    if embed is not None:
        # Class tokens may join later than the first blocks.
        prefixes = frozenset({0, 1} if known is None else {0, known[0]})
        for sizes in _patches(getattr(embed, "patch_size", None), images):
            yield _Word(sizes, prefixes)
        fixed, made_for = pair_of(getattr(embed, "grid_size", None)), pair_of(getattr(embed, "img_size", None))
        if fixed is not None and made_for == tuple(images.shape[2:]):
            yield _Word(fixed, prefixes)
    before, after = ({0, 1, 2}, 0) if known is None else ({known[0]}, known[1])
    for sizes in _patches(getattr(getattr(module, "config", None), "patch_size", None), images):
        yield _Word(sizes, frozenset(before), after)
    for sizes in _patches(getattr(module, "patch_size", None), images):
        yield _Word(sizes, frozenset({0, 1}))


def _known_others(module: nn.Module) -> tuple[int, int] | None:
    """How many tokens stand before and after those of the image, where a module says so."""
    if getattr(module, "patch_embed", None) is not None and getattr(module, "num_prefix_tokens", None) is not None:
        return int(module.num_prefix_tokens), 0  # type: ignore[arg-type]
    config = getattr(module, "config", None)
    registers, detections = (getattr(config, f"num_{kind}_tokens", None) for kind in ("register", "detection"))
    return None if registers is None and detections is None else (1 + int(registers or 0), int(detections or 0))


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
