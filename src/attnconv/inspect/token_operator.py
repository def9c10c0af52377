"""Attention between the tokens of an image, in models with class tokens, registers or windows.

    A[q, k] = p(token k | token q)      for tokens q, k of the image,      padding_mass(q) = 1 - sum_k A[q, k]

Rows are not renormalised: attention to class tokens, registers or the padding of a window counts as padding mass. The
positions of tokens are inferred from the attributes of the innermost enclosing module that has such attributes. A wrong
guess would distort all maps, so inconsistent sizes raise an error.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnconv._util.value_checks import indices
from attnconv.grid import Grid
from attnconv.inspect.attention_calls import TokenRows, UnreadableError
from attnconv.operators.base import AttentionOperator, Images, Outputs, Queries, Weights, all_queries, query_indices
from attnconv.operators.kernels.contractions import contract_rows

BLOCK = 2**25  # maximum number of probabilities per block: 128 MiB in float32


@final
@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Positions of the tokens of one attention call in the image."""

    sizes: tuple[int, ...]  # tokens per axis of the image, (height, width)
    prefix: int = 0  # number of tokens before the image's tokens: class tokens, registers
    suffix: int = 0  # number of tokens after the image's tokens: detection tokens
    window: tuple[int, int] | None = None  # tokens per axis of a window, (height, width); None without windows
    tokens: Int[Tensor, "windows places"] | None = None  # index of the image's token at each place, -1 for padding

    @property
    def parts(self) -> int:
        """Number of sequences per image."""
        return 1 if self.tokens is None else len(self.tokens)


def window_layout(
    sizes: tuple[int, int], window: tuple[int, int], *, shift: tuple[int, int], pad_first: bool
) -> TokenLayout:
    """Return the layout of images that are shifted cyclically up and left by `shift`, and split into windows.

    Images are padded to a multiple of the window size, before (`pad_first`) or after the shift. Windows are row-major.
    """
    counts = [math.ceil(size / length) for size, length in zip(sizes, window, strict=True)]
    axes = []  # index of the token at each place of an axis after shift and padding, -1 for padding
    for size, length, count, step in zip(sizes, window, counts, shift, strict=True):
        places, full = torch.arange(count * length), count * length
        moved = (places + step) % full if pad_first else torch.where(places < size, (places + step) % size, -1)
        axes.append(moved.where(moved < size, -1))
    rows, columns = axes[0][:, None], axes[1]
    tokens = (rows * sizes[1] + columns).masked_fill((rows < 0) | (columns < 0), -1)
    tokens = tokens.reshape(counts[0], window[0], counts[1], window[1]).transpose(1, 2).reshape(math.prod(counts), -1)
    return TokenLayout(sizes, window=window if len(tokens) > 1 else None, tokens=tokens)


