"""Verification of conversions against error bounds, on random convolutions (Theorem 1) and on recast networks."""

import copy
import math
import random
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from attnconv._util.errors import bad
from attnconv._util.module_state import evaluating
from attnconv._util.value_checks import check_module
from attnconv.convert.layer_conversion import from_conv
from attnconv.layers.self_attention import SelfAttention
from attnconv.theory.conv_taps import FORWARD, TRANSPOSED, Convolution, extents, head_weights
from attnconv.theory.error_bounds import error_bound

Way: TypeAlias = Literal["dense", "kronecker", "shift"]
WAYS: tuple[Way, ...] = ("dense", "kronecker", "shift")
ALLOWED: dict[torch.dtype, float] = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@final
@dataclass(frozen=True)
class Proof:
    """Result of computing one convolution with attention.

    Attributes:
        title: Description of the convolution and the shape of the images.
        dtype: Dtype of weights, images and output.
        way: Method: `dense` (softmax of all scores), `kronecker` (one softmax per axis) or `shift` (for hard heads).
        alpha: Sharpness of the heads, in 1 / position^2.
        hard: Whether the heads are hard in this dtype, that is, attend to exactly one key per query.
        relative: Error, `max |output - expected| / max |expected|`; expected is the convolution's output in float64.
        tightness: Largest ratio of error to error bound over output channels; at most 1 if the bound holds.
    """

    title: str
    dtype: torch.dtype
    way: Way
    alpha: float
    hard: bool
    relative: float
    tightness: float


