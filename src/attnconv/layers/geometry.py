"""Base class that computes the grid of a layer from arguments like those of nn.Conv*d."""

import functools
import warnings
from collections.abc import Sequence
from typing import ClassVar, final

import torch
from torch import nn

from attnconv._util.errors import bad
from attnconv.grid import Border, Grid, Padding, check_border, padding_pairs, per_axis

_known_grid = functools.lru_cache(Grid.make)


class GridLayer(nn.Module):
    """Base class of layers whose grid follows from stride, padding, dilation, border, window and image size."""

    dims: ClassVar[int]

    def __init__(
        self,
        *,
        stride: int | Sequence[int],
        padding: Padding,
        dilation: int | Sequence[int],
        border: Border,
        window: Sequence[int] | None,
        transposed: bool,
        output_padding: int | Sequence[int],
    ) -> None:
        super().__init__()
        check_border(border)
        self.stride = per_axis("stride", stride, self.dims, least=1)
        self.padding = padding_pairs(padding, self.dims)
        self.dilation = per_axis("dilation", dilation, self.dims, least=1)
        self.output_padding = per_axis("output_padding", output_padding, self.dims, least=0)
        self.window = None if window is None else per_axis("window", window, self.dims, least=1)
        self.border: Border = border
        self.transposed = transposed
        if self.border == "renormalise" and self.window is None and any(pad != (0, 0) for pad in self.padding):
            warnings.warn("padding has no effect with border='renormalise' and no window.", stacklevel=3)
        if not self.transposed and any(self.output_padding):
            raise ValueError(bad("output_padding", "must be 0 unless transposed=True", self.output_padding))
        if self.transposed and (self.border != "zero" or self.window is None):
            got = f"border={self.border!r}, window={self.window}"
            raise ValueError(bad("transposed", "must be False unless border is 'zero' and a window is given", got))

    @property
    def kernel_size(self) -> tuple[int, ...] | None:
        """Kernel size per axis, computed from window and dilation; None without a window."""
        if self.window is None:
            return None
        return tuple((extent - 1) // step + 1 for extent, step in zip(self.window, self.dilation, strict=True))

    @final
    def grid(self, sizes: Sequence[int], output_size: Sequence[int] | None = None) -> Grid:
        """Return the layer's grid for an image with `sizes` positions per axis; `output_size` is as in `forward`.

        Raises:
            ValueError: If the window is larger than the padded image, or the output cannot have size `output_size`.
        """
        if not self.transposed:
            if output_size is not None:
                raise ValueError(bad("output_size", "must be None unless transposed=True", tuple(output_size)))
            known = not torch.compiler.is_compiling() and all(type(size) is int for size in sizes)
            make = _known_grid if known else Grid.make
            return make(tuple(sizes), stride=self.stride, padding=self.padding, border=self.border, window=self.window)
        assert self.window is not None
        spread = functools.partial(Grid.transposed, sizes, stride=self.stride, padding=self.padding, window=self.window)
        if output_size is None:
            return spread(output_padding=self.output_padding)
        least, wanted = spread().query_sizes, tuple(output_size)[-self.dims :]
        extra = tuple(want - have for want, have in zip(wanted, least, strict=False))
        if len(wanted) < self.dims or not all(0 <= more < step for more, step in zip(extra, self.stride, strict=True)):
            most = tuple(have + step - 1 for have, step in zip(least, self.stride, strict=True))
            raise ValueError(bad("output_size", f"must be between {least} and {most}", tuple(output_size)))
        return spread(output_padding=extra)
