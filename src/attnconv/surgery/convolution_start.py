"""Initialisation of a vision transformer as a convolution: each head attends to a fixed shift.

A subspace of the residual stream is reserved for positions. It is spanned by the orthonormal rows of E, each with mean
0. All other outputs to the stream are projected onto its complement. Up to the scale of LayerNorm, with a unit vector
phi for each row and each column of the image,

    pos(i) = s E^T (phi_row(i), phi_column(i))        E k(i) = phi(i)        E q(i) = phi(i + delta_h)
    out(i) = sum_h P W_o,h W_v,h x(i + delta_h),      P = 1 - E^T E

If heads have one channel for each position of an axis, its phi form an orthonormal basis. Otherwise, low frequencies

    phi(i) = (cos(f_1 i), ..., sin(f_1 i), ...) / sqrt(number of frequencies),      B phi(i) = phi(i + delta)

are used, and two constant features a and b change the score to <phi(i + delta), phi(k)> - 2 <= 0, whose maximum does
not move when LayerNorm scales keys differently. Image tokens have a and b, class tokens only b: their queries are 0.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import FLOATING, whole
from attnconv.inspect.module_adapters import AttentionParts, VitBlock, VitParts, first_tensor
from attnconv.operators.base import score_dtype
from attnconv.surgery.replaceable_attention import layer_tokens, relative_size

SHARPEST = 1e4  # upper limit of the search for the scale of scores
LOST = 0.01  # relative error of given filters above which a warning is issued


@final
@dataclass(frozen=True, eq=False)
class LayerStart:
    """Initialisation of one layer and, with attention "convolution", its errors compared with a convolution.

    Attributes:
        attention: Initialisation of the query and key projections.
        values: Initialisation of the value and output projections.
        shifts: Shift of each head, (h, 2), key minus query (row, column), in tokens; empty if heads have no shifts.
        mass: Mean attention of each head at its shift, (h,), 0 to 1, over the queries whose shifted position is in the
            image; empty unless `attention` is "convolution".
        error: `|layer - convolution| / |convolution|` at the image tokens, for the convolution with replicate padding
            and the filters stored in the layer. It arises because the heads also attend to other tokens.
        filter_error: `|stored - given| / |given|` of the filters, nonzero if the rank of the given filters is too high
            for the heads; 0 if `values` is not a tensor.
        given_error: Like `error`, but for the given filters; also caused by the rank limit and by projecting out the
            subspace of the positional vectors. Equal to `error` if `values` is not a tensor.
    """

    attention: str
    values: str
    shifts: Int[Tensor, "_ 2"]
    mass: Float[Tensor, "_"]
    error: float = math.nan
    filter_error: float = 0.0
    given_error: float = math.nan


def check_filters(filters: Tensor, channels: int, heads: int) -> int:
    """Return the kernel size of given filters; raise a `ValueError` if they do not match the model."""
    size = filters.shape[-1] if filters.dim() == 4 else 0
    if filters.shape != (channels, channels, size, size) or not 0 < size**2 <= heads:
        requirement = f"must have shape ({channels}, {channels}, K, K), K odd, with at most {heads} taps (= heads)"
        raise ValueError(bad("values", requirement, tuple(filters.shape)))
    if filters.is_meta or filters.dtype not in FLOATING or not bool(filters.to_dense().isfinite().all()):
        got = f"{filters.dtype} on {filters.device}, or NaN or infinite values"
        raise ValueError(bad("values", "must be finite floating-point numbers", got))
    return size


def kernel_shifts(kernel_size: int, grid: tuple[int, int]) -> Int[Tensor, "s 2"]:
    """Return the shifts of a K x K kernel, from the centre outwards; raise a `ValueError` if K is even or too large."""
    if whole("kernel_size", kernel_size, 1) % 2 == 0 or kernel_size // 2 >= min(grid):
        raise ValueError(bad("kernel_size", f"must be odd and at most {2 * min(grid) - 1}", kernel_size))
    line = range(-(kernel_size // 2), kernel_size // 2 + 1)
    return torch.tensor(sorted(((a, b) for a in line for b in line), key=lambda d: (d[0] ** 2 + d[1] ** 2, d)))


def shifted_keys(shifts: Int[Tensor, "h 2"], grid: tuple[int, int]) -> tuple[Int[Tensor, "h n"], Bool[Tensor, "h n"]]:
    """Return the token at each head's shift, or the nearest in the image, and whether the shift is in the image."""
    places = torch.cartesian_prod(*map(torch.arange, grid)) + shifts[:, None]  # (h, n, 2)
    last = torch.tensor(grid) - 1
    nearest = places.clamp(torch.zeros_like(last), last)
    return nearest[..., 0] * grid[1] + nearest[..., 1], (places == nearest).all(-1)


