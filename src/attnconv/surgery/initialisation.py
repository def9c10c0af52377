"""Initialisation of vision transformers so that they learn faster on small data sets: `initialize`."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.module_state import all_or_nothing, evaluating
from attnconv._util.value_checks import check_module, indices, is_real
from attnconv.inspect.capture import blaming_images, check_images
from attnconv.inspect.module_adapters import vit_parts
from attnconv.layers.checks import check_finite
from attnconv.surgery import convolution_start, published_starts
from attnconv.surgery.convolution_start import ConvolutionStart, LayerStart

Method: TypeAlias = Literal["convolution", "mimetic", "impulse", "conditioned"]
Attention: TypeAlias = Literal["convolution", "mimetic", "impulse", "orthogonal", "unchanged"]
Values: TypeAlias = Literal["mimetic", "identity", "unchanged"]
Positions: TypeAlias = Literal["reserved", "normal", "unchanged"]

METHODS: dict[str, tuple[Attention, Values, Positions]] = {
    "convolution": ("convolution", "mimetic", "reserved"),
    "mimetic": ("mimetic", "mimetic", "unchanged"),
    "impulse": ("impulse", "mimetic", "normal"),
    "conditioned": ("orthogonal", "identity", "unchanged"),
}


@torch.no_grad()
def initialize(
    model: nn.Module,
    method: Method = "convolution",
    *,
    attention: Attention | None = None,
    values: Values | Float[Tensor, "d c K K"] | None = None,
    positions: Positions | None = None,
    identity: float = -0.4,
    noise: float = 0.4,
    mass: float = 0.5,
    kernel_size: int = 3,
    position_length: float = 0.5,
    layers: Iterable[int] | None = None,
    images: Float[Tensor, "b i height width"] | None = None,
    generator: Generator | None = None,
) -> dict[str, LayerStart]:
    """Initialise an untrained vision transformer, in place, so that it learns faster on small data sets.

    `method` chooses attention, values and positions together, and each can be replaced by an argument of its own:

    - `convolution`: each head attends to one shift of a K x K kernel; values `mimetic`, positions `reserved`.
    - `mimetic` (Trockman and Kolter, 2023): `W_q^T W_k` near 0.7 Z + 0.7 I; values `mimetic`, positions `unchanged`.
    - `impulse` (Zheng et al., 2025): each head prefers one shift of a 3 x 3 kernel; values `mimetic`, positions
      `normal`. It needs at least as many image tokens as channels per head.
    - `conditioned` (Saratchandran and Lucey, 2026): attention `orthogonal`, with orthonormal rows; values `identity`,
      positions `unchanged`.

    Z has independent normal entries of variance 1 / channels. Biases are unchanged, but `convolution` sets those of
    queries and keys to 0.

    Args:
        model: An untrained `VisionTransformer` from timm or torchvision, or ViT, DeiT or DINOv2 from Hugging Face.
        method: One of the methods above.
        attention: Query and key projections: `convolution`, `mimetic`, `impulse`, `orthogonal` or `unchanged`.
        values: Value and output projections: `mimetic` sets `W_out W_v = noise Z + identity I`, `identity` sets
            `W_v = I`; `unchanged`; or the weight of an `nn.Conv2d` with at most one tap per head, only with attention
            `convolution`. Its taps are replaced with their best approximations of the rank of their heads.
        positions: Positional vectors: `normal`, with standard deviation 0.36; `unchanged`; or `reserved`, in a subspace
            that no layer writes to. Attention `convolution` requires `reserved`, and no other attention accepts it.
        identity: Factor of the identity in mimetic values.
        noise: Factor of the random matrix in mimetic values.
        mass: Target for the mean attention of heads at their shifts, above 0 and below 1 (attention `convolution`).
        kernel_size: Kernel size K, odd (attention `convolution`); ignored if `values` is a tensor.
        position_length: Norm of positional vectors relative to content, above 0 (attention `convolution`).
        layers: Indices (from 0) of the blocks to initialise, at least one; None for all.
        images: Images used to measure the layers and scale the positional vectors (attention `convolution`). None uses
            2 images of Gaussian noise.
        generator: Random number generator on the CPU; None uses PyTorch's default generator.

    Returns:
        The initialisation of each layer and, with attention `convolution`, its measurements, by the name of the
        attention module.

    Raises:
        TypeError: If `model` is not a module, or `images` is not a dense floating-point tensor.
        ValueError: If the model is not supported; if an argument is invalid or does not match the model or the other
            arguments; if an image is constant, not finite or rejected by the model; or if the model would compute NaN
            or infinity. The model is unchanged after any exception.

    Warns:
        UserWarning: If the mean attention of a layer's heads at their shifts is below `mass`, or the rank limit changes
            the given filters by more than 1 % (relative).
    """
    check_module(model)
    for name, value, limit in (("mass", mass, 1), ("position_length", position_length, math.inf)):
        if not is_real(value) or not 0 < value < limit:
            raise ValueError(bad(name, "must be a number above 0" + " and below 1" * (limit == 1), repr(value)))
    for name, value in (("identity", identity), ("noise", noise)):
        if not is_real(value):
            raise ValueError(bad(name, "must be a finite number", repr(value)))
    attention, values, positions = _choice(method, attention, values, positions)
    parts = vit_parts(model)
    which = list(range(len(parts.blocks))) if layers is None else sorted(indices("layers", layers, len(parts.blocks)))
    if not which:
        raise ValueError(bad("layers", "must contain at least one block, or be None for all blocks", which))
    blocks = [parts.blocks[layer] for layer in which]
    channels, inner = parts.patches.out_channels, blocks[0].parts.out.in_features
    if isinstance(values, str) and values != "unchanged" and inner != channels:
        requirement = f"must be 'unchanged' or filters unless heads have {channels} channels in total"
        raise ValueError(bad("values", requirement, inner))
    check_finite(model.named_parameters(), origin="in model")
    if parts.positions.is_meta:
        raise ValueError(bad("model", "must have materialised weights", "a model on the meta device"))
    set_values = partial(
        published_starts.set_values, values=str(values), identity=identity, noise=noise, generator=generator
    )
    if attention != "convolution":
        found = {}
        with all_or_nothing(model):
            published_starts.set_positions(parts, positions, generator)
            for block in blocks:
                shifts = published_starts.set_scores(block.parts, attention, parts, generator)
                set_values(block.parts)
                found[block.name] = LayerStart(attention, str(values), shifts, mass=torch.zeros(0))
        return found
    if isinstance(values, Tensor):
        kernel_size = convolution_start.check_filters(values, channels, blocks[0].parts.heads)
        values = values.to_dense()
    taps = convolution_start.kernel_shifts(kernel_size, parts.grid)
    if images is None:
        sides = (count * stride for count, stride in zip(parts.grid, parts.patches.stride, strict=True))
        images = torch.randn(2, parts.patches.in_channels, *sides, generator=Generator().manual_seed(0))
        images = images.to(parts.positions)
    start = ConvolutionStart(model, parts, images, values, set_values, taps, mass, position_length)
    check_images(images)
    with all_or_nothing(model):
        with evaluating(model), blaming_images(model, images):
            found = start.run(blocks)
        convolution_start.warn(found, mass, blocks[0].parts, values)  # inside, since warnings may raise
    return found


def _choice(method: object, attention: object, values: object, positions: object) -> tuple[Any, Any, Any]:
    """Return the parts that the arguments choose; raise a `ValueError` for unknown names and combinations."""
    if method not in METHODS:
        raise ValueError(bad("method", f"must be one of {', '.join(METHODS)}", repr(method)))
    given = {"attention": attention, "values": values, "positions": positions}
    kinds = dict(zip(given, (Attention, Values, Positions), strict=True))
    chosen = dict(zip(given, METHODS[str(method)], strict=True)) | {n: v for n, v in given.items() if v is not None}
    for name, value in chosen.items():
        if not isinstance(value, Tensor) and value not in get_args(kinds[name]):
            raise ValueError(bad(name, f"must be one of {', '.join(get_args(kinds[name]))}", repr(value)))
    exact = chosen["attention"] == "convolution"
    if positions is None and exact != (chosen["positions"] == "reserved"):
        chosen["positions"] = "reserved" if exact else "unchanged"
    if exact != (chosen["positions"] == "reserved"):
        raise ValueError(bad("positions", "must be 'reserved' with attention 'convolution' only", repr(positions)))
    if isinstance(values, Tensor) and not exact:
        raise ValueError(bad("values", "must be a name unless attention is 'convolution'", "a tensor"))
    return chosen["attention"], chosen["values"], chosen["positions"]
