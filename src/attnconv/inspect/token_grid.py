"""Positions of the tokens of any model, from the first module, attention outwards, whose attributes tell them.

A wrong guess would move every map, so what does not fit is refused.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from attnconv.inspect.attention_calls import TokenRows, UnreadableError
from attnconv.inspect.token_operator import TokenLayout, window_layout


@final
@dataclass
class Running:
    """A module whose forward pass is under way."""

    name: str  # in the model
    module: nn.Module
    shape: tuple[int, ...] | None  # of the first input, if that is a tensor
    resolution: tuple[int, int] | None  # the second input, if that is a (height, width) of tokens
    calls: int = 0  # of attention seen inside so far
    pending: TokenRows | None = None  # the first of two attentions that the module mixes


@final
@dataclass(frozen=True)
class _Hint:
    """Tokens of the image according to a module, how many may be before them, and how many are after."""

    sizes: tuple[int, int]
    prefixes: frozenset[int]
    suffix: int = 0

    def prefix(self, tokens: int) -> int:
        """Tokens before the image, out of all."""
        return tokens - math.prod(self.sizes) - self.suffix


def layout_of(
    running: Sequence[Running], rows: TokenRows, images: Tensor, grid: tuple[int, ...] | None, prefix: int | None
) -> TokenLayout:
    """The layout of a call inside the modules `running`, outermost first; `grid` and `prefix` are the user's.

    Raises an `UnreadableError` if the positions of the tokens cannot be determined.
    """
    tokens, shape = rows.keys, tuple(images.shape)
    if rows.queries != tokens:
        raise UnreadableError(f"{rows.queries} queries look at {tokens} keys, which is no attention among tokens")
    for frame in reversed(running):
        if getattr(frame.module, "shift_size", None) is not None:
            return _windows(frame, rows, len(images))
    if images.dim() == 4 and rows.batch != len(images):
        raise UnreadableError(f"it attends in {rows.batch} sequences for {len(images)} images, cut in an unknown way")
    if images.dim() == 3 and rows.batch not in shape[:2]:
        raise UnreadableError(f"it attends in {rows.batch} sequences for the input {shape}")
    modules = [frame.module for frame in reversed(running)]
    hints = [hint for module in modules for hint in _hints(module, images)]
    if grid is None:
        layout = _model_layout(hints, tokens, images, prefix)
    else:
        layout = _user_layout(modules, hints, tokens, grid, prefix)
    if layout is not None:
        return layout
    given = "" if prefix is None else f", prefix={prefix}"
    if images.dim() == 3 and (tokens, rows.batch) == shape[:2] and rows.batch != tokens:
        why = f"{grid=}: the input {shape} has its tokens first. Where it is split, put the batch first"
    elif grid is None:
        why = f"the input {shape}{given}; pass grid=(height, width) and prefix="
    else:
        why = f"{grid=}{given}, which has {math.prod(grid) + (prefix or 0)}; pass a smaller grid="
    raise UnreadableError(f"its {tokens} tokens make no grid of {why}")


def _model_layout(hints: Sequence[_Hint], tokens: int, images: Tensor, prefix: int | None) -> TokenLayout | None:
    """The grid by the model's hints or, without any, of square patches after no token or one; None if none fits."""
    for hint in hints:
        before = hint.prefix(tokens)
        if before in (hint.prefixes if prefix is None else {prefix}):
            return TokenLayout(hint.sizes, before, hint.suffix)
    if not hints and images.dim() == 4:
        for before in (0, 1) if prefix is None else (prefix,):
            square = _square_patches(tokens - before, images)
            if square is not None:
                return TokenLayout(square, before)
    return None


