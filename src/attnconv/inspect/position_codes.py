"""Positions in images as numbers, and their centres, sums and continuation on a regular grid."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

UNIT = 4  # steps per pixel, since the centres of kernels of even size are between pixels
AROUND = 4  # positions range over this many image sizes, around the image
NONE, SEVERAL = 0.0, -1.0  # codes of entries that are not from the image, and of sums over different positions


@final
@dataclass(frozen=True)
class PositionCodes:
    """Positions in a batch of images as single numbers, which are exact in float64.

    The code of a position (image, row, column, ...) is its row-major index on a grid of `UNIT` steps per pixel, plus 1.
    """

    sizes: tuple[int, ...]  # of the images in pixels, (height, width)

    @property
    def extents(self) -> tuple[int, ...]:
        """Number of steps along each axis of the grid."""
        return tuple(AROUND * UNIT * size for size in self.sizes)

    @property
    def strides(self) -> tuple[int, ...]:
        """Change of a code per step along each axis."""
        return tuple(math.prod(self.extents[axis + 1 :]) for axis in range(len(self.sizes)))

    def of_images(self, count: int, device: torch.device) -> Tensor:
        """Return the codes of all pixels, (images, *sizes)."""
        codes = math.prod(self.extents) * torch.arange(count, dtype=torch.float64, device=device) + 1
        for size, stride in zip(self.sizes, self.strides, strict=True):
            steps = UNIT * (torch.arange(size, dtype=torch.float64, device=device) + AROUND * size // 2)
            codes = codes[..., None] + steps * stride
        return codes

    @staticmethod
    def of_others(sequences: int, tokens: int, device: torch.device) -> Tensor:
        """Return the codes (sequences, tokens) of tokens that are not from the images."""
        return torch.full((sequences, tokens), NONE, dtype=torch.float64, device=device)

    def of_tokens(self, count: int, tokens: int, before: int, device: torch.device) -> Tensor:
        """Return the codes of tokens, (images, tokens); those of the images follow `before` others."""
        codes = self.of_others(count, tokens, device)
        codes[:, before : before + math.prod(self.sizes)] = self.of_images(count, device).flatten(1)
        return codes

    def read(self, codes: Tensor) -> tuple[Tensor, ...]:
        """Return image, row, column, ... of codes, in steps; each has the shape of `codes`."""
        rest, found = codes - 1, []
        for extent in reversed(self.extents):
            found.append(rest % extent)
            rest = torch.div(rest, extent, rounding_mode="floor")
        return (rest, *reversed(found))

    def write(self, image: Tensor, *parts: Tensor) -> Tensor:
        """Return the codes of positions, rounded to whole steps."""
        codes = 1 + math.prod(self.extents) * image
        for part, stride in zip(parts, self.strides, strict=True):
            codes = codes + (part + 0.5).floor() * stride
        return codes

    def steps(self, codes: Tensor) -> list[float]:
        """Return the smallest distance between different positions along each axis; infinity if there is only one."""
        values = [part[codes > NONE].unique() for part in self.read(codes)[1:]]
        return [float(each.diff().min()) if len(each) > 1 else math.inf for each in values]

    def centre(self, codes: Tensor, *dims: int) -> Tensor:
        """Return the centre of the smallest box that contains all positions along some axes, which get size 1.

        If this is the same position for all entries, the whole image was summed: the result has no position.
        """
        shape = [1 if axis in (dim % codes.dim() for dim in dims) else size for axis, size in enumerate(codes.shape)]
        return self._centre(thinned(codes, *range(codes.dim())), dims).expand(shape)

    def _centre(self, codes: Tensor, dims: tuple[int, ...]) -> Tensor:
        if all(codes.shape[dim] == 1 for dim in dims):
            return codes
        least = torch.where(codes == NONE, torch.inf, codes).amin(dims, keepdim=True)
        most, several = codes.amax(dims, keepdim=True), (codes == SEVERAL).any(dims, keepdim=True)
        if bool(((least == most) | (most == NONE) | several).all()):
            return torch.where(several, SEVERAL, most)
        inside, ends = codes > NONE, []
        for part in self.read(codes):
            first = part.where(inside, torch.inf).amin(dims, keepdim=True)
            ends.append((first, part.where(inside, -torch.inf).amax(dims, keepdim=True)))
        middle = [(first + last) / 2 for first, last in ends[1:]]
        if all(len(part[most > NONE].unique()) == 1 for part in middle):  # a mean over the whole image is no token
            return torch.where(several, SEVERAL, NONE)
        several |= (ends[0][0] != ends[0][1]) & (most > NONE)  # several images
        return torch.where(several, SEVERAL, torch.where(most == NONE, NONE, self.write(ends[0][0], *middle)))

    def agreed(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the common positions of two tensors of the same shape, such as the terms of a sum.

        Positions less than one token apart count as equal, since kernels of even size have no pixel at their centre.
        Tokens of a coarser grid do not move those of a finer one.
        """
        thin = [axis for axis in range(first.dim()) if first.stride(axis) == 0 and second.stride(axis) == 0]
        one, two = (thinned(each, *thin) for each in (first, second))
        if torch.equal(one, two):
            return first
        differ = (one != two) & (one > NONE) & (two > NONE)
        if bool(differ.any()):
            steps = [self.steps(each) for each in (one, two)]
            if all(a >= 2 * b for a, b in zip(*steps, strict=True)):
                one, two, steps = two, one, steps[::-1]
            if not all(b >= 2 * a for a, b in zip(*steps, strict=True)):
                apart = [(a - b).abs() for a, b in zip(self.read(one), self.read(two), strict=True)]
                far = torch.stack([gap >= step for gap, step in zip(apart, (1.0, *steps[0]), strict=True)]).any(0)
                one = torch.where(differ & far, SEVERAL, one)
        found = torch.where(one == NONE, two, one)
        return torch.where((one == SEVERAL) | (two == SEVERAL), SEVERAL, found).expand(first.shape)

    def resampled(self, codes: Tensor, places: Sequence[Tensor]) -> Tensor:
        """Return codes (..., *sizes) at places between the entries along each of the last axes, or outside.

        Positions must be linear along each axis, up to half a step at the border, where a patch may be partly padding.
        They are continued into padding.
        """
        codes = thinned(codes, *range(codes.dim() - len(places)))
        for dim, place in zip(range(codes.dim() - len(places), codes.dim()), places, strict=True):
            size = codes.shape[dim]
            if torch.equal(place, torch.arange(size, dtype=place.dtype)):
                continue
            if bool(((place >= 0) & (place < size) & (place == place.floor())).all()):
                codes = codes.index_select(dim, place.long().to(codes.device))
                continue
            shown = (codes != NONE).movedim(dim, -1).flatten(0, -2).any(0).nonzero().flatten().tolist() or [0]
            first, size = shown[0], shown[-1] - shown[0] + 1
            inner = codes.narrow(dim, first, size)
            shape = [-1 if axis == dim else 1 for axis in range(codes.dim())]
            place = (place.to(inner) - first).reshape(shape)
            index = torch.arange(size).to(inner).reshape(shape)
            linear, parts = (inner > NONE).all(dim, keepdim=True), []
            for part in self.read(inner):
                start, step = line(part, dim)
                linear &= ((part - start - index * step).abs() <= (step.abs() / 2).clamp_min(1)).all(dim, keepdim=True)
                parts.append(start + place * step)
            empty = (inner == NONE).all(dim, keepdim=True)
            codes = torch.where(empty, NONE, torch.where(linear, self.write(*parts), SEVERAL))
        return codes