def warn(found: Mapping[str, LayerStart], mass: float, attention: AttentionParts, values: str | Tensor) -> None:
    """Warn if heads do not reach the target mass, and if the rank of given filters is too high."""
    reached = {name: float(start.mass.mean()) for name, start in found.items()}
    if less := [f"{held:.3f} in {name}" for name, held in reached.items() if held < mass - 1e-3]:
        fix = "Use images like the training images, a smaller kernel_size or a smaller mass."
        text = f"initialize: the mean attention at the shifts is less than mass={mass:g}: {', '.join(less)}. {fix}"
        warnings.warn(text, stacklevel=4)
    lost = [f"{start.filter_error:.3f} in {name}" for name, start in found.items() if start.filter_error > LOST]
    if lost and isinstance(values, Tensor):
        heads, width, taps = attention.heads, attention.head_dim, values.shape[-1] ** 2
        rank, most = int(torch.linalg.matrix_rank(values.permute(2, 3, 0, 1)).max()), heads // taps * width
        requirement = f"must have rank at most {most} at each of {taps} taps for {heads} heads of {width} channels"
        fix = f"The relative error of the stored filters is {', '.join(lost)}. Use a lower rank or fewer taps."
        warnings.warn(bad("values", requirement, f"rank {rank}", fix), stacklevel=4)


