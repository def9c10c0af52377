"""The K x K shifts of every token of an image or window, and which of them it can read.

    r(q) = sum_delta a(delta) / sum_{delta that q can read} a(delta)      at most K^2

gives the weight of shifts that leave the image, or lead to a masked token, to the others by their mean attention a.
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
    """The shifts of a K x K kernel, row by row, at the tokens of a grid."""

    index: Int[Tensor, "taps n"]  # token at each shift, plus 1; 0 outside the grid
    inside: Float[Tensor, "w taps n"]  # 1 where a shift can be read, else 0; per sequence of an image, or one for all
    spread: Float[Tensor, "w n n"] | None  # weights of the mean over the keys that a query can read; None if all

    @classmethod
    def of(cls, grid: tuple[int, int], kernel_size: int, like: Tensor) -> "Taps":
        """The taps of an odd kernel where nothing is masked, with the device and dtype of `like`."""
        places = torch.arange(1.0, grid[0] * grid[1] + 1, dtype=torch.float64, device=like.device)
        index = F.unfold(places.reshape(1, 1, *grid), kernel_size, padding=kernel_size // 2)[0].long()
        return cls(index, (index > 0)[None].to(like.dtype), None)

    def masked(self, allowed: Bool[Tensor, "w n n"]) -> "Taps":
        """The same shifts where `allowed` says which keys a query can read."""
        shares = allowed.to(self.inside.dtype)
        inside = F.pad(shares, (1, 0)).gather(2, self.index.T.expand(len(allowed), -1, -1)).transpose(1, 2)
        return Taps(self.index, inside, shares / shares.sum(2, keepdim=True))

    def ratio(self, profile: Float[Tensor, "h K K"]) -> Float[Tensor, "w h n"]:
        """r of the module's formula, with the profile a."""
        mass = profile.flatten(1)
        total = mass.sum(1)[:, None]
        inside = torch.einsum("wtn,ht->whn", self.inside, mass)
        tiny = torch.finfo(profile.dtype).tiny
        return (total / inside.clamp_min(tiny)).clamp_max(mass.shape[1]).where(total > 0, 1.0)

    def mass(self, profile: Float[Tensor, "h K K"]) -> Float[Tensor, "h"]:
        """Mean attention of a query to all shifts that it can read."""
        return profile.flatten(1) @ self.inside.mean((0, 2))

    def columns(
        self, values: Float[Tensor, "b h n d"], profile: Float[Tensor, "h K K"]
    ) -> Iterator[Float[Tensor, "b h n d"]]:
        """Yield the values at each shift times r, then their mean. Sequences of one image are consecutive."""
        by_sequence = values.unflatten(0, (-1, len(self.inside)))
        padded = F.pad(by_sequence, (0, 0, 1, 0))
        weights = self.ratio(profile)[:, :, None] * self.inside[:, None]  # (w, h, taps, n)
        for tap, places in enumerate(self.index):
            yield (padded[:, :, :, places] * weights[:, :, tap, :, None]).flatten(0, 1)
        if self.spread is None:
            yield values.mean(2, keepdim=True).expand_as(values)
        else:
            yield (self.spread[:, None] @ by_sequence).flatten(0, 1)
