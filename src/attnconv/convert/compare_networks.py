"""Compare a network with its recast: the cost and the error of each layer."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from attnconv._util.errors import bad
from attnconv._util.eval_mode import evaluating
from attnconv._util.input_checks import check_module
from attnconv.layers.self_attention import SelfAttention
from attnconv.theory.conv_taps import Convolution, head_weights, is_convolution
from attnconv.theory.error_bounds import error_bound


@final
@dataclass(frozen=True)
class LayerComparison:
    """A convolution and its attention layer, on the inputs that the network gives the convolution.

    Attributes:
        name: The layer's name in the model.
        heads: Number of heads.
        alpha: Smallest alpha of its heads, in 1 / pixel^2; None if heads are not Gaussian.
        scale: Largest absolute output of the convolution.
        error: Largest absolute difference between the two outputs.
        bound: `error_bound` for inputs of this range; None if heads are not Gaussian or their weights are not the
            kernel's slices.
        flops: Of the convolution, 2 x multiply-adds.
        attention_flops: Of the attention layer, as it runs.
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
    """The result of `compare`.

    Attributes:
        layers: One entry per replaced convolution, in the order in which they first run.
        scale: Largest absolute output of the whole network.
        error: Largest absolute difference between the networks' outputs.
    """

    layers: tuple[LayerComparison, ...]
    scale: float
    error: float


def compare(model: nn.Module, recast: nn.Module, *inputs: Tensor) -> Comparison:
    """Run a network and its recast on the same inputs, in evaluation mode and without gradients.

    Errors do not accumulate over layers: each attention layer sees what the original network feeds its convolution.

    Args:
        model: The network.
        recast: `recast(model)`.
        inputs: Arguments of the network's forward pass.

    Raises:
        TypeError: One of the two is no module.
        ValueError: No convolution of the model has an attention layer in its place.
    """
    check_module(model)
    check_module(recast, "recast")
    twins = dict(recast.named_modules())
    pairs = {
        name: (module, twins[name])
        for name, module in model.named_modules()
        if is_convolution(module) and isinstance(twins.get(name), SelfAttention)
    }
    if not pairs:
        raise ValueError(bad("recast", "must have attention layers where the model has convolutions", "none"))
    found: dict[str, LayerComparison] = {}

    def watch(name: str, layer: Any) -> Callable[..., None]:
        def hook(conv: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> None:
            now = _layer(name, conv, layer, arguments, options, output)
            found[name] = max(found.get(name, now), now, key=_severity)  # it may run several times

        return hook

    with torch.no_grad(), evaluating(model), evaluating(recast), ExitStack() as hooks:
        for name, (conv, layer) in pairs.items():
            hooks.enter_context(conv.register_forward_hook(watch(name, layer), with_kwargs=True))
        expected, made = model(*inputs), recast(*inputs)
    wanted, got = ([leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in (expected, made))
    error = max(float((a.double() - b.double()).abs().max()) for a, b in zip(wanted, got, strict=True))
    return Comparison(tuple(found.values()), max(float(leaf.abs().max()) for leaf in wanted), error)


def _layer(
    name: str,
    conv: Convolution,
    layer: SelfAttention,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    output: Tensor,
) -> LayerComparison:
    x = arguments[0] if arguments else options["input"]
    with FlopCounterMode(display=False) as before:
        conv.forward(*arguments, **options)
    with FlopCounterMode(display=False) as after:
        made = layer.forward(*arguments, **options)
    heads, bound = layer.encoding.gaussians(), None
    alpha = None if heads is None else heads.alpha
    if alpha is not None and layer.weight is not None and torch.equal(layer.weight, head_weights(conv)):
        pixels = x.double().movedim(-1 - layer.dims, 0).flatten(1)  # by channels, of a batch or of one image
        bound = float(error_bound(layer, pixels.amin(1), pixels.amax(1)).max())
    return LayerComparison(
        name=name,
        heads=layer.heads,
        alpha=None if alpha is None else float(alpha.min()),
        scale=float(output.abs().max()),
        error=float((made.double() - output.double()).abs().max()),
        bound=bound,
        flops=before.get_total_flops(),
        attention_flops=after.get_total_flops(),
    )


def _severity(row: LayerComparison) -> float:
    """Error relative to its bound, if there is one."""
    return row.error if row.bound is None else row.error / max(row.bound, 1e-300)
