"""A stock vision transformer that starts as a convolution: its heads attend fixed shifts, with the error said.

The residual stream gets a subspace of its own for positions, spanned by the rows of E (orthonormal, each of mean 0, so
that LayerNorm's mean leaves it alone), and nothing else writes there: patch embedding, class tokens and the outputs of
attention and MLP are projected off it. With one unit vector per row and per column of the grid,

    pos(i) = s E^T (phi_row(i), phi_column(i))        E k(i) = phi(i)        E q(i) = phi(i + delta_h)

up to LayerNorm's scale; q k is largest at the key i + delta_h, and at the border at the key nearest to it. With as many
features per axis as the grid is long, phi is an orthonormal basis: the target's row and column alone score. With fewer
(little room in a head), phi holds cosines and sines of low frequencies, which a shift turns, and two constants a and b
make the score <phi(i + delta), phi(k)> - 2 <= 0: LayerNorm's scale, which differs from key to key, then moves no
maximum. Image tokens hold both, class tokens b alone, so that their queries stay 0. Since no content is in E, what is
not exact comes from LayerNorm's scale and from scores being finite. How sharp the heads are is chosen: a softmax that
is nearly one-hot hardly learns.

Values and `proj` hold the filters F_delta, of rank at most the head's dimensions per head:

    out(i) = sum_h P W_o,h W_v,h x(i + delta_h),      P = 1 - E^T E
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.eval_mode import evaluating
from attnconv._util.input_checks import FLOATING, check_module
from attnconv._util.rollback import all_or_nothing
from attnconv._util.value_checks import is_index, is_real, whole
from attnconv.inspect.image_checks import blaming_images, check_images
from attnconv.inspect.module_adapters import AttentionParts, first_tensor, refuse_other_formula
from attnconv.inspect.shift_profiles import at_shift
from attnconv.inspect.vit_adapters import VitBlock, VitParts, vit_parts
from attnconv.layers.checks import check_finite
from attnconv.surgery.conv_initialisation_warnings import warn_of_less, warn_of_lost
from attnconv.surgery.head_kernel_fit import relative_size
from attnconv.surgery.position_features import AxisFeatures, cosines

SHARPEST = 1e4  # the largest scale of scores that is tried


@final
@dataclass(frozen=True, eq=False)
class LayerStart:
    """How nearly one layer is a convolution at the start; measured on the images.

    Attributes:
        shifts: delta of each head (row, column), in tokens.
        mass: Attention of each head at its shift, a mean over the queries for which it stays inside the image.
        error: `|layer - convolution| / |convolution|` at the image's tokens, over a border that repeats the edge, for
            the filters that the layer holds: what its attention does.
        filter_error: `|held - given| / |given|` of the filters themselves, where given ones have too high a rank for
            the heads; 0 if none were given.
        given_error: `error` against the convolution with the given filters: of attention, rank and the part of their
            output that would enter the subspace of positions. `error` if none were given.
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
    """Set the start of a vision transformer, in place, so that its attention is nearly a convolution.

    Heads are given the K x K shifts in turn, from the centre outwards; with fewer heads than shifts the next layer goes
    on where this one stopped. Class tokens attend everything alike and are hardly attended.

    Args:
        model: timm's `VisionTransformer` or Hugging Face's ViT, DeiT or DINOv2, untrained. It is changed.
        filters: `random` keeps the values' and `proj`'s own start; `impulse` lets each head pass its own channels on;
            or the filters of a convolution, as `nn.Conv2d.weight`, with a head for each tap. A tap's channels x
            channels matrix is held up to the rank of its heads, head dimensions x (heads // K^2) or more.
        layers: Which blocks, at least one; None for all.
        images: To measure on and to set the scale of positions by; None for 2 of standard normal noise, which real
            images are unlike.
        mass: What each layer's heads are to put on their shift in the mean, above 0 and below 1.
        kernel_size: K, odd; that of given filters if those are given.
        position_length: Length of positions in the residual stream over that of content, above 0. With shorter ones
            LayerNorm leaves more of the content, and the same mass at the shift comes with a larger error.

    Returns:
        Name of the attention module -> what was measured.

    Raises:
        TypeError: `model` is no module, or `images` are no dense tensor of floating point.
        ValueError: The model has other parts, an argument is out of range, or the filters do not fit; an image is
            constant or holds NaN or infinity, or is not what the model takes; or the model would give NaN or infinity.
            Whatever is raised, the model is then what it was before.

    Warns:
        UserWarning: The heads of a layer hold less than `mass` in the mean, or given filters with an error of more than
            1 %; says how much, and of filters what rank would fit.

    Example:
        >>> import timm  # doctest: +SKIP
        >>> vit = timm.create_model("vit_tiny_patch16_224")  # doctest: +SKIP
        >>> start_as_convolution(vit, filters="impulse")["blocks.0.attn"].mass  # doctest: +SKIP
    """
    check_module(model)
    if not is_real(mass) or not 0 < mass < 1:
        raise ValueError(bad("mass", "must be a number above 0 and below 1", repr(mass)))
    if not is_real(position_length) or position_length <= 0:
        raise ValueError(bad("position_length", "must be a number above 0", repr(position_length)))
    parts = vit_parts(model)
    taps = _shifts(_kernel_size(parts, filters, kernel_size))
    chosen = _chosen(parts, layers)
    check_finite(model.named_parameters(), origin="in model")
    if parts.positions.is_meta:
        raise ValueError(bad("model", "must have its weights", "a model on the meta device"))
    stock = _Stock(model, parts, int(taps.max()), position_length)
    shown = _noise(parts) if images is None else images
    check_images(shown)
    with all_or_nothing(model):
        with evaluating(model), blaming_images(model, shown):
            found = stock.start(chosen, filters, taps, mass=mass, images=shown)
        warn_of_less({name: float(start.mass.mean()) for name, start in found.items()}, mass)
        if isinstance(filters, Tensor):  # a warning may be an error
            errors = {name: start.filter_error for name, start in found.items()}
            warn_of_lost(errors, parts.blocks[0].parts, filters)
    return found


