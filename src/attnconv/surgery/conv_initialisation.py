"""Initialise a vision transformer so that its attention is a convolution: each head attends a fixed shift.

The residual stream gets a subspace for positions, spanned by the rows of E (orthonormal, each of mean 0); everything
else that writes to the stream is projected off it. Up to LayerNorm's scale, with a unit vector per row and per column,

    pos(i) = s E^T (phi_row(i), phi_column(i))        E k(i) = phi(i)        E q(i) = phi(i + delta_h)
    out(i) = sum_h P W_o,h W_v,h x(i + delta_h),      P = 1 - E^T E

phi of an axis is an orthonormal basis where heads have room for one feature per position; else it has low frequencies,

    phi(i) = (cos(f_1 i), .., sin(f_1 i), ..) / sqrt(number of frequencies),      B phi(i) = phi(i + delta)

and two constants a and b make the score <phi(i + delta), phi(k)> - 2 <= 0, so that LayerNorm's scale, which differs
between keys, moves no maximum. Image tokens hold both, class tokens only b, so that their queries stay 0.
"""

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.module_state import all_or_nothing, evaluating
from attnconv._util.value_checks import FLOATING, check_module, indices, is_real, whole
from attnconv.inspect.capture import blaming_images, check_images
from attnconv.inspect.module_adapters import AttentionParts, VitBlock, VitParts, first_tensor, vit_parts
from attnconv.layers.checks import check_finite
from attnconv.surgery.replaceable_attention import layer_tokens, relative_size

SHARPEST = 1e4  # the largest scale of scores that is tried
LOST = 0.01  # relative error of the given filters above which it warns


@final
@dataclass(frozen=True, eq=False)
class LayerStart:
    """How close one layer is to a convolution at the start, measured on the images.

    Attributes:
        shifts: delta of each head (row, column), in tokens.
        mass: Mean attention of each head to its shift, over the queries for which it is inside the image.
        error: `|layer - convolution| / |convolution|` at the image's tokens, with a border that repeats the edge, for
            the filters that the layer holds: the error of its attention.
        filter_error: `|held - given| / |given|` of the filters, if the rank of given ones is too high for the heads; 0
            if none were given.
        given_error: `error` against the convolution with the given filters: the error of attention, of the rank, and of
            the output that would enter the subspace of positions. Equal to `error` if none were given.
    """

    shifts: Int[Tensor, "h 2"]
    mass: Float[Tensor, "h"]
    error: float
    filter_error: float
    given_error: float