@final
class TokenOperator(AttentionOperator):
    """Operator of one attention call in any model, as passed to `visit` by `visit_attention`.

    Rows are computed on demand, in float32 or higher precision; for unfused attention, this works only during `visit`.

    Args:
        source: Attention between all tokens of the call.
        layout: Positions of these tokens in the image.

    Attributes:
        prefix, suffix, window: Numbers of tokens before and after the image's tokens; window size in tokens, or None.

    Example:
        >>> from attnconv.inspect.attention_calls import product_rows
        >>> from attnconv.inspect.token_operator import TokenLayout
        >>> query = torch.zeros(1, 2, 7, 4)  # 2 heads, a class token and 2 x 3 tokens, uniform attention
        >>> operator = TokenOperator(product_rows(query, query), TokenLayout((2, 3), prefix=1))
        >>> torch.testing.assert_close(operator.padding_mass(torch.tensor([5])), torch.full((1, 2, 1), 1 / 7))
    """

    def __init__(self, source: TokenRows, layout: TokenLayout) -> None:
        self._source, self._layout, self.device = source, layout, source.device
        # Tokens outside the image count as padding; the grid itself has no padding.
        self.grid = Grid.make(layout.sizes, border="zero")
        self.heads, self.batch = source.heads, source.batch // layout.parts
        self.prefix, self.suffix, self.window = layout.prefix, layout.suffix, layout.window

    def rows(self, queries: Queries) -> Float[Tensor, "#b h r m"]:
        return self._split(queries)[0]

    def padding_mass(self, queries: Queries) -> Float[Tensor, "#b h r"]:
        return self._split(queries)[1]

    def prefix_rows(self, tokens: Int[Tensor, "p"]) -> Float[Tensor, "b h p m"]:
        """Return the attention of class tokens and registers to the image's tokens (flat, row-major).

        `tokens` are indices from 0 (usually the class token) to `prefix` - 1; other indices raise a `ValueError`.
        """
        indices("tokens", tokens.tolist(), self.prefix)
        return self._source.rows(tokens)[..., self.prefix : self.prefix + self.grid.key_count]

    def token_rows(self) -> Float[Tensor, "s h tokens tokens"]:
        """Return the attention between all tokens of each sequence, including class tokens and padding of windows."""
        return self._source.rows(torch.arange(self._source.queries, device=self.device))

    def contract(self, x: Images, weight: Weights, groups: int = 1) -> Outputs:
        keys = x.flatten(1, -2)
        parts = [contract_rows(self.rows(some), keys, weight, groups) for some in self._blocks()]
        return torch.cat(parts, 1).unflatten(1, self.grid.query_sizes)

    def apply(self, values: Float[Tensor, "b h *sizes e"]) -> Float[Tensor, "b h *queries e"]:
        keys = values.flatten(2, -2)
        parts = [self.rows(some).to(keys.dtype) @ keys for some in self._blocks()]
        return torch.cat(parts, 2).unflatten(2, self.grid.query_sizes)

    def _blocks(self) -> tuple[Tensor, ...]:
        length = max(1, BLOCK // (self.batch * self.heads * self._source.keys * self._layout.parts))
        return all_queries(self.grid, self.device).split(length)

    def _split(self, queries: Queries) -> tuple[Tensor, Tensor]:
        """Return the probabilities of the image's tokens, (b, h, r, m), and the sum of all others, (b, h, r)."""
        chosen = query_indices(queries, self.grid, self.device)
        if self._layout.tokens is not None:
            return self._split_windows(chosen, self._layout.tokens.to(self.device))
        rows = self._source.rows(chosen + self.prefix)
        stop = self.prefix + self.grid.key_count
        return rows[..., self.prefix : stop], rows[..., : self.prefix].sum(-1) + rows[..., stop:].sum(-1)

    def _split_windows(self, queries: Tensor, tokens: Int[Tensor, "windows places"]) -> tuple[Tensor, Tensor]:
        """Implement `_split` for windows; only the windows that contain these queries are computed."""
        length, count = tokens.shape[1], self.grid.key_count
        places = (tokens.flatten() >= 0).nonzero().squeeze(1)
        place_of = torch.empty_like(places)
        place_of[tokens.flatten()[places]] = places
        window, inside = place_of[queries] // length, place_of[queries] % length
        touched, index = torch.unique(window, return_inverse=True)
        first = torch.arange(self.batch, device=queries.device)[:, None] * len(tokens)
        local = self._source.rows(torch.arange(length, device=queries.device), (first + touched).flatten())
        local = local.unflatten(0, (self.batch, len(touched)))
        chosen = local[:, index, :, inside].permute(1, 2, 0, 3)  # (b, h, r, places)
        # Attention to padding is collected in one extra column after the last token.
        columns = tokens[window].where(tokens[window] >= 0, count).expand(chosen.shape)
        out = chosen.new_zeros(*chosen.shape[:3], count + 1).scatter_add_(-1, columns, chosen)
        return out[..., :count], out[..., count]


@final
@dataclass
class Running:
    """A module whose forward pass is running."""

    name: str  # in the model
    module: nn.Module
    shape: tuple[int, ...] | None  # shape of the first input, if it is a tensor
    resolution: tuple[int, int] | None  # the second input, if it is a size in tokens, (height, width)
    calls: int = 0  # number of attention calls so far
    pending: TokenRows | None = None  # the first of two attention maps that the module mixes


Hint: TypeAlias = tuple[TokenLayout, set[int]]  # a layout, and the prefixes for which it is valid


def layout_of(
    running: Sequence[Running], rows: TokenRows, images: Tensor, grid: tuple[int, ...] | None, prefix: int | None
) -> TokenLayout:
    """Return the token layout of a call in the modules `running` (outermost first), given `grid` and `prefix`, if any.

    Raise an `UnreadableError` if the positions of the tokens cannot be determined.
    """
    tokens, shape = rows.keys, tuple(images.shape)
    if rows.queries != tokens:
        raise UnreadableError(f"the number of queries ({rows.queries}) differs from the number of keys ({tokens})")
    for frame in reversed(running):
        if getattr(frame.module, "shift_size", None) is not None:
            return _windows(frame, rows, len(images))
    if images.dim() == 4 and rows.batch != len(images):
        raise UnreadableError(f"it splits {len(images)} images into {rows.batch} sequences by an unknown method")
    if images.dim() == 3 and rows.batch not in shape[:2]:
        raise UnreadableError(f"its {rows.batch} sequences do not match the input of shape {shape}")
    modules = [frame.module for frame in reversed(running)]
    hints = [hint for module in modules for hint in _hints(module, images, tokens)]
    if grid is None:
        layout = _model_layout(hints, tokens, images, prefix)
    else:
        layout = _user_layout(modules, hints, tokens, grid, prefix)
    if layout is not None:
        return layout
    given = "" if prefix is None else f", prefix={prefix}"
    if images.dim() == 3 and (tokens, rows.batch) == shape[:2] and rows.batch != tokens:
        why = f"{grid=}: the input of shape {shape} has its tokens first; put the batch axis first"
    elif grid is None:
        why = f"the input of shape {shape}{given}; pass grid=(height, width) and prefix="
    else:
        why = f"{grid=}{given}, which requires {math.prod(grid) + (prefix or 0)}; pass a smaller grid="
    raise UnreadableError(f"its {tokens} tokens do not match {why}")


def _model_layout(hints: Sequence[Hint], tokens: int, images: Tensor, prefix: int | None) -> TokenLayout | None:
    """Return the first of the model's hints that fits or, without hints, square patches with a prefix of 0 or 1."""
    for layout, prefixes in hints:
        if layout.prefix in (prefixes if prefix is None else {prefix}):
            return layout
    if not hints and images.dim() == 4:
        for before in (0, 1) if prefix is None else (prefix,):
            square = _square_patches(tokens - before, images)
            if square is not None:
                return TokenLayout(square, before)
    return None


def _user_layout(
    modules: Sequence[nn.Module], hints: Sequence[Hint], tokens: int, grid: tuple[int, ...], prefix: int | None
) -> TokenLayout | None:
    """Return the layout of the user's grid; None if it is too large. The prefix comes from the user or the model."""
    others = tokens - math.prod(grid)
    if others < (prefix or 0):
        return None
    fitting = [layout for layout, prefixes in hints if layout.prefix in prefixes]
    if prefix is not None:
        if prefix < others and fitting and all(layout.sizes != grid for layout in fitting):
            given = f"{grid=}, {prefix=} cover all but {others - prefix} of its {tokens} tokens"
            raise UnreadableError(f"{given}, but the model's grid is {fitting[0].sizes}; pass that grid, or no grid")
        return TokenLayout(grid, prefix, others - prefix)
    if others < 2:
        return TokenLayout(grid, others)
    known = [(layout.prefix, layout.suffix) for layout in fitting if layout.sizes == grid]
    known += [pair for module in modules if (pair := _other_tokens(module)) is not None and sum(pair) == others]
    if known:
        return TokenLayout(grid, *known[0])
    raise UnreadableError(
        f"{grid=} covers all but {others} of its {tokens} tokens; pass prefix=, the number of those tokens "
        "that come before the image's tokens"
    )


def _hints(module: nn.Module, images: Tensor, tokens: int) -> Iterator[Hint]:
    """Yield the layouts that a module's attributes suggest, as named in timm, Hugging Face and torchvision."""
    if images.dim() != 4:
        return

    def hint(sizes: tuple[int, int], prefixes: set[int], suffix: int = 0) -> Hint:
        return TokenLayout(sizes, tokens - math.prod(sizes) - suffix, suffix), prefixes

    height, width = images.shape[2:]
    known, embed = _other_tokens(module), getattr(module, "patch_embed", None)
    early = {0, 1} if known is None else {0, known[0]}  # some models add class tokens after the first blocks
    before, after = ({0, 1, 2}, 0) if known is None else ({known[0]}, known[1])
    fixed = pair_of(getattr(embed, "grid_size", None))
    if fixed is not None and pair_of(getattr(embed, "img_size", None)) == (height, width):
        yield hint(fixed, early)
    holders = ((embed, early, 0), (getattr(module, "config", None), before, after), (module, {0, 1}, 0))
    for holder, prefixes, suffix in holders:
        patch = pair_of(getattr(holder, "patch_size", None))
        if patch is not None:  # first without, then with padding of the image to whole patches
            yield hint((height // patch[0], width // patch[1]), prefixes, suffix)
            yield hint((math.ceil(height / patch[0]), math.ceil(width / patch[1])), prefixes, suffix)


def _other_tokens(module: Any) -> tuple[int, int] | None:
    """Return the numbers of tokens before and after the image's tokens, from attributes of timm and Hugging Face."""
    if getattr(module, "patch_embed", None) is not None and getattr(module, "num_prefix_tokens", None) is not None:
        return int(module.num_prefix_tokens), 0
    config = getattr(module, "config", None)
    registers, detections = (getattr(config, f"num_{kind}_tokens", None) for kind in ("register", "detection"))
    return None if registers is None and detections is None else (1 + int(registers or 0), int(detections or 0))


def pair_of(value: Any, *, least: int = 1) -> tuple[int, int] | None:
    """Return a size of one or two integers as (height, width); None if the value is not a size."""
    if isinstance(value, int) and value >= least:
        return value, value
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(part, int) for part in value):
        return value[0], value[1]
    return None


def _square_patches(tokens: int, images: Tensor) -> tuple[int, int] | None:
    """Return the grid of square patches that fill the image; None if there is none."""
    height, width = images.shape[2:]
    rows = math.isqrt(max(0, tokens) * height // max(1, width))
    fits = rows > 0 and rows * rows * width == tokens * height and tokens % rows == 0
    return (rows, tokens // rows) if fits else None


def _windows(frame: Running, rows: TokenRows, images: int) -> TokenLayout:
    """Return the layout of a block's windows, from its attributes and the shape of its input."""
    block: Any = frame.module
    window, shift = pair_of(getattr(block, "window_size", None)), pair_of(block.shift_size, least=0)
    sizes = (frame.shape[1], frame.shape[2]) if frame.shape is not None and len(frame.shape) == 4 else frame.resolution
    if window is None or shift is None or sizes is None:
        raise UnreadableError(f"it attends within the windows of {frame.name!r}, and their sizes are unknown")
    # timm shifts, then pads; the others pad first, and do not shift an axis that fits in one window. Blocks from timm
    # and Hugging Face store the resolution for which they were built; those from torchvision do not.
    from_timm = type(block).__module__.startswith("timm.") or getattr(block, "input_resolution", None) is not None
    pad_first = hasattr(block, "maybe_pad") or not from_timm
    if pad_first:
        shift = (shift[0] * (sizes[0] > window[0]), shift[1] * (sizes[1] > window[1]))
    layout = window_layout(sizes, window, shift=shift, pad_first=pad_first)
    if rows.keys != math.prod(window) or rows.batch != layout.parts * images:
        got = f"{rows.batch} sequences of {rows.keys} tokens"
        raise UnreadableError(f"its {got} do not match windows of {window} on {images} images of {sizes} tokens")
    return layout
