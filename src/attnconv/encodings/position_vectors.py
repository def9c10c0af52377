"""Vectors for positions: sinusoids of any real position, and learned tables over an image's positions."""

import abc
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv.grid import Grid

WAVELENGTH = 10_000.0  # of the slowest sinusoid, in units of 2 pi pixels
_INTERPOLATION = {1: "linear", 2: "bilinear", 3: "trilinear"}


class Positions(nn.Module, abc.ABC):
    """Vectors P of absolute positions, `channels` numbers each."""

    channels: int

    @abc.abstractmethod
    def forward(self, grid: Grid, points: list[Tensor], dtype: torch.dtype) -> Float[Tensor, "*points channels"]:
        """P at the product of one list of positions per axis (int64, any position of the lattice)."""


@final
class SinusoidalPositions(Positions):
    """Fixed sinusoids: one equal part of the channels for each axis."""

    def __init__(self, channels: int, dims: int) -> None:
        super().__init__()
        self.channels = check_sinusoidal("in_channels", channels, dims)

    def forward(self, grid: Grid, points: list[Tensor], dtype: torch.dtype) -> Float[Tensor, "*points channels"]:
        parts = []
        for dim, positions in enumerate(points):
            part = sinusoids(positions.to(dtype), self.channels // grid.dims)  # (points_a, part)
            shape = (*(1,) * dim, positions.shape[0], *(1,) * (grid.dims - 1 - dim), part.shape[-1])
            parts.append(part.reshape(shape).expand(*(p.shape[0] for p in points), -1))
        return torch.cat(parts, -1)


@final
class LearnedPositions(Positions):
    """A learned vector for each position of an image of `sizes`, resampled linearly to other image sizes.

    A position outside the image has the vector of the nearest pixel.
    """

    def __init__(self, channels: int, sizes: tuple[int, ...], *, std: float = 0.02) -> None:
        super().__init__()
        if not sizes or any(size < 1 for size in sizes):
            raise ValueError(bad("sizes", "must be at least 1 for every axis", sizes))
        self.channels = channels
        self.table = nn.Parameter(torch.randn(1, channels, *sizes) * std)

    def forward(self, grid: Grid, points: list[Tensor], dtype: torch.dtype) -> Float[Tensor, "*points channels"]:
        mode = _INTERPOLATION[grid.dims]
        table = F.interpolate(self.table.to(dtype), size=grid.sizes, mode=mode, align_corners=False)[0].movedim(0, -1)
        for dim, (axis, positions) in enumerate(zip(grid.axes, points, strict=True)):
            table = table.index_select(dim, positions.clamp(0, axis.size - 1))
        return table


def sinusoids(positions: Float[Tensor, "*positions"], channels: int) -> Float[Tensor, "*positions channels"]:
    """[sin(p w_i), cos(p w_i)] with w_i = WAVELENGTH^(-2 i / channels), i = 0 .. channels / 2 - 1."""
    exponents = torch.arange(channels // 2, device=positions.device, dtype=positions.dtype) * (2 / channels)
    angles = positions[..., None] * WAVELENGTH**-exponents
    return torch.cat((angles.sin(), angles.cos()), -1)


def check_sinusoidal(name: str, channels: int, dims: int) -> int:
    """Sinusoids need a sine and a cosine for each axis."""
    if channels < 1 or channels % (2 * dims):
        requirement = f"must be a positive multiple of {2 * dims} for sinusoids over {dims} axes"
        raise ValueError(bad(name, requirement, channels))
    return channels
