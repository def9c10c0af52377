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

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnconv._errors import bad
from attnconv._values import is_real, whole
from attnconv.analysis.convolved_attention import refuse_foreign

SHARPEST = 1e4  # the largest scale of scores that is tried


@final
@dataclass(frozen=True, eq=False)
class LayerStart:
    """How nearly one layer is a convolution at the start; measured on the images.

    Attributes:
        shifts: delta of each head (row, column), in tokens.
        mass: Attention of each head at its shift, a mean over the queries for which it stays inside the image.
        error: `|layer - convolution| / |convolution|` at the image's tokens, over a border that repeats the edge.
        filter_error: The same for the filters themselves, where given ones have too high a rank for the heads.
    """

    shifts: Int[Tensor, "h 2"]
    mass: Float[Tensor, "h"]
    error: float
    filter_error: float


@torch.no_grad()
def start_as_convolution(
    model: nn.Module,
    *,
    filters: str | Float[Tensor, "d c K K"] = "random",
    layers: Iterable[int] | None = None,
    images: Float[Tensor, "b i height width"] | None = None,
    mass: float = 0.9,
    kernel_size: int = 3,
) -> dict[str, LayerStart]:
    """Set the start of a vision transformer, in place, so that its attention is nearly a convolution.

    Heads are given the K x K shifts in turn, from the centre outwards; with fewer heads than shifts the next layer goes
    on where this one stopped. Class tokens attend everything alike and are hardly attended.

    Args:
        model: timm's `VisionTransformer`, untrained: `pos_embed`, `patch_embed`, and `blocks` with `norm1`, `attn`,
            `mlp`. It is changed.
        filters: `random` keeps the values' and `proj`'s own start; `impulse` lets each head pass its own channels on;
            or the filters of a convolution, as `nn.Conv2d.weight`, with a head for each tap.
        layers: Which blocks; None for all.
        images: To measure on and to set the scale of positions by; None for 2 of standard normal noise, which real
            images are unlike.
        mass: What each layer's heads are to put on their shift in the mean, above 0 and below 1.
        kernel_size: K, odd; that of given filters if those are given.

    Returns:
        Name of the attention module -> what was measured.

    Raises:
        ValueError: The model has other parts, an argument is out of range, or the filters do not fit.

    Example:
        >>> import timm  # doctest: +SKIP
        >>> vit = timm.create_model("vit_tiny_patch16_224")  # doctest: +SKIP
        >>> start_as_convolution(vit, filters="impulse")["blocks.0.attn"].mass  # doctest: +SKIP
    """
    stock = _Stock(model, filters.shape[-1] if isinstance(filters, Tensor) else whole("kernel_size", kernel_size, 1))
    if not is_real(mass) or not 0 < mass < 1:
        raise ValueError(bad("mass", "must be a number above 0 and below 1", repr(mass)))
    given = filters if isinstance(filters, Tensor) else None
    if given is not None:
        _check_filters(given, stock)
        kernel_size = given.shape[-1]
    elif filters not in ("random", "impulse"):
        raise ValueError(bad("filters", "must be random, impulse or a tensor", repr(filters)))
    if kernel_size % 2 == 0 or kernel_size // 2 >= min(stock.grid):
        raise ValueError(bad("kernel_size", f"must be odd and fit on {stock.grid} tokens", kernel_size))
    chosen = list(range(len(stock.blocks))) if layers is None else list(layers)
    wrong = [layer for layer in chosen if not 0 <= layer < len(stock.blocks)]
    if wrong:
        raise ValueError(bad("layers", f"must be among 0 .. {len(stock.blocks) - 1}", wrong))
    if images is None:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(2, *stock.image_shape, generator=generator).to(model.pos_embed)  # type: ignore[arg-type]
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    stock.make_room(images)
    taps = _shifts(kernel_size)
    found, next_tap = {}, 0
    for layer in chosen:
        attention = stock.blocks[layer].attn
        heads = attention.num_heads
        which = torch.arange(next_tap, next_tap + heads) % len(taps)
        next_tap = 0 if given is not None or heads >= len(taps) else next_tap + heads
        stock.start_norm(layer)
        kernel = stock.set_values(attention, which, taps, filters)
        found[f"blocks.{layer}.attn"] = stock.set_scores(layer, images, taps[which], mass, kernel)
    for part, training in modes:
        part.training = training
    return found