@final
@dataclass(frozen=True, eq=False)
class Positions:
    """Positions of the entries of a tensor: codes of its shape, with stride 0 along axes where they are equal."""

    codes: Tensor
    columns: Tensor | None = None  # for scores: positions of the second factor; `codes` are those of the first
    summed: bool = False  # whether this is a product along tokens, which has no positions
    softmax: bool = False  # whether there was a softmax after the product

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Positions":
        """Apply a function to all positions."""
        columns = None if self.columns is None else change(self.columns)
        return Positions(change(self.codes), columns, self.summed, self.softmax)


def is_even(codes: Tensor, dim: int) -> bool:
    """Return whether positions are equal along an axis, except for entries without one."""
    if codes.shape[dim] == 1 or codes.stride(dim) == 0:
        return True
    thin = thinned(codes, *(axis for axis in range(codes.dim()) if axis != dim % codes.dim()))
    return bool(((thin == thin.amax(dim, keepdim=True)) | (thin == NONE)).all())


def are_equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors of the same shape have the same positions."""
    return torch.equal(*(thinned(each, *range(each.dim())) for each in (first, second)))


def thinned(codes: Tensor, *dims: int) -> Tensor:
    """Shorten those of the given axes that have stride 0 to size 1."""
    for dim in dims:
        if codes.shape[dim] > 1 and codes.stride(dim) == 0:
            codes = codes.narrow(dim, 0, 1)
    return codes


def line(positions: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return start and step of positions along an axis; the ends are not used if there are others."""
    count = positions.shape[dim]
    first = int(count > 3)
    start = positions.narrow(dim, first, 1)
    step = (positions.narrow(dim, count - 1 - first, 1) - start) / max(1, count - 1 - 2 * first)
    return start - first * step, step