def draw_convolution(source: random.Random, dtype: torch.dtype) -> tuple[Convolution, Tensor]:
    """Sample a convolution and two images for it, with the random number generator `source` and the given dtype.

    Convolutions are ordinary or transposed, with one to three axes, kernel sizes 1 to 5, strides and dilations 1 to 3,
    padding as numbers, "same" or "valid", any padding mode, one, two or four groups, and with or without bias.
    """
    dims = source.choice((1, 2, 2, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(source.randint(low, high) for _ in range(dims))

    kernel, stride, dilation = each(1, (5, 5, 3)[dims - 1]), each(1, 3), each(1, 3)
    groups = source.choice((1, 1, 2, 4))
    inputs, outputs = 4 if groups == 4 else groups * source.randint(1, 3), groups * source.randint(1, 3)
    options: dict[str, Any] = {"groups": groups, "bias": source.random() < 0.7, "dtype": dtype}
    transposed = source.random() < 0.25
    if transposed:
        options["output_padding"] = tuple(source.randrange(max(a, b)) for a, b in zip(stride, dilation, strict=True))
        options["padding"] = each(0, 2)
    else:
        padding = source.choice(("numbers", "numbers", "same", "valid"))
        stride = (1,) * dims if padding == "same" else stride
        options["padding_mode"] = source.choice(("zeros", "replicate", "reflect", "circular"))
        options["padding"] = each(0, 3) if padding == "numbers" else padding
    kind: Any = (TRANSPOSED if transposed else FORWARD)[dims]
    conv: Convolution = kind(inputs, outputs, kernel, stride, dilation=dilation, **options)
    least = max(4, *extents(conv))  # at least as large as kernel and padding, as reflect and circular padding require
    sizes = each(5, 7) if transposed else each(least, least + 4)
    generator = torch.Generator().manual_seed(source.getrandbits(62))
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / len(conv.weight[0].flatten()) ** 0.5)
    return conv, torch.randn(2, inputs, *sizes, generator=generator).to(dtype)


def prove(cases: int = 200, *, seed: int = 0, soft: bool = False) -> Iterator[Proof]:
    """Sample random convolutions, compute each with attention, and yield one result per convolution and method.

    Args:
        cases: Number of convolutions, distributed evenly over float64, float32 and bfloat16.
        seed: Seed of the random convolutions.
        soft: Use soft heads, with alpha sampled log-uniformly from 0.3 to 20 / position^2, and only the `kronecker`
            method. By default, heads are hard and all methods are used.
    """
    source, dtypes = random.Random(seed), list(ALLOWED)
    ways: tuple[Way, ...] = ("kronecker",) if soft else WAYS
    for case in range(cases):
        conv, x = draw_convolution(source, dtypes[case % len(dtypes)])
        alpha = 0.3 * (20 / 0.3) ** source.random() if soft else None
        for way in ways:
            yield _measure(conv, x, from_conv(conv, alpha=alpha), way)


def perform(layer: SelfAttention, x: Tensor, way: Way) -> Tensor:
    """Return a layer's output computed with one of the `WAYS`; all but `shift` raise an error if a convolution runs."""
    if way == "shift":
        layer.plan(x.shape[2:], choose="shift")
        return layer(x)
    layer.unplan()
    layer.backend = "reference" if way == "dense" else "structured"
    with no_convolutions():
        return layer(x)


def no_convolutions() -> AbstractContextManager[Any]:
    """Return a context manager in which every PyTorch convolution operation raises a `RuntimeError`."""
    return _NoConvolutions()  # type: ignore[no-untyped-call]


class _NoConvolutions(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "conv" in func.name().partition("::")[2]:
            raise RuntimeError(f"{func.name()} was run inside no_convolutions()")
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _measure(conv: Convolution, x: Tensor, layer: SelfAttention, way: Way) -> Proof:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using padding='same' with even kernel", UserWarning)
        expected = copy.deepcopy(conv).double()(x.double())
    apart = (perform(layer, x, way).double() - expected).abs()
    axes = (0, *range(2, x.dim()))
    bound = error_bound(layer, x.double().amin(axes), x.double().amax(axes))
    scale = float(expected.abs().max())
    encoding: Any = layer.encoding
    return Proof(
        title=f"{conv} on {tuple(x.shape)}",
        dtype=x.dtype,
        way=way,
        alpha=float(encoding.alpha.min()),
        hard=layer.hard_shifts() is not None,
        relative=float(apart.max()) / scale if scale else 0.0,
        tightness=float((apart.amax(axes) / bound).max()),
    )


@final
@dataclass(frozen=True)
class LayerComparison:
    """Comparison of a convolution and its attention layer, on the convolution's inputs in the network.

    Attributes:
        name: Name of the layer in the model.
        heads: Number of heads.
        alpha: Smallest alpha of the heads, in 1 / position^2; None if they are not axis-aligned Gaussians.
        scale: Largest absolute value in the convolution's output.
        error: Largest absolute difference between the two outputs.
        bound: Largest `error_bound` over channels; None if `alpha` is None or weights are not slices of the kernel.
        flops: FLOPs of the convolution, 2 per multiply-add.
        attention_flops: FLOPs of the attention layer with its current plan and backend.
    """

    name: str
    heads: int
    alpha: float | None
    scale: float
    error: float
    bound: float | None
    flops: int
    attention_flops: int


@final
@dataclass(frozen=True)
class Comparison:
    """Result of `compare`.

    Attributes:
        layers: One entry per replaced convolution, in execution order.
        scale: Largest absolute value in the output of the original network.
        error: Largest absolute difference between the outputs of the two networks.
    """

    layers: tuple[LayerComparison, ...]
    scale: float
    error: float


def compare(model: nn.Module, recast: nn.Module, *inputs: Tensor) -> Comparison:
    """Compare a network with its recast copy on the same inputs, in evaluation mode and without gradients.

    Layer errors do not accumulate: each attention layer gets the input of its convolution in the original network.

    Args:
        model: The network.
        recast: The result of `recast(model)`.
        inputs: Arguments of the network's forward pass.

    Raises:
        TypeError: If `model` or `recast` is not a module.
        ValueError: If no convolution of `model` is an attention layer in `recast`.
    """
    check_module(model)
    check_module(recast, "recast")
    layers = {name: layer for name, layer in recast.named_modules() if isinstance(layer, SelfAttention)}
    convs = {name: conv for name, conv in model.named_modules() if isinstance(conv, Convolution) and name in layers}
    if not convs:
        raise ValueError(bad("recast", "must have an attention layer for at least one convolution of model", "none"))
    found: dict[str, LayerComparison] = {}
    with torch.no_grad(), evaluating(model), evaluating(recast), ExitStack() as hooks:
        for name, conv in convs.items():
            watch = partial(_compare_layer, found, name, layers[name])
            hooks.enter_context(conv.register_forward_hook(watch, with_kwargs=True))
        expected, made = (each(*(x.clone() for x in inputs)) for each in (model, recast))  # models may change inputs
    wanted, got = ([leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in (expected, made))
    errors = [float((a.double() - b.double()).abs().max()) for a, b in zip(wanted, got, strict=True)]
    scale = max(float(leaf.abs().max()) for leaf in wanted)
    return Comparison(tuple(found.values()), scale, float(torch.tensor(errors, dtype=torch.float64).max()))  # keeps NaN


def _compare_layer(
    found: dict[str, LayerComparison], name: str, layer: SelfAttention, conv: Any, given: Any, options: Any, _: Tensor
) -> None:
    """Compare both on the convolution's input; if it runs several times, keep the largest ratio of error to bound.

    Other hooks may have changed the output of the convolution, so it is computed again.
    """
    x = given[0] if given else options["input"]
    with FlopCounterMode(display=False) as before:
        out = conv.forward(*given, **options)
    with FlopCounterMode(display=False) as after:
        made = layer.forward(*given, **options)
    heads, bound = layer.encoding.gaussians(), None
    alpha = None if heads is None else heads.alpha
    if alpha is not None and layer.weight is not None and torch.equal(layer.weight, head_weights(conv)):
        pixels = x.double().movedim(-1 - layer.dims, 0).flatten(1)  # (c, values), for a batch or a single image
        bound = float(error_bound(layer, pixels.amin(1), pixels.amax(1)).max())
    now = LayerComparison(
        name=name,
        heads=layer.heads,
        alpha=None if alpha is None else float(alpha.min()),
        scale=float(out.abs().max()),
        error=float((made.double() - out.double()).abs().max()),
        bound=bound,
        flops=before.get_total_flops(),
        attention_flops=after.get_total_flops(),
    )

    def severity(row: LayerComparison) -> float:
        ratio = row.error if row.bound is None else row.error / max(row.bound, 1e-300)
        return math.inf if math.isnan(ratio) else ratio

    found[name] = max(found.get(name, now), now, key=severity)