def _user_layout(
    modules: Sequence[nn.Module], hints: Sequence[_Hint], tokens: int, grid: tuple[int, ...], prefix: int | None
) -> TokenLayout | None:
    """The user's grid, or None if it is too large; the user or the model says which other tokens are before it."""
    others = tokens - math.prod(grid)
    if others < (prefix or 0):
        return None
    fitting = [hint for hint in hints if hint.prefix(tokens) in hint.prefixes]
    if prefix is not None:
        if prefix < others and fitting and all(hint.sizes != grid for hint in fitting):
            given = f"{grid=}, {prefix=} leave {others - prefix} of its {tokens} tokens over"
            raise UnreadableError(
                f"{given}, while the model itself says a grid of {fitting[0].sizes}; pass that or none"
            )
        return TokenLayout(grid, prefix, others - prefix)
    if others < 2:
        return TokenLayout(grid, others)
    known = [(hint.prefix(tokens), hint.suffix) for hint in fitting if hint.sizes == grid]
    known += [pair for module in modules if (pair := _other_tokens(module)) is not None and sum(pair) == others]
    if known:
        return TokenLayout(grid, *known[0])
    raise UnreadableError(
        f"its {tokens} tokens are {others} more than those of {grid=}; pass prefix= with grid=, how many of the "
        f"{others} stand before the image"
    )


def _hints(module: nn.Module, images: Tensor) -> Iterator[_Hint]:
    """Hints of a module: patches of timm, Hugging Face and torchvision."""
    if images.dim() != 4:
        return
    height, width = images.shape[2:]
    known, embed = _other_tokens(module), getattr(module, "patch_embed", None)
    early = {0, 1} if known is None else {0, known[0]}  # class tokens may join later than the first blocks
    before, after = ({0, 1, 2}, 0) if known is None else ({known[0]}, known[1])
    fixed = pair_of(getattr(embed, "grid_size", None))
    if fixed is not None and pair_of(getattr(embed, "img_size", None)) == (height, width):
        yield _Hint(fixed, frozenset(early))
    holders = ((embed, early, 0), (getattr(module, "config", None), before, after), (module, {0, 1}, 0))
    for holder, prefixes, suffix in holders:
        patch = pair_of(getattr(holder, "patch_size", None))
        if patch is not None:  # without and with patches that extend beyond the border
            yield _Hint((height // patch[0], width // patch[1]), frozenset(prefixes), suffix)
            yield _Hint((math.ceil(height / patch[0]), math.ceil(width / patch[1])), frozenset(prefixes), suffix)


def _other_tokens(module: Any) -> tuple[int, int] | None:
    """Tokens before and after the image's, if a module says so: timm's prefix, Hugging Face's registers and YOLOS."""
    if getattr(module, "patch_embed", None) is not None and getattr(module, "num_prefix_tokens", None) is not None:
        return int(module.num_prefix_tokens), 0
    config = getattr(module, "config", None)
    registers, detections = (getattr(config, f"num_{kind}_tokens", None) for kind in ("register", "detection"))
    return None if registers is None and detections is None else (1 + int(registers or 0), int(detections or 0))


def pair_of(value: Any, *, least: int = 1) -> tuple[int, int] | None:
    """A size, one integer or two, as (height, width); None for what is no size."""
    if isinstance(value, int) and value >= least:
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


def _windows(frame: Running, rows: TokenRows, images: int) -> TokenLayout:
    """The windows of a block, from its own sizes and the shape of its input."""
    block: Any = frame.module
    window, shift = pair_of(getattr(block, "window_size", None)), pair_of(block.shift_size, least=0)
    sizes = frame.resolution
    if frame.shape is not None and len(frame.shape) == 4:
        sizes = (frame.shape[1], frame.shape[2])
    if window is None or shift is None or sizes is None:
        raise UnreadableError(f"its windows are those of {frame.name!r}, whose sizes are not known")
    # timm moves the tokens, then pads them; the others pad first, and do not move what fits in one window. Blocks of
    # timm and of Hugging Face say for which resolution they were built, torchvision's do not.
    from_timm = type(block).__module__.startswith("timm.") or getattr(block, "input_resolution", None) is not None
    pad_first = hasattr(block, "maybe_pad") or not from_timm
    if pad_first:
        shift = (shift[0] * (sizes[0] > window[0]), shift[1] * (sizes[1] > window[1]))
    layout = window_layout(sizes, window, shift=shift, pad_first=pad_first)
    if rows.keys != math.prod(window) or rows.batch != layout.parts * images:
        got = f"{rows.batch} sequences of {rows.keys} tokens"
        raise UnreadableError(f"{got} are no windows of {window} over {sizes} tokens of {images} images")
    return layout
