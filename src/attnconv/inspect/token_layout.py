"""Where the tokens of one attention call stand in the image.

    Whole      prefix tokens (class token, registers), then the image's tokens row by row, then other tokens if any
    Windows    the image's tokens, shifted cyclically and cut into windows, each a sequence of its own

A layout turns image tokens into rows of a call and the call's keys back into image tokens. What falls elsewhere, on
tokens before or after the image's or on the padding of a window, is summed apart.
"""

import abc
import math
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnconv.inspect.attention_rows import TokenRows


class TokenLayout(abc.ABC):
    """Places of tokens. Abstract: see `Whole` and `Windows`.

    Attributes:
        sizes: Tokens of the image, (height, width).
        prefix: Number of tokens that stand before those of the image.
        suffix: Number of tokens that stand after them.
        parts: Number of sequences that one image is cut into.
        window: Tokens of each of these sequences, (height, width); None where an image is one sequence.
    """

    sizes: tuple[int, ...]
    prefix: int
    suffix: int
    parts: int
    window: tuple[int, int] | None

    @abc.abstractmethod
    def rows(
        self, source: TokenRows, queries: Int[Tensor, "r"]
    ) -> tuple[Float[Tensor, "b h r n"], Float[Tensor, "b h r"]]:
        """Probabilities of image tokens over image tokens, and what falls elsewhere."""


@final
class Whole(TokenLayout):
    """Every image is one sequence.

    Args:
        sizes: Tokens of the image.
        prefix: Tokens before them.
        suffix: Tokens after them.
    """

    def __init__(self, sizes: tuple[int, ...], prefix: int, suffix: int = 0) -> None:
        self.sizes, self.prefix, self.suffix, self.parts, self.window = sizes, prefix, suffix, 1, None

    def rows(
        self, source: TokenRows, queries: Int[Tensor, "r"]
    ) -> tuple[Float[Tensor, "b h r n"], Float[Tensor, "b h r"]]:
        rows = source.rows(queries + self.prefix)
        stop = self.prefix + math.prod(self.sizes)
        return rows[..., self.prefix : stop], rows[..., : self.prefix].sum(-1) + rows[..., stop:].sum(-1)


@final
class Windows(TokenLayout):
    """Every image is cut into windows, row by row, after a cyclic shift up and to the left.

    Args:
        sizes: Tokens of the image, (height, width).
        window: Tokens of a window, (height, width).
        shift: By how much the tokens move up and left before they are cut, (rows, columns).
        pad_first: Whether tokens are padded to whole windows before they move or (False) after.
    """

    def __init__(
        self, sizes: tuple[int, int], window: tuple[int, int], *, shift: tuple[int, int], pad_first: bool
    ) -> None:
        self.sizes, self.prefix, self.suffix = sizes, 0, 0
        self._counts = tuple(math.ceil(size / length) for size, length in zip(sizes, window, strict=True))
        self.parts = math.prod(self._counts)
        self.window = window if self.parts > 1 else None
        padded = [count * length for count, length in zip(self._counts, window, strict=True)]
        axes = []  # the token at each place along an axis after shift and padding, -1 for padding
        for size, full, step in zip(sizes, padded, shift, strict=True):
            places = torch.arange(full)
            moved = (places + step) % full if pad_first else torch.where(places < size, (places + step) % size, -1)
            axes.append(moved.where(moved < size, -1))
        rows, columns = axes
        tokens = (rows[:, None] * sizes[1] + columns).masked_fill((rows[:, None] < 0) | (columns < 0), -1)
        cut = tokens.reshape(self._counts[0], window[0], self._counts[1], window[1])
        self._tokens = cut.transpose(1, 2).reshape(self.parts, -1)  # image token at (window, place in it), or -1

    def rows(
        self, source: TokenRows, queries: Int[Tensor, "r"]
    ) -> tuple[Float[Tensor, "b h r n"], Float[Tensor, "b h r"]]:
        device, length, count = queries.device, self._tokens.shape[1], math.prod(self.sizes)
        tokens = self._tokens.to(device)
        real = tokens.flatten() >= 0
        place_of = torch.empty(count, dtype=torch.int64, device=device)
        place_of[tokens.flatten()[real]] = torch.arange(tokens.numel(), device=device)[real]
        window, inside = place_of[queries] // length, place_of[queries] % length
        touched, index = torch.unique(window, return_inverse=True)
        batch = source.batch // self.parts
        sequences = (torch.arange(batch, device=device)[:, None] * self.parts + touched).flatten()
        # Few windows hold the queries of a block, so all their rows are made: tokens x window of them, never more.
        local = source.rows(torch.arange(length, device=device), sequences).unflatten(0, (batch, len(touched)))
        chosen = local[:, index, :, inside].permute(1, 2, 0, 3)  # (b, h, r, places)
        keys = tokens[window]  # (r, places)
        # Padding goes to one column past the last token, and is taken off again as mass elsewhere.
        out = chosen.new_zeros(*chosen.shape[:3], count + 1)
        columns = keys.where(keys >= 0, count).expand(chosen.shape)
        out.scatter_add_(-1, columns, chosen)
        return out[..., :count], out[..., count]
