"""A layer's geometry over an image: stride, padding and the rest of a convolution's arguments."""

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from attnconv._util.errors import bad
from attnconv._util.value_checks import whole
from attnconv.grid import Border, Grid, Padding, check_border, padding_pairs, per_axis

_known_grid = functools.lru_cache(Grid.make)


@final
@dataclass(frozen=True)
class Geometry:
    """Validated geometry of a layer; see `SelfAttention` for the arguments."""

    dims: int
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    border: Border
    window: tuple[int, ...] | None
    transposed: bool
    output_padding: tuple[int, ...]

    @classmethod
    def make(
        cls,
        dims: int,
        *,
        stride: int | Sequence[int] = 1,
        padding: Padding = 0,
        dilation: int | Sequence[int] = 1,
        border: Border = "renormalise",
        window: Sequence[int] | None = None,
        transposed: bool = False,
        output_padding: int | Sequence[int] = 0,
    ) -> "Geometry":
        """From numbers, or one number per axis."""
        check_border(border)
        made = cls(
            dims,
            per_axis("stride", stride, dims, least=1),
            padding_pairs(padding, dims),
            per_axis("dilation", dilation, dims, least=1),
            border,
            None if window is None else per_axis("window", window, dims, least=1),
            transposed,
            per_axis("output_padding", output_padding, dims, least=0),
        )
        if border == "renormalise" and made.window is None and any(pad != (0, 0) for pad in made.padding):
            warnings.warn("padding has no effect under border='renormalise': it adds no points.", stacklevel=3)
        if not transposed:
            if any(made.output_padding):
                raise ValueError(bad("output_padding", "is for transposed layers only", made.output_padding))
        elif border != "zero" or made.window is None:
            got = f"border={border!r}, window={made.window}"
            raise ValueError(bad("transposed", "needs border 'zero' and the window of a kernel", got))
        return made

    @property
    def kernel_size(self) -> tuple[int, ...] | None:
        """Kernel size per axis of the window; None without a window."""
        if self.window is None:
            return None
        return tuple((extent - 1) // step + 1 for extent, step in zip(self.window, self.dilation, strict=True))

    def grid(self, sizes: Sequence[int], output_size: Sequence[int] | None = None) -> Grid:
        """See `SelfAttention.grid`."""
        if self.transposed:
            return self._transposed(sizes, output_size)
        if output_size is not None:
            raise ValueError(bad("output_size", "is for transposed layers only", tuple(output_size)))
        known = not torch.compiler.is_compiling() and all(type(size) is int for size in sizes)
        make = _known_grid if known else Grid.make
        return make(tuple(sizes), stride=self.stride, padding=self.padding, border=self.border, window=self.window)

    def _transposed(self, sizes: Sequence[int], output_size: Sequence[int] | None) -> Grid:
        assert self.window is not None
        extra = self.output_padding
        if output_size is not None:
            least = Grid.transposed(sizes, stride=self.stride, padding=self.padding, window=self.window).query_sizes
            wanted = tuple(output_size)[-self.dims :]
            extra = tuple(want - have for want, have in zip(wanted, least, strict=False))
            reached = all(0 <= more < step for more, step in zip(extra, self.stride, strict=False))
            if len(wanted) < self.dims or not reached:
                most = tuple(have + step - 1 for have, step in zip(least, self.stride, strict=True))
                raise ValueError(bad("output_size", f"must lie between {least} and {most}", tuple(output_size)))
        return Grid.transposed(
            sizes, stride=self.stride, padding=self.padding, output_padding=extra, window=self.window
        )

    def __str__(self) -> str:
        """As the arguments of a layer that differ from the defaults."""
        text = f"stride={self.stride}, border={self.border}"
        if self.transposed:
            text += f", transposed=True, output_padding={self.output_padding}"
        if any(pad != (0, 0) for pad in self.padding):
            text += f", padding={self.padding}"
        return text


def check_groups(inputs: int, outputs: int, groups: int, head_channels: int | None) -> None:
    """Check that channel groups divide the channels, and that weights of several groups are not factored."""
    if inputs % groups or outputs % groups:
        got = f"groups={groups} for {inputs} -> {outputs} channels"
        raise ValueError(bad("groups", "must divide in_channels and out_channels", got))
    if head_channels is not None and whole("head_channels", head_channels, 1) and groups > 1:
        got = f"head_channels={head_channels} with groups={groups}"
        raise ValueError(bad("head_channels", "factored weights have one group", got))