@final
class _Stock:
    """The parts of a stock model, and its subspace for positions."""

    def __init__(self, model: nn.Module, kernel_size: int) -> None:
        source: Any = model
        lacking = [part for part in ("pos_embed", "patch_embed", "blocks") if getattr(model, part, None) is None]
        if lacking:
            requirement = f"must be a vision transformer of timm's kind, with {', '.join(lacking)}"
            raise ValueError(bad("model", requirement, type(model).__name__))
        self.model, self.blocks = source, list(source.blocks)
        height, width = source.patch_embed.grid_size
        self.grid = (int(height), int(width))
        self.prefix: int = source.num_prefix_tokens
        weight: Tensor = source.patch_embed.proj.weight
        patch = source.patch_embed.patch_size
        self.image_shape = (weight.shape[1], height * patch[0], width * patch[1])
        for number, block in enumerate(self.blocks):
            refuse_foreign(block.attn, f"model.blocks.{number}.attn")
            if not isinstance(block.attn.q_norm, nn.Identity):
                raise ValueError(bad("model", "must not normalise its queries and keys", "q_norm", "It bounds scores."))
        self.channels = weight.shape[0]
        room = min(self.blocks[0].attn.head_dim, self.channels // 2)
        if room < 6:
            raise ValueError(bad("model", "must have at least 6 dimensions per head and 12 channels", self.channels))
        self.axes = [_Axis(size, room // 2, kernel_size // 2) for size in self.grid]
        self.features = [axis.at(torch.arange(axis.size)).to(weight) for axis in self.axes]
        self.constants = any(not axis.exact for axis in self.axes)
        count = sum(part.shape[1] for part in self.features) + 2 * self.constants
        # The last `count` vectors of the cosine basis: orthonormal, and but for the first all of mean 0.
        self.basis = _cosines(self.channels)[:, self.channels - count :].T.to(weight)  # (features, c)

    def off(self, weight: Tensor) -> None:
        """Project outputs (the first axis) off the positions, in place."""
        flat = weight.flatten(1) if weight.dim() > 1 else weight[:, None]
        weight.sub_((self.basis.T @ (self.basis @ flat)).reshape(weight.shape))

    def make_room(self, images: Tensor) -> None:
        """Positions into the subspace, everything else out of it."""
        model = self.model
        writers = [model.patch_embed.proj] + [part for b in self.blocks for part in (b.attn.proj, b.mlp.fc2)]
        for writer in writers:
            self.off(writer.weight)
            if writer.bias is not None:
                self.off(writer.bias)
        for name in ("cls_token", "reg_token"):
            token = getattr(model, name, None)
            if token is not None:
                token.copy_(token - token @ self.basis.T @ self.basis)
        content = model.patch_embed(images)
        rows, columns = self.features
        height, width = self.grid
        both = torch.cat((rows[:, None].expand(-1, width, -1), columns[None].expand(height, -1, -1)), -1)
        # Two unit vectors: positions are as long as content is in the mean.
        scale = content.square().sum(-1).mean().div(2).sqrt()
        model.pos_embed.zero_()
        if self.constants:
            both = torch.cat((both, both.new_ones(height, width, 2)), -1)
            for name in ("cls_token", "reg_token"):
                token = getattr(model, name, None)
                if token is not None:
                    token.add_(scale * self.basis[-1])
        model.pos_embed[:, -height * width :] = scale * both.flatten(0, 1) @ self.basis

    def start_norm(self, layer: int) -> None:
        norm = self.blocks[layer].norm1
        norm.weight.fill_(1.0)
        norm.bias.zero_()

    def set_values(
        self, attention: Any, which: Tensor, taps: Tensor, filters: str | Tensor
    ) -> tuple[Tensor, Tensor, float]:
        """Values and `proj`; the kernel (c, c, K, K), the constant beside it, and the filters' own error."""
        size, heads = attention.head_dim, attention.num_heads
        inner = heads * size
        kept = 0.0
        value, out = attention.qkv.weight[2 * inner :], attention.proj.weight  # views
        if isinstance(filters, str):
            if filters == "impulse":
                if inner != self.channels:
                    raise ValueError(bad("filters", "must not be impulse where heads do not share channels", inner))
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
        bias = out.new_zeros(len(out)) if attention.proj.bias is None else attention.proj.bias
        if attention.qkv.bias is not None:
            bias = bias + out @ attention.qkv.bias[2 * inner :]
        return kernel, bias, kept

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
        self, layer: int, images: Tensor, shifts: Tensor, mass: float, kernel: tuple[Tensor, Tensor, float]
    ) -> LayerStart:
        """Queries and keys, as sharp as asked for; what they then do."""
        attention, seen = self.blocks[layer].attn, []
        handle = attention.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
        self.model(images)
        x = seen[-1]
        length = 4 if self.constants else 2  # of positions, squared, where the stream is not normalised
        place = (x[:, self.prefix :] @ self.basis.T).square().sum(-1).mean() / length
        size, inner = attention.head_dim, attention.num_heads * attention.head_dim
        keys = torch.cat((self.basis[:-2], self.basis[-1:])) if self.constants else self.basis
        count = len(keys)
        query, key = attention.qkv.weight[:inner], attention.qkv.weight[inner : 2 * inner]
        if attention.qkv.bias is not None:
            attention.qkv.bias[: 2 * inner] = 0.0
        maps = torch.stack([self._moved(shift) for shift in shifts.tolist()]) @ self.basis  # (h, features, c)
        queries = query.unflatten(0, (-1, size))  # a view
        key.unflatten(0, (-1, size))[:, :count] = keys  # the other rows keep their start: queries learn by them

        def masses(sharpness: float) -> Tensor:
            query.zero_()
            queries[:, :count] = maps * (sharpness / (place * attention.scale))
            return self._mass(attention, x, shifts)

        low, high = 0.0, SHARPEST
        for _ in range(40):  # bisection of the logarithm, 1 to SHARPEST
            middle = (low + 1) ** 0.5 * (high + 1) ** 0.5 - 1
            low, high = (middle, high) if float(masses(middle).mean()) < mass else (low, middle)
        held = masses(high)
        out = attention(x)[:, self.prefix :]
        handle.remove()
        weights, bias, lost = kernel
        image = x[:, self.prefix :].transpose(1, 2).unflatten(-1, self.grid)
        padded = F.pad(image, (weights.shape[-1] // 2,) * 4, mode="replicate")
        expected = (F.conv2d(padded, weights, bias)).flatten(2).transpose(1, 2)
        return LayerStart(shifts, held, float((out - expected).norm() / expected.norm()), lost)

    def _moved(self, shift: list[int]) -> Tensor:
        """B with B phi(i) = phi(i + delta)."""
        parts = [axis.moved(step) for axis, step in zip(self.axes, shift, strict=True)]
        if self.constants:
            parts.append(torch.tensor([[-2.0, 0.0]]))  # what meets b in the keys is -2 a
        return torch.block_diag(*parts).to(self.basis)

    def _mass(self, attention: Any, x: Tensor, shifts: Tensor) -> Tensor:
        """Attention of each head at its shift, over the queries for which it stays inside."""
        sizes = (3, attention.num_heads, attention.head_dim)
        query, key, _ = attention.qkv(x).unflatten(-1, sizes).permute(2, 0, 3, 1, 4)
        rows = (query[:, :, self.prefix :] @ key.transpose(-2, -1) * attention.scale).softmax(-1)[..., self.prefix :]
        height, width = self.grid
        index = torch.arange(height * width).reshape(height, width)
        found = []
        for head, (down, right) in enumerate(shifts.tolist()):
            inside = index[max(0, -down) : height - max(0, down), max(0, -right) : width - max(0, right)].flatten()
            found.append(rows[:, head, inside, inside + down * width + right].mean())
        return torch.stack(found)


def _check_filters(filters: Tensor, stock: _Stock) -> None:
    attention = stock.blocks[0].attn
    channels, size = stock.channels, filters.shape[-1]
    if filters.shape != (channels, channels, size, size) or size % 2 == 0 or size**2 > attention.num_heads:
        requirement = f"must be ({channels}, {channels}, K, K), K odd and K^2 at most {attention.num_heads} heads"
        raise ValueError(bad("filters", requirement, tuple(filters.shape)))


def _shifts(size: int) -> Int[Tensor, "s 2"]:
    """The shifts of a K x K kernel, from the centre outwards."""
    line = range(-(size // 2), size // 2 + 1)
    return torch.tensor(sorted(((a, b) for a in line for b in line), key=lambda d: (d[0] ** 2 + d[1] ** 2, d)))


def _cosines(size: int) -> Float[Tensor, "n n"]:
    """The orthonormal cosine basis: row i, frequency f."""
    place = torch.arange(size, dtype=torch.float64)
    table = torch.cos(torch.pi * (place[:, None] + 0.5) * place / size)
    return (table / table.norm(dim=0)).float()


@final
class _Axis:
    """phi of one axis: unit vectors for its places."""

    def __init__(self, size: int, room: int, reach: int) -> None:
        self.size, self.exact = size, room >= size
        # Beyond the end by `reach`, the last place must be nearer than the first, which comes round again.
        self.turns = 2 * torch.pi / (size + 2 * reach) * torch.arange(1, (room - 1) // 2 + 1, dtype=torch.float64)

    def at(self, places: Tensor) -> Tensor:
        """phi, (places, features)."""
        if self.exact:
            return _cosines(self.size)[places.clamp(0, self.size - 1)]
        angle = places[:, None] * self.turns
        return torch.cat((angle.cos(), angle.sin()), 1).float() / len(self.turns) ** 0.5

    def moved(self, step: int) -> Tensor:
        """B, by its action on all places: exact, since a basis is mapped or a plane is turned."""
        places = torch.arange(self.size)
        here, there = self.at(places).double(), self.at(places + step).double()
        return torch.linalg.lstsq(here, there, driver="gelsd").solution.T.float()
