"""The K x K shifts of every token of an image, or of a window, and which of them it may read.

A shift may leave the image, or lead to a token that a mask blocks, as in the shifted windows of Swin, where the last
windows hold parts of opposite borders. What a fixed kernel would put there goes to the taps that stay: with the mean
attention per shift a(delta),

    r(q) = sum_delta a(delta) / sum_{delta that q may read} a(delta)      at most K^2
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


@final
@dataclass(frozen=True, eq=False)
class Taps:
    """The shifts of a K x K kernel, row by row, at the tokens of a grid.

    Attributes:
        index: Token at each shift, plus 1; 0 outside the grid.
        inside: 1 where a shift may be read and 0 elsewhere; of each sequence of an image, or of all alike.
        spread: What an even mean over the keys that a query may look at takes of each; None for the mean of all.
    """

    index: Int[Tensor, "taps n"]
    inside: Float[Tensor, "w taps n"]
    spread: Float[Tensor, "w n n"] | None

    @classmethod
    def of(cls, grid: tuple[int, int], kernel_size: int, like: Tensor) -> "Taps":
        """Those of a kernel where nothing is blocked.

        Args:
            grid: (height, width).
            kernel_size: K, odd.
            like: Gives device and dtype.

        Example:
            >>> Taps.of((1, 3), 3, torch.zeros(())).index[3:6].tolist()
            [[0, 1, 2], [1, 2, 3], [2, 3, 0]]
        """
        places = torch.arange(1.0, grid[0] * grid[1] + 1, dtype=torch.float64, device=like.device)
        index = F.unfold(places.reshape(1, 1, *grid), kernel_size, padding=kernel_size // 2)[0].long()
        return cls(index, (index > 0)[None].to(like.dtype), None)

    def masked(self, allowed: Bool[Tensor, "w n n"]) -> "Taps":
        """The same shifts under a mask.

        Args:
            allowed: Which keys a query may look at.
        """
        shares = allowed.to(self.inside.dtype)
        inside = F.pad(shares, (1, 0)).gather(2, self.index.T.expand(len(allowed), -1, -1)).transpose(1, 2)
        return Taps(self.index, inside, shares / shares.sum(2, keepdim=True))

    def ratio(self, profile: Float[Tensor, "h K K"]) -> Float[Tensor, "w h n"]:
        """r of the module's formula.

        Args:
            profile: a, not negative.

        Returns:
            1 where all shifts may be read, up to K^2 elsewhere.

        Example:
            >>> Taps.of((3, 3), 3, torch.zeros(())).ratio(torch.ones(1, 3, 3))[0, 0].reshape(3, 3).tolist()
            [[2.25, 1.5, 2.25], [1.5, 1.0, 1.5], [2.25, 1.5, 2.25]]
        """
        mass = profile.flatten(1)
        total = mass.sum(1)[:, None]
        inside = torch.einsum("wtn,ht->whn", self.inside, mass)
        tiny = torch.finfo(profile.dtype).tiny
        return (total / inside.clamp_min(tiny)).clamp_max(mass.shape[1]).where(total > 0, 1.0)

    def mass(self, profile: Float[Tensor, "h K K"]) -> Float[Tensor, "h"]:
        """What queries spend on the shifts in the mean: each shift by the share of queries that may read it.

        Args:
            profile: a.

        Example:
            >>> Taps.of((2, 2), 3, torch.zeros(())).mass(torch.full((1, 3, 3), 0.25))  # all see all four
            tensor([1.])
        """
        return profile.flatten(1) @ self.inside.mean((0, 2))

    def columns(
        self, values: Float[Tensor, "b h n d"], profile: Float[Tensor, "h K K"]
    ) -> Iterator[Float[Tensor, "b h n d"]]:
        """The values that a kernel mixes, one shift after another, times r; then the mean of all that may be read.

        Args:
            values: Of the grid's tokens; sequences of one image follow one another.
            profile: a.
        """
        count = len(self.inside)
        by_sequence = values.unflatten(0, (-1, count))
        padded = F.pad(by_sequence, (0, 0, 1, 0))
        weights = self.ratio(profile)[:, :, None] * self.inside[:, None]  # (w, h, taps, n)
        for tap, places in enumerate(self.index):
            yield (padded[:, :, :, places] * weights[:, :, tap, :, None]).flatten(0, 1)
        if self.spread is None:
            yield values.mean(2, keepdim=True).expand_as(values)
        else:
            yield (self.spread[:, None] @ by_sequence).flatten(0, 1)