@torch.no_grad()
def start_as_convolution(
    model: nn.Module,
    *,
    filters: str | Float[Tensor, "d c K K"] = "random",
    layers: Iterable[int] | None = None,
    images: Float[Tensor, "b i height width"] | None = None,
    mass: float = 0.9,
    kernel_size: int = 3,
    position_length: float = 1.0,
) -> dict[str, LayerStart]:
    """Initialise a vision transformer, in place, so that its attention is nearly a convolution.

    Heads get the K x K shifts in turn, from the centre outwards; with fewer heads than shifts the next layer continues
    where this one stopped.

    Args:
        model: timm's `VisionTransformer` or Hugging Face's ViT, DeiT or DINOv2, untrained.
        filters: `random` keeps the initial values and `proj`; `impulse` lets each head pass on its own channels; or the
            filters of a convolution, as `nn.Conv2d.weight`, with a head for each tap. A tap's channels x channels
            matrix is held up to the rank of its heads, head dimensions x (heads // K^2) or more.
        layers: Indices of the blocks to initialise, at least one; None for all.
        images: Images to measure on and to scale positions by; None for 2 of standard normal noise, which differs from
            real images.
        mass: Mean attention of each layer's heads to their shifts, above 0 and below 1.
        kernel_size: K, odd; ignored if filters are given.
        position_length: Length of positions in the residual stream relative to content, above 0. Shorter ones leave
            more content after LayerNorm, with a larger error at the same mass.

    Returns:
        Name of the attention module -> its measurements.

    Raises:
        TypeError: `model` is no module, or `images` are no dense tensor of floating point.
        ValueError: The model has other parts, an argument is out of range, or the filters do not fit; an image is
            constant, not finite or rejected by the model; or the model would give NaN or infinity. After any exception
            the model is what it was before.

    Warns:
        UserWarning: The heads of a layer hold less than `mass` in the mean, or given filters have a rank that does not
            fit, with a relative error above 1 %.

    Example:
        >>> import timm  # doctest: +SKIP
        >>> vit = timm.create_model("vit_tiny_patch16_224")  # doctest: +SKIP
        >>> start_as_convolution(vit, filters="impulse")["blocks.0.attn"].mass  # doctest: +SKIP
    """
    check_module(model)
    for name, value, limit in (("mass", mass, 1), ("position_length", position_length, math.inf)):
        if not is_real(value) or not 0 < value < limit:
            raise ValueError(bad(name, f"must be a number above 0 and below {limit}", repr(value)))
    parts = vit_parts(model)
    taps = _taps(parts, filters, kernel_size)
    filters = filters.to_dense() if isinstance(filters, Tensor) else filters
    chosen = list(range(len(parts.blocks))) if layers is None else sorted(indices("layers", layers, len(parts.blocks)))
    if not chosen:
        raise ValueError(bad("layers", "must name at least one block, or be None for all", chosen))
    check_finite(model.named_parameters(), origin="in model")
    if parts.positions.is_meta:
        raise ValueError(bad("model", "must have its weights", "a model on the meta device"))
    if images is None:
        sides = (count * stride for count, stride in zip(parts.grid, parts.patches.stride, strict=True))
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(2, parts.patches.in_channels, *sides, generator=generator).to(parts.positions)
    start = _Start(model, parts, images, filters, taps, mass, position_length)
    check_images(images)
    with all_or_nothing(model):
        with evaluating(model), blaming_images(model, images):
            found = start.run([parts.blocks[layer] for layer in chosen])
        _warn(found, mass, parts.blocks[0].parts, filters)  # a warning may be an error
    return found