def _kernel_size(parts: VitParts, filters: Any, kernel_size: int) -> int:
    """K, of filters that fit the model."""
    if isinstance(filters, Tensor):
        channels, heads = parts.patches.out_channels, parts.blocks[0].parts.heads
        size = filters.shape[-1] if filters.dim() == 4 else 0
        if filters.shape != (channels, channels, size, size) or size % 2 == 0 or size**2 > heads:
            requirement = f"must be ({channels}, {channels}, K, K), K odd and K^2 at most {heads} heads"
            raise ValueError(bad("filters", requirement, tuple(filters.shape)))
        if filters.is_meta or filters.dtype not in FLOATING or not bool(filters.to_dense().isfinite().all()):
            got = f"{filters.dtype} on {filters.device}, with NaN or infinity if they are floating point"
            raise ValueError(bad("filters", "must be finite floating point numbers", got))
        kernel_size = size
    elif not isinstance(filters, str) or filters not in ("random", "impulse"):
        raise ValueError(bad("filters", "must be random, impulse or a tensor", repr(filters)))
    elif filters == "impulse" and any(
        block.parts.out.in_features != parts.patches.out_channels for block in parts.blocks
    ):
        inner = parts.blocks[0].parts.out.in_features
        raise ValueError(bad("filters", "must not be impulse where heads do not share channels", inner))
    if whole("kernel_size", kernel_size, 1) % 2 == 0 or kernel_size // 2 >= min(parts.grid):
        raise ValueError(bad("kernel_size", f"must be odd and fit on {parts.grid} tokens", kernel_size))
    return kernel_size