@final
@dataclass(eq=False)
class ConvolutionStart:
    """State of an initialisation: a model with a subspace for positions, and images on which layers are measured."""

    model: nn.Module
    parts: VitParts
    images: Tensor
    values: str | Tensor
    set_values: Callable[[AttentionParts], None]  # unless `values` is a tensor
    taps: Int[Tensor, "s 2"]
    mass: float
    length: float  # norm of positional vectors relative to content

    def __post_init__(self) -> None:
        parts, self.grid = self.parts, self.parts.grid
        channels, width = parts.patches.out_channels, parts.blocks[0].parts.head_dim
        room = min(width, channels // 2)
        if room < 6:
            raise ValueError(bad("model", "must have at least 6 channels per head and 12 in total", (width, channels)))
        self.axes = [AxisFeatures(size, room // 2, int(self.taps.max())) for size in self.grid]
        self.features = [axis.at(torch.arange(axis.size)).to(parts.positions) for axis in self.axes]
        self.constants = any(not axis.exact for axis in self.axes)
        count = sum(part.shape[1] for part in self.features) + 2 * self.constants
        # The last `count` vectors of the orthonormal cosine basis, in which all vectors except the first have mean 0.
        self.basis = cosines(channels)[:, channels - count :].T.to(parts.positions)  # (features, c)

    def run(self, blocks: Iterable[VitBlock]) -> dict[str, LayerStart]:
        """Initialise the model and the given blocks in order; each is measured on the output of its predecessors."""
        self._make_room()
        found, next_tap = {}, 0
        for block in blocks:
            heads = block.parts.heads
            which = torch.arange(next_tap, next_tap + heads) % len(self.taps)
            next_tap = 0 if isinstance(self.values, Tensor) or heads >= len(self.taps) else next_tap + heads
            found[block.name] = self._start(block, self.taps[which])
        self._check_finite(first_tensor(self.model(self.images)))
        return found

    def _make_room(self) -> None:
        """Write positional vectors to the subspace, and project it out of all other outputs."""
        parts, (height, width) = self.parts, self.grid
        for writer in (parts.patches, *(part for block in parts.blocks for part in block.writers)):
            for weight in writer.parameters(recurse=False):
                self._project_off(weight)
        rows, columns = self.features
        both = torch.cat((rows[:, None].expand(-1, width, -1), columns[None].expand(height, -1, -1)), -1)
        # A position has two unit vectors phi. With length 1, its norm is the root-mean-square norm of content.
        scale = self.length * parts.embed(self.images).square().sum(-1).mean().div(2).sqrt()
        if self.constants:
            both = torch.cat((both, both.new_ones(height, width, 2)), -1)
        for token in parts.tokens:
            token.sub_(token @ self.basis.T @ self.basis)
            if self.constants:
                token.add_(scale * self.basis[-1])
        parts.positions.zero_()
        parts.positions[:, -height * width :] = scale * both.flatten(0, 1) @ self.basis

    def _project_off(self, weight: Tensor) -> None:
        """Project the subspace of positions out of the outputs (first axis) of a weight, in place."""
        weight.sub_((self.basis.T @ (self.basis @ weight.reshape(len(weight), -1))).reshape(weight.shape))

    def _start(self, block: VitBlock, shifts: Tensor) -> LayerStart:
        """Set the weights of a block, and measure its errors."""
        attention = block.parts
        for name, weight in block.norm.named_parameters():
            weight.fill_(1.0 if name == "weight" else 0.0)
        lost = self._set_values(attention, shifts)
        x = self._inputs(block)
        held = self._set_scores(attention, x, shifts)
        maps, values = attention.maps_and_values(x)
        out, targets = attention.finish(maps @ values)[:, self.parts.prefix :], [self._exact(attention, x, shifts)]
        if isinstance(self.values, Tensor):
            targets.append(self._convolved(attention, x, self.values.to(x)))
        errors = [float(relative_size((out - target).norm(), target.norm())) for target in targets]
        name = "filters" if isinstance(self.values, Tensor) else self.values
        return LayerStart("convolution", name, shifts, held, errors[0], filter_error=lost, given_error=errors[-1])

    def _set_values(self, attention: AttentionParts, shifts: Tensor) -> float:
        """Set the value and output projections; return the relative error of the given filters."""
        value, out, lost = attention.value.weight, attention.out.weight, 0.0  # views
        if isinstance(self.values, Tensor):
            size = (attention.heads, attention.head_dim)
            lost = _factor(self.values.to(out), shifts, value.unflatten(0, size), out.unflatten(1, size))
        else:
            self.set_values(attention)
        self._project_off(out)
        return lost

    def _set_scores(self, attention: AttentionParts, x: Tensor, shifts: Tensor) -> Tensor:
        """Set query and key projections that reach the target mass; return each head's attention at its shift."""
        length = 4 if self.constants else 2  # squared norm of positions before LayerNorm
        place = (x[:, self.parts.prefix :] @ self.basis.T).square().sum(-1).mean() / length
        keys = torch.cat((self.basis[:-2], self.basis[-1:])) if self.constants else self.basis
        query, key = (part.weight.unflatten(0, (-1, attention.head_dim)) for part in (attention.query, attention.key))
        for part in (attention.query, attention.key):
            if part.bias is not None:
                part.bias.zero_()
        maps = torch.stack([self._moved(shift) for shift in shifts.tolist()]) @ self.basis  # (h, features, c)
        key[:, : len(keys)] = keys  # a view; the other rows keep their values, so that queries get gradients
        before, (places, inside) = self.parts.prefix, self._keys(shifts)

        def masses(sharpness: float) -> Tensor:
            """Set the queries; return each head's mean attention at its shift, over shifts inside the image."""
            query.zero_()
            query[:, : len(keys)] = maps * (sharpness / (place * attention.scale))
            rows = attention.maps_and_values(x)[0][:, :, before:, before:]
            taken = rows.gather(3, places.expand(len(rows), -1, -1)[..., None])[..., 0].to(score_dtype(rows.dtype))
            return (taken * inside).sum((0, 2)) / (len(rows) * inside.sum(1))

        low, high = 0.0, SHARPEST
        for _ in range(40):  # bisection of log(1 + sharpness)
            middle = (low + 1) ** 0.5 * (high + 1) ** 0.5 - 1
            low, high = (middle, high) if float(masses(middle).mean()) < self.mass else (low, middle)
        return masses(high)

    def _moved(self, shift: list[int]) -> Tensor:
        """Return B with B phi(i) = phi(i + delta)."""
        parts = [axis.moved(step) for axis, step in zip(self.axes, shift, strict=True)]
        if self.constants:
            parts.append(torch.tensor([[-2.0, 0.0]]))  # the query component for b is -2 a
        return torch.block_diag(*parts).to(self.basis)

    def _keys(self, shifts: Int[Tensor, "h 2"]) -> tuple[Int[Tensor, "h n"], Bool[Tensor, "h n"]]:
        keys, inside = shifted_keys(shifts, self.grid)
        return keys.to(self.basis.device), inside.to(self.basis.device)

    def _inputs(self, block: VitBlock) -> Tensor:
        """Return the input of a block's attention, which must be the output of the block's norm."""
        normed, calls = [], []
        with (
            block.norm.register_forward_hook(lambda _module, _args, output: normed.append(output)),
            block.attention.register_forward_hook(lambda _, *call: calls.append(call), with_kwargs=True),
        ):
            self.model(self.images)
        self._check_finite(*normed, *(first_tensor(output) for _, _, output in calls))
        place = (self.grid, self.parts.prefix, len(self.images), torch.zeros(0))
        x = layer_tokens(block.name, block.attention, calls, [place]).inputs
        if not any(x.is_set_to(output) for output in normed):
            got = f"{type(block.attention).__name__} with a different input"
            raise ValueError(bad(f"model.{block.name}", "must run on the output of its block's norm", got))
        return x

    def _check_finite(self, *tokens: Tensor | None) -> None:
        if any(some is not None and not bool(some.isfinite().all()) for some in tokens):
            requirement = "must keep the model's activations finite for these images and filters"
            fix = "Use a smaller position_length, or smaller values in images or filters."
            raise ValueError(bad("position_length", requirement, self.length, fix))

    def _exact(self, attention: AttentionParts, x: Tensor, shifts: Tensor) -> Tensor:
        """Return the output if each head attends only to its shift, or to the nearest token if that is outside."""
        values = attention.maps_and_values(x)[1][:, :, self.parts.prefix :]
        return attention.finish(values.gather(2, self._keys(shifts)[0][:, :, None].expand_as(values)))

    def _convolved(self, attention: AttentionParts, x: Tensor, filters: Tensor) -> Tensor:
        """Return the convolution with the given filters and replicate padding, plus the bias of the layer."""
        image = x[:, self.parts.prefix :].transpose(1, 2).unflatten(-1, self.grid)
        padded = F.pad(image, (filters.shape[-1] // 2,) * 4, mode="replicate")
        constant = attention.finish(attention.maps_and_values(torch.zeros_like(x[:1, :1]))[1])
        return F.conv2d(padded, filters).flatten(2).transpose(1, 2) + constant


def _factor(filters: Tensor, shifts: Tensor, value: Float[Tensor, "h e c"], out: Float[Tensor, "d h e"]) -> float:
    """Write the best low-rank factors of each tap to its heads; return the relative error of all taps together."""
    half, size = filters.shape[-1] // 2, value.shape[1]
    left, values, right = torch.linalg.svd(filters.permute(2, 3, 0, 1))
    roots, lost = values.sqrt(), values.square()
    value.zero_()
    out.zero_()
    used = torch.zeros(values.shape[:2], dtype=torch.int64)  # rank assigned to heads so far, per tap
    for head, (down, across) in enumerate((shifts + half).tolist()):
        part = slice(int(used[down, across]), int(used[down, across]) + size)
        root = roots[down, across, part]
        value[head, : len(root)] = root[:, None] * right[down, across, part]
        out[:, head, : len(root)] = left[down, across, :, part] * root
        lost[down, across, part] = 0
        used[down, across] += size
    return float(lost.sum() / filters.square().sum().clamp_min(torch.finfo(torch.float32).tiny)) ** 0.5


def cosines(size: int) -> Float[Tensor, "n n"]:
    """Return the orthonormal cosine basis, with positions in rows and frequencies in columns."""
    place = torch.arange(size, dtype=torch.float64)
    table = torch.cos(torch.pi * (place[:, None] + 0.5) * place / size)
    return (table / table.norm(dim=0)).float()


@final
class AxisFeatures:
    """At most `room` (3 or more) features phi of an axis with `size` positions, for shifts of up to `reach`."""

    def __init__(self, size: int, room: int, reach: int) -> None:
        self.size, self.exact = size, room >= size
        # A target `reach` beyond the end must be closer to the last position than to the first one a period later.
        self.turns = 2 * torch.pi / (size + 2 * reach) * torch.arange(1, (room - 1) // 2 + 1, dtype=torch.float64)

    def at(self, places: Int[Tensor, "n"]) -> Float[Tensor, "n f"]:
        """Return phi at the given positions."""
        if self.exact:
            return cosines(self.size)[places.clamp(0, self.size - 1)]
        angle = places[:, None] * self.turns
        return torch.cat((angle.cos(), angle.sin()), 1).float() / len(self.turns) ** 0.5

    def moved(self, step: int) -> Float[Tensor, "f f"]:
        """Return B, fitted to all positions; the fit is exact, since B maps a basis or rotates planes."""
        places = torch.arange(self.size)
        here, there = self.at(places).double(), self.at(places + step).double()
        return torch.linalg.lstsq(here, there, driver="gelsd").solution.T.float()