def _taps(parts: VitParts, filters: Any, kernel_size: int) -> Int[Tensor, "s 2"]:
    """The shifts of a K x K kernel, from the centre outwards; filters must fit the model."""
    channels, heads = parts.patches.out_channels, parts.blocks[0].parts.heads
    if isinstance(filters, Tensor):
        kernel_size = filters.shape[-1] if filters.dim() == 4 else 0
        if filters.shape != (channels, channels, kernel_size, kernel_size) or not 0 < kernel_size**2 <= heads:
            requirement = f"must be ({channels}, {channels}, K, K), K odd and K^2 at most {heads} heads"
            raise ValueError(bad("filters", requirement, tuple(filters.shape)))
        if filters.is_meta or filters.dtype not in FLOATING or not bool(filters.to_dense().isfinite().all()):
            got = f"{filters.dtype} on {filters.device}, with NaN or infinity if they are floating point"
            raise ValueError(bad("filters", "must be finite floating point numbers", got))
    elif not isinstance(filters, str) or filters not in ("random", "impulse"):
        raise ValueError(bad("filters", "must be random, impulse or a tensor", repr(filters)))
    elif filters == "impulse" and any(block.parts.out.in_features != channels for block in parts.blocks):
        inner = parts.blocks[0].parts.out.in_features
        raise ValueError(bad("filters", "must not be impulse where heads do not share channels", inner))
    if whole("kernel_size", kernel_size, 1) % 2 == 0 or kernel_size // 2 >= min(parts.grid):
        raise ValueError(bad("kernel_size", f"must be odd and fit on {parts.grid} tokens", kernel_size))
    line = range(-(kernel_size // 2), kernel_size // 2 + 1)
    return torch.tensor(sorted(((a, b) for a in line for b in line), key=lambda d: (d[0] ** 2 + d[1] ** 2, d)))


def _warn(found: Mapping[str, LayerStart], mass: float, attention: AttentionParts, filters: str | Tensor) -> None:
    """Warn of heads that hold less than asked for, and of given filters whose rank is above what fits."""
    reached = {name: float(start.mass.mean()) for name, start in found.items()}
    if less := [f"{held:.3f} in {name}" for name, held in reached.items() if held < mass - 1e-3]:
        requirement = f"must be within reach of the sharpest scores, here {', '.join(less)}"
        fix = "Give images like the model's own, a smaller kernel_size or less mass."
        warnings.warn(bad("mass", requirement, f"{mass:g}", fix), stacklevel=4)
    lost = [f"{start.filter_error:.3f} in {name}" for name, start in found.items() if start.filter_error > LOST]
    if lost and isinstance(filters, Tensor):
        heads, width, taps = attention.heads, attention.head_dim, filters.shape[-1] ** 2
        rank, most = int(torch.linalg.matrix_rank(filters.permute(2, 3, 0, 1)).max()), heads // taps * width
        requirement = f"must have rank at most {most} at each of {taps} taps for {heads} x {width} channels"
        fix = f"Their relative error is {', '.join(lost)}. Give filters of lower rank or with fewer taps."
        warnings.warn(bad("filters", requirement, f"rank {rank}", fix), stacklevel=4)


@final
@dataclass(eq=False)
class _Start:
    """A model with a subspace for positions, and the images on which its layers are measured."""

    model: nn.Module
    parts: VitParts
    images: Tensor
    filters: str | Tensor
    taps: Int[Tensor, "s 2"]
    mass: float
    length: float  # of positions relative to content

    def __post_init__(self) -> None:
        parts, self.grid = self.parts, self.parts.grid
        channels = parts.patches.out_channels
        room = min(parts.blocks[0].parts.head_dim, channels // 2)
        if room < 6:
            raise ValueError(bad("model", "must have at least 6 dimensions per head and 12 channels", channels))
        self.axes = [AxisFeatures(size, room // 2, int(self.taps.max())) for size in self.grid]
        self.features = [axis.at(torch.arange(axis.size)).to(parts.positions) for axis in self.axes]
        self.constants = any(not axis.exact for axis in self.axes)
        count = sum(part.shape[1] for part in self.features) + 2 * self.constants
        # The last `count` vectors of the cosine basis: orthonormal, and all but the first of mean 0.
        self.basis = cosines(channels)[:, channels - count :].T.to(parts.positions)  # (features, c)

    def run(self, blocks: Iterable[VitBlock]) -> dict[str, LayerStart]:
        """Initialise the model and some of its blocks in order: each is measured on the output of the one before."""
        self._make_room()
        found, next_tap = {}, 0
        for block in blocks:
            heads = block.parts.heads
            which = torch.arange(next_tap, next_tap + heads) % len(self.taps)
            next_tap = 0 if isinstance(self.filters, Tensor) or heads >= len(self.taps) else next_tap + heads
            found[block.name] = self._start(block, self.taps[which])
        self._check_finite(first_tensor(self.model(self.images)))
        return found

    def _make_room(self) -> None:
        """Put positions into the subspace, and project everything else off it."""
        parts, (height, width) = self.parts, self.grid
        for writer in (parts.patches, *(part for block in parts.blocks for part in block.writers)):
            for weight in writer.parameters(recurse=False):
                self._project_off(weight)
        rows, columns = self.features
        both = torch.cat((rows[:, None].expand(-1, width, -1), columns[None].expand(height, -1, -1)), -1)
        # Two unit vectors: at length 1 positions are as long as content is in the mean.
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
        """Project outputs (the first axis) off the positions, in place."""
        weight.sub_((self.basis.T @ (self.basis @ weight.reshape(len(weight), -1))).reshape(weight.shape))

    def _start(self, block: VitBlock, shifts: Tensor) -> LayerStart:
        """Set a block's weights, and measure what they do."""
        attention = block.parts
        for name, weight in block.norm.named_parameters():
            weight.fill_(1.0 if name == "weight" else 0.0)
        lost = self._set_values(attention, shifts)
        x = self._inputs(block)
        held = self._set_scores(attention, x, shifts)
        out = first_tensor(block.attention(x))
        assert out is not None
        error = given_error = self._error(out, self._exact(attention, x, shifts))
        if isinstance(self.filters, Tensor):
            given_error = self._error(out, self._convolved(attention, x, self.filters.to(x)))
        return LayerStart(shifts, held, error=error, filter_error=lost, given_error=given_error)

    def _set_values(self, attention: AttentionParts, shifts: Tensor) -> float:
        """Set values and `proj`; the relative error of given filters."""
        value, out, lost = attention.value.weight, attention.out.weight, 0.0  # views
        if isinstance(self.filters, Tensor):
            size = (attention.heads, attention.head_dim)
            lost = _factor(self.filters.to(out), shifts, value.unflatten(0, size), out.unflatten(1, size))
        elif self.filters == "impulse":
            value.copy_(torch.eye(len(value)))
            out.copy_(torch.eye(len(value)))
        self._project_off(out)
        return lost

    def _set_scores(self, attention: AttentionParts, x: Tensor, shifts: Tensor) -> Tensor:
        """Set queries and keys, as sharp as asked for; the attention of each head to its shift."""
        length = 4 if self.constants else 2  # of positions, squared, where the stream is not normalised
        place = (x[:, self.parts.prefix :] @ self.basis.T).square().sum(-1).mean() / length
        keys = torch.cat((self.basis[:-2], self.basis[-1:])) if self.constants else self.basis
        query, key = (part.weight.unflatten(0, (-1, attention.head_dim)) for part in (attention.query, attention.key))
        for part in (attention.query, attention.key):
            if part.bias is not None:
                part.bias.zero_()
        maps = torch.stack([self._moved(shift) for shift in shifts.tolist()]) @ self.basis  # (h, features, c)
        key[:, : len(keys)] = keys  # a view; the other rows keep their start: queries learn by them
        before, (places, inside) = self.parts.prefix, self._keys(shifts)

        def masses(sharpness: float) -> Tensor:
            """Set the queries; the attention of each head to its shift, over queries for which it is in the image."""
            query.zero_()
            query[:, : len(keys)] = maps * (sharpness / (place * attention.scale))
            rows = attention.maps_and_values(x)[0][:, :, before:, before:]
            taken = rows.gather(3, places.expand(len(rows), -1, -1)[..., None])[..., 0]
            return (taken * inside).sum((0, 2)) / (len(rows) * inside.sum(1))

        low, high = 0.0, SHARPEST
        for _ in range(40):  # bisection of log(1 + sharpness)
            middle = (low + 1) ** 0.5 * (high + 1) ** 0.5 - 1
            low, high = (middle, high) if float(masses(middle).mean()) < self.mass else (low, middle)
        return masses(high)

    def _moved(self, shift: list[int]) -> Tensor:
        """B with B phi(i) = phi(i + delta)."""
        parts = [axis.moved(step) for axis, step in zip(self.axes, shift, strict=True)]
        if self.constants:
            parts.append(torch.tensor([[-2.0, 0.0]]))  # what meets b in the keys is -2 a
        return torch.block_diag(*parts).to(self.basis)

    def _keys(self, shifts: Int[Tensor, "h 2"]) -> tuple[Int[Tensor, "h n"], Bool[Tensor, "h n"]]:
        """The token at each head's shift, or the nearest at the edge, and whether the shift is inside the image."""
        places = torch.cartesian_prod(*map(torch.arange, self.grid)) + shifts[:, None]  # (h, n, 2)
        last = torch.tensor(self.grid) - 1
        nearest = places.clamp(torch.zeros_like(last), last)
        keys = nearest[..., 0] * self.grid[1] + nearest[..., 1]
        return keys.to(self.basis.device), (places == nearest).all(-1).to(self.basis.device)

    def _inputs(self, block: VitBlock) -> Tensor:
        """The input of a block's attention, which must be the output of the block's norm."""
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
            got = f"{type(block.attention).__name__} on other inputs"
            raise ValueError(bad(f"model.{block.name}", "must run on what its block's norm gives", got))
        return x

    def _check_finite(self, *tokens: Tensor | None) -> None:
        if any(some is not None and not bool(some.isfinite().all()) for some in tokens):
            requirement = "must leave the model's numbers finite, with these images and filters"
            fix = "Positions, images or filters are large."
            raise ValueError(bad("position_length", requirement, self.length, fix))

    def _error(self, out: Tensor, expected: Tensor) -> float:
        """`|layer - convolution| / |convolution|` at the image's tokens."""
        return float(relative_size((out[:, self.parts.prefix :] - expected).norm(), expected.norm()))

    def _exact(self, attention: AttentionParts, x: Tensor, shifts: Tensor) -> Tensor:
        """The layer's convolution: its output if each head attended only its shift, or the edge beyond the border."""
        values = attention.maps_and_values(x)[1][:, :, self.parts.prefix :]
        return attention.finish(values.gather(2, self._keys(shifts)[0][:, :, None].expand_as(values)))

    def _convolved(self, attention: AttentionParts, x: Tensor, filters: Tensor) -> Tensor:
        """The convolution with the given filters, over a border that repeats the edge, plus the layer's bias."""
        image = x[:, self.parts.prefix :].transpose(1, 2).unflatten(-1, self.grid)
        padded = F.pad(image, (filters.shape[-1] // 2,) * 4, mode="replicate")
        constant = attention.finish(attention.maps_and_values(torch.zeros_like(x[:1, :1]))[1])
        return F.conv2d(padded, filters).flatten(2).transpose(1, 2) + constant


def _factor(filters: Tensor, shifts: Tensor, value: Float[Tensor, "h e c"], out: Float[Tensor, "d h e"]) -> float:
    """Fill in each tap's best factors of the rank that its heads have; the relative error of all."""
    half, size = filters.shape[-1] // 2, value.shape[1]
    left, values, right = torch.linalg.svd(filters.permute(2, 3, 0, 1))
    roots, lost = values.sqrt(), values.square()
    value.zero_()
    out.zero_()
    used = torch.zeros(values.shape[:2], dtype=torch.int64)  # rank that heads hold so far, by tap
    for head, (down, across) in enumerate((shifts + half).tolist()):
        part = slice(int(used[down, across]), int(used[down, across]) + size)
        root = roots[down, across, part]
        value[head, : len(root)] = root[:, None] * right[down, across, part]
        out[:, head, : len(root)] = left[down, across, :, part] * root
        lost[down, across, part] = 0
        used[down, across] += size
    return float(lost.sum() / filters.square().sum().clamp_min(torch.finfo(torch.float32).tiny)) ** 0.5


def cosines(size: int) -> Float[Tensor, "n n"]:
    """The orthonormal cosine basis: row i, frequency f."""
    place = torch.arange(size, dtype=torch.float64)
    table = torch.cos(torch.pi * (place[:, None] + 0.5) * place / size)
    return (table / table.norm(dim=0)).float()


@final
class AxisFeatures:
    """phi of one axis of `size` positions, with at most `room` features (at least 3), for shifts up to `reach`."""

    def __init__(self, size: int, room: int, reach: int) -> None:
        self.size, self.exact = size, room >= size
        # `reach` beyond the end, the last position must be nearer than the first, one period away.
        self.turns = 2 * torch.pi / (size + 2 * reach) * torch.arange(1, (room - 1) // 2 + 1, dtype=torch.float64)

    def at(self, places: Int[Tensor, "n"]) -> Float[Tensor, "n f"]:
        """phi of some positions."""
        if self.exact:
            return cosines(self.size)[places.clamp(0, self.size - 1)]
        angle = places[:, None] * self.turns
        return torch.cat((angle.cos(), angle.sin()), 1).float() / len(self.turns) ** 0.5

    def moved(self, step: int) -> Float[Tensor, "f f"]:
        """B, from its action on all positions: exact, since it maps a basis or rotates planes."""
        places = torch.arange(self.size)
        here, there = self.at(places).double(), self.at(places + step).double()
        return torch.linalg.lstsq(here, there, driver="gelsd").solution.T.float()