def _chosen(parts: VitParts, layers: Any) -> list[int]:
    """The blocks to start, in the order in which they run."""
    if layers is None:
        return list(range(len(parts.blocks)))
    chosen = list(layers) if isinstance(layers, Iterable) else []
    if not chosen or not all(is_index(layer) and 0 <= operator.index(layer) < len(parts.blocks) for layer in chosen):
        requirement = f"must be at least one of 0 .. {len(parts.blocks) - 1}, or None for all"
        raise ValueError(bad("layers", requirement, chosen or repr(layers)))
    return sorted({operator.index(layer) for layer in chosen})


def _noise(parts: VitParts) -> Tensor:
    """Two images of standard normal noise."""
    return torch.randn(2, *parts.image_shape, generator=torch.Generator().manual_seed(0)).to(parts.positions)


@final
class _Stock:
    """A stock model and its subspace for positions."""

    def __init__(self, model: nn.Module, parts: VitParts, reach: int, length: float) -> None:
        self.model, self.parts, self.grid, self.prefix = model, parts, parts.grid, parts.prefix
        self.length = length  # of positions, over that of content
        weight = parts.patches.weight
        for block in parts.blocks:
            if not isinstance(block.parts.query_norm, nn.Identity):
                got = f"q_norm in {block.name}"
                raise ValueError(bad("model", "must not normalise its queries and keys", got, "It bounds scores."))
        self.channels = weight.shape[0]
        room = min(parts.blocks[0].parts.head_dim, self.channels // 2)
        if room < 6:
            raise ValueError(bad("model", "must have at least 6 dimensions per head and 12 channels", self.channels))
        self.axes = [AxisFeatures(size, room // 2, reach) for size in self.grid]
        self.features = [axis.at(torch.arange(axis.size)).to(weight) for axis in self.axes]
        self.constants = any(not axis.exact for axis in self.axes)
        count = sum(part.shape[1] for part in self.features) + 2 * self.constants
        # The last `count` vectors of the cosine basis: orthonormal, and but for the first all of mean 0.
        self.basis = cosines(self.channels)[:, self.channels - count :].T.to(weight)  # (features, c)

    def start(
        self, layers: Sequence[int], filters: str | Tensor, taps: Tensor, *, mass: float, images: Tensor
    ) -> dict[str, LayerStart]:
        """Start the model and some of its layers, one after another: each is measured on what the last one gives."""
        for layer in layers:  # most of what is refused costs nothing
            self._inputs(self.parts.blocks[layer], images[:1])
        self.make_room(images)
        found, next_tap = {}, 0
        for layer in layers:
            block = self.parts.blocks[layer]
            heads = block.parts.heads
            which = torch.arange(next_tap, next_tap + heads) % len(taps)
            next_tap = 0 if isinstance(filters, Tensor) or heads >= len(taps) else next_tap + heads
            _start_norm(block.norm)
            kernels = self.set_values(block.parts, which, taps, filters)
            found[block.name] = self.set_scores(block, images, taps[which], mass, kernels)
        self._check_finite(first_tensor(self.model(images)))
        return found

    def _check_finite(self, *tokens: Tensor | None) -> None:
        if any(some is not None and not bool(some.isfinite().all()) for some in tokens):
            requirement = "must leave the model's numbers finite, with these images and filters"
            raise ValueError(
                bad("position_length", requirement, self.length, "Positions, images or filters are large.")
            )

    def off(self, weight: Tensor) -> None:
        """Project outputs (the first axis) off the positions, in place."""
        flat = weight.flatten(1) if weight.dim() > 1 else weight[:, None]
        weight.sub_((self.basis.T @ (self.basis @ flat)).reshape(weight.shape))

    def make_room(self, images: Tensor) -> None:
        """Positions into the subspace, everything else out of it."""
        parts = self.parts
        writers: list[nn.Module] = [parts.patches, *(part for block in parts.blocks for part in block.writers)]
        for weight in (weight for writer in writers for weight in writer.parameters(recurse=False)):
            self.off(weight)
        for token in parts.tokens:
            token.copy_(token - token @ self.basis.T @ self.basis)
        content = parts.embed(images)
        rows, columns = self.features
        height, width = self.grid
        both = torch.cat((rows[:, None].expand(-1, width, -1), columns[None].expand(height, -1, -1)), -1)
        # Two unit vectors: at length 1 positions are as long as content is in the mean.
        scale = self.length * content.square().sum(-1).mean().div(2).sqrt()
        parts.positions.zero_()
        if self.constants:
            both = torch.cat((both, both.new_ones(height, width, 2)), -1)
            for token in parts.tokens:
                token.add_(scale * self.basis[-1])
        parts.positions[:, -height * width :] = scale * both.flatten(0, 1) @ self.basis

    def set_values(self, attention: AttentionParts, which: Tensor, taps: Tensor, filters: str | Tensor) -> "_Kernels":
        """Values and `proj`, and the convolutions that they are and were to be."""
        size, heads = attention.head_dim, attention.heads
        inner = heads * size
        kept = 0.0
        value, out = attention.value.weight, attention.out.weight  # views
        if isinstance(filters, str):
            if filters == "impulse":
                value.copy_(torch.eye(inner))
                out.copy_(torch.eye(inner))
        else:
            kept = self._factor(filters.to(out), which, taps, value.unflatten(0, (heads, size)), out)
        self.off(out)
        side = int(taps.abs().max()) * 2 + 1
        kernel = out.new_zeros(len(out), self.channels, side, side)
        for head, (down, right) in enumerate(taps[which].tolist()):
            part = slice(head * size, (head + 1) * size)
            kernel[:, :, down + side // 2, right + side // 2] += out[:, part] @ value[part]
        given: Tensor | None = attention.out.bias
        bias = out.new_zeros(len(out)) if given is None else given
        if attention.value.bias is not None:
            bias = bias + out @ attention.value.bias
        wanted = filters.to(kernel) if isinstance(filters, Tensor) else kernel
        return _Kernels(kernel, wanted, bias, kept)

    def _factor(self, filters: Tensor, which: Tensor, taps: Tensor, value: Tensor, out: Tensor) -> float:
        """Each tap's best factors of the rank that its heads have; the relative error of all."""
        size, half, lost = value.shape[1], filters.shape[-1] // 2, 0.0
        value.zero_()
        out.zero_()
        for tap, (down, right) in enumerate(taps.tolist()):
            u, s, v = torch.linalg.svd(filters[:, :, down + half, right + half])
            mine = (which == tap).nonzero().flatten().tolist()
            for number, head in enumerate(mine):
                part = slice(number * size, min((number + 1) * size, len(s)))
                count = max(0, part.stop - part.start)
                root = s[part].sqrt()
                value[head, :count] = root[:, None] * v[part]
                out[:, head * size : head * size + count] = u[:, part] * root
            lost += float(s[len(mine) * size :].square().sum())
        return (lost / max(float(filters.square().sum()), torch.finfo(torch.float32).tiny)) ** 0.5

    def set_scores(
        self, block: VitBlock, images: Tensor, shifts: Tensor, mass: float, kernels: "_Kernels"
    ) -> LayerStart:
        """Queries and keys, as sharp as asked for; what they then do."""
        attention, x = block.parts, self._inputs(block, images)
        length = 4 if self.constants else 2  # of positions, squared, where the stream is not normalised
        place = (x[:, self.prefix :] @ self.basis.T).square().sum(-1).mean() / length
        keys = torch.cat((self.basis[:-2], self.basis[-1:])) if self.constants else self.basis
        count = len(keys)
        query, key = (part.weight.unflatten(0, (-1, attention.head_dim)) for part in (attention.query, attention.key))
        for part in (attention.query, attention.key):
            if part.bias is not None:
                part.bias.zero_()
        maps = torch.stack([self._moved(shift) for shift in shifts.tolist()]) @ self.basis  # (h, features, c)
        key[:, :count] = keys  # a view; the other rows keep their start: queries learn by them

        def masses(sharpness: float) -> Tensor:
            query.zero_()
            query[:, :count] = maps * (sharpness / (place * attention.scale))
            return self._mass(attention, x, shifts)

        low, high = 0.0, SHARPEST
        for _ in range(40):  # bisection of the logarithm, 1 to SHARPEST
            middle = (low + 1) ** 0.5 * (high + 1) ** 0.5 - 1
            low, high = (middle, high) if float(masses(middle).mean()) < mass else (low, middle)
        held = masses(high)
        out = first_tensor(block.attention(x))
        assert out is not None
        error, given_error = (self._error(out, x, kernel, kernels.bias) for kernel in (kernels.held, kernels.given))
        return LayerStart(shifts, held, error=error, filter_error=kernels.lost, given_error=given_error)

    def _inputs(self, block: VitBlock, images: Tensor) -> Tensor:
        """What a block's attention is given; it must be what the block's norm gives."""
        normed, seen, given = [], [], []

        def note(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            seen.append(first_tensor((*args, *named.values())))
            given.append(first_tensor(output))

        handles = [
            block.norm.register_forward_hook(lambda _module, _args, output: normed.append(output)),
            block.attention.register_forward_hook(note, with_kwargs=True),
        ]
        try:
            self.model(images)
        finally:
            for handle in handles:
                handle.remove()
        height, width = self.grid
        x, out = (seen[0], given[0]) if len(seen) == 1 else (None, None)
        if x is None or out is None or not any(x is output for output in normed):
            got = f"{type(block.attention).__name__} on other inputs"
            raise ValueError(bad(f"model.{block.name}", "must run once, on what its block's norm gives", got))
        if x.shape[1] != self.prefix + height * width:
            requirement = f"must be given {self.prefix} tokens before an image of {height} x {width}"
            raise ValueError(bad(f"model.{block.name}", requirement, x.shape[1]))
        self._check_finite(x, out)
        refuse_other_formula(block.attention, x, out, name=f"model.{block.name}")
        return x

    def _error(self, out: Tensor, x: Tensor, weights: Tensor, bias: Tensor) -> float:
        """`|layer - convolution| / |convolution|` over a border that repeats the edge."""
        image = x[:, self.prefix :].transpose(1, 2).unflatten(-1, self.grid)
        padded = F.pad(image, (weights.shape[-1] // 2,) * 4, mode="replicate")
        expected = F.conv2d(padded, weights, bias).flatten(2).transpose(1, 2)
        return float(relative_size((out[:, self.prefix :] - expected).norm(), expected.norm()))

    def _moved(self, shift: list[int]) -> Tensor:
        """B with B phi(i) = phi(i + delta)."""
        parts = [axis.moved(step) for axis, step in zip(self.axes, shift, strict=True)]
        if self.constants:
            parts.append(torch.tensor([[-2.0, 0.0]]))  # what meets b in the keys is -2 a
        return torch.block_diag(*parts).to(self.basis)

    def _mass(self, attention: AttentionParts, x: Tensor, shifts: Tensor) -> Tensor:
        """Attention of each head at its shift, over the queries for which it stays inside."""
        rows = attention.maps_and_values(x)[0][:, :, self.prefix :, self.prefix :]
        taken = [
            at_shift(rows[:, head], self.grid, (down, right)) for head, (down, right) in enumerate(shifts.tolist())
        ]
        return torch.stack([some.mean() for some in taken])


@final
@dataclass(frozen=True, eq=False)
class _Kernels:
    """The convolution (c, c, K, K) that a layer holds, the one it was to hold, their constant, and `filter_error`."""

    held: Tensor
    given: Tensor
    bias: Tensor
    lost: float


def _start_norm(norm: nn.Module) -> None:
    for name, weight in norm.named_parameters():
        weight.fill_(1.0 if name == "weight" else 0.0)


def _shifts(size: int) -> Int[Tensor, "s 2"]:
    """The shifts of a K x K kernel, from the centre outwards."""
    line = range(-(size // 2), size // 2 + 1)
    return torch.tensor(sorted(((a, b) for a in line for b in line), key=lambda d: (d[0] ** 2 + d[1] ** 2, d)))
