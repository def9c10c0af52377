"""Replacement of heads with fitted depthwise kernels, ranked by the first-order change of the model's output.

With the error e_h of a head's output (fitted minus actual), and the model's Jacobian J with respect to this output,

    cost_h = sqrt( E_r (r^T J e_h)^2 / |output|^2 ),      r standard normal, so that E_r (r^T J e)^2 = |J e|^2

The ratio is averaged over images. One backward pass per sample of r is enough for all heads of all layers.
"""

import copy
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Generic, Literal, TypeAlias, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.module_state import evaluating
from attnconv._util.value_checks import check_module, indices, whole
from attnconv.inspect.capture import blaming_images, check_images, checked_options, uncompiled
from attnconv.inspect.module_adapters import first_tensor
from attnconv.operators.base import score_dtype
from attnconv.surgery.convolved_attention import ConvolvedAttention, HeadMixing, fit_mixing, mixing_errors
from attnconv.surgery.replaceable_attention import LayerTokens, relative_size, replaceable

Model = TypeVar("Model", bound=nn.Module)
_DRAWS = 8  # number of samples of r
_RANKING_IMAGES = 16  # maximum number of images from which costs are computed
_GAIN = 0.1  # minimum reduction of a layer's cost by a larger kernel, relative to the mean cost of a layer

KernelSize: TypeAlias = int | Literal["full"]


@final
@dataclass(frozen=True)
class HeadCandidate:
    """A head that can be replaced, with the errors that its replacement would cause, in Euclidean norms.

    Attributes:
        layer: Name of the attention module.
        head: Index of the head in the module, from 0.
        constancy: Share of the attention map's energy that survives the projection on shift-invariant matrices, 0 to 1;
            see `ShiftProfile`.
        error: `|fitted - actual| / |actual|` of the head's output at the image tokens of held-out images. If windows
            extend beyond the image, their padding tokens are included.
        cost: Relative change in the model's output, to first order, if only this head is replaced.
        kernel_size: Kernel size K of its layer.
    """

    layer: str
    head: int
    constancy: float
    error: float
    cost: float
    kernel_size: int


@final
@dataclass(frozen=True, eq=False)
class Replacement(Generic[Model]):
    """Result of `replace_heads`, with errors measured on held-out images, in Euclidean norms.

    Attributes:
        model: Copy of the model with a `ConvolvedAttention` in place of each attention module with replaced heads.
        replaced: Heads that were replaced.
        candidates: All heads that can be replaced, in ascending order of cost.
        layer_errors: `|new - old| / |old|` of each changed layer's output, for its inputs in the original model.
        output_error: `|new - old| / |old|` of the first tensor of the model's output, with all these heads replaced.
        left_out: Reasons why the heads of other attention modules cannot be replaced, by module name.
    """

    model: Model
    replaced: tuple[HeadCandidate, ...]
    candidates: tuple[HeadCandidate, ...]
    layer_errors: Mapping[str, float]
    output_error: float
    left_out: Mapping[str, str]


@torch.inference_mode(False)
def replace_heads(
    model: Model,
    images: Float[Tensor, "b *image"],
    *,
    heads: Mapping[str, Iterable[int]] | None = None,
    count: int | None = None,
    layers: Collection[str] | None = None,
    kernel_size: KernelSize | Sequence[KernelSize] = 3,
    grid: Sequence[int] | None = None,
    prefix: int | None = None,
    options: Mapping[str, object] | None = None,
) -> Replacement[Model]:
    """Replace heads of a vision transformer with fitted depthwise convolutions; see `ConvolvedAttention`.

    Args:
        model: A vision transformer from timm, Hugging Face or torchvision, an `nn.TransformerEncoder`, or any model
            whose attention modules use the same names for their parts. Other attention, such as attention pooling, is
            kept and listed in `left_out`.
        images: At least 2 images (b, c, height, width), normalised as in training, at the size that the model will use.
            The last quarter is held out. If the model's input is tokens, (b, tokens, channels), also pass `grid`.
        heads: Indices of heads (from 0) to replace, by module name. Pass exactly one of `heads` and `count`.
        count: Number of heads to replace; those with the lowest `HeadCandidate.cost` are chosen.
        layers: Names of the attention modules to choose from; None for all modules whose heads can be replaced.
        kernel_size: Kernel size K, odd and at most 2 n - 1, with n tokens on the longer side of the image (or window);
            `full` is 2 n - 1 in each layer, so that the kernel has all shifts. If several sizes are given, each layer
            uses the smallest one, unless a larger one reduces the norm of its heads' costs by more than 10 % of the
            mean of this norm over layers.
        grid: Tokens per axis of an image, (height, width), if they cannot be inferred from the model; see `audit`.
        prefix: Number of class tokens and registers before the image tokens, if it cannot be inferred.
        options: Additional keyword arguments for the model's forward pass, usable with any number of images.

    Raises:
        TypeError: If `model` is not a module, or `images` is not a dense floating-point tensor.
        ValueError: If an image is constant, not finite or rejected by the model; if an argument is out of range; if a
            layer or head does not exist or cannot be replaced; if `count` exceeds the number of heads; or if the first
            tensor of the model's output is not differentiable, not finite, or zero for an image.

    Example:
        >>> import timm  # doctest: +SKIP
        >>> vit = timm.create_model("vit_tiny_patch16_224", pretrained=True).eval()  # doctest: +SKIP
        >>> replace_heads(vit, images, count=6).output_error  # doctest: +SKIP
    """
    check_module(model)
    check_images(images, least=2)  # one to fit kernels and one held out
    _check(heads, count, layers)
    sizes = _sizes(kernel_size)
    images = images.clone() if images.is_inference() else images  # costs need gradients
    fitted = max(1, len(images) * 3 // 4)
    call = checked_options(model, images, options)
    with blaming_images(model, images, call):
        tokens, left_out = replaceable(model, images, layers=layers, grid=grid, prefix=prefix, options=call)
    mixings: dict[str, HeadMixing] = {}
    costs: dict[str, Tensor] = {}
    typical = 0.0
    for size in sizes:
        found = {name: fit_mixing(part.of(slice(fitted)), _size_in(name, part, size)) for name, part in tokens.items()}
        of_size = _costs(model, images[: min(fitted, _RANKING_IMAGES)], tokens, found, call)
        typical = typical or fmean(float(cost.norm()) for cost in of_size.values())
        for name, cost in of_size.items():
            if name not in costs or costs[name].norm() - cost.norm() > _GAIN * typical:
                mixings[name], costs[name] = found[name], cost
    held_out = {name: part.of(slice(fitted, None)) for name, part in tokens.items()}
    candidates = _candidates(held_out, mixings, costs)
    if heads is None:
        chosen = candidates[:count]
        if len(chosen) < (count or 0):
            raise ValueError(bad("count", f"must be at most {len(chosen)}, the number of replaceable heads", count))
    else:
        chosen = _named(candidates, heads, left_out)
    changed, errors = copy.deepcopy(model), {}
    for name in dict.fromkeys(entry.layer for entry in chosen):
        some = sorted(entry.head for entry in chosen if entry.layer == name)
        errors[name] = _layer_error(held_out[name], mixings[name], some)
        new, old = ConvolvedAttention(tokens[name], mixings[name], heads=some), changed.get_submodule(name)
        for place, module in list(changed.named_modules(remove_duplicate=False)):
            if module is old:  # a module may have several names
                changed.set_submodule(place, new)
    with torch.no_grad():
        after, before = (nonzero_output(each, images[fitted:], call) for each in (changed, model))
    output_error = float((after - before).norm() / before.norm())
    return Replacement(changed, tuple(chosen), tuple(candidates), errors, output_error, left_out)


def _check(heads: object, count: Any, layers: Any) -> None:
    if (heads is None) == (count is None):
        raise ValueError(bad("heads, count", "exactly one of the two must be given", f"heads={heads}, count={count}"))
    if count is not None:
        whole("count", count, 0)
    named = isinstance(layers, Collection) and len(layers) > 0 and not isinstance(layers, str)
    if layers is not None and not (named and all(isinstance(name, str) for name in layers)):
        raise ValueError(bad("layers", "must be a list of at least one name, or None", repr(layers)))
    if heads is not None and not isinstance(heads, Mapping):
        raise ValueError(bad("heads", "must map names of attention modules to lists of head indices", repr(heads)))


def _sizes(kernel_size: Any) -> list[KernelSize]:
    """Return the kernel sizes in ascending order."""
    several = isinstance(kernel_size, Sequence) and not isinstance(kernel_size, str)
    sizes: list[Any] = list(kernel_size) if several else [kernel_size]
    for size in sizes:
        if size != "full" and (isinstance(size, str) or whole("kernel_size", size, 1) % 2 == 0):
            raise ValueError(bad("kernel_size", "must be an odd integer, or 'full'", repr(size)))
    if not sizes:
        raise ValueError(bad("kernel_size", "must contain at least one size", kernel_size))
    return sorted(sizes, key=lambda size: math.inf if size == "full" else size)


def _size_in(name: str, part: LayerTokens, size: KernelSize) -> int:
    """Return a kernel size for a layer as an integer."""
    most = 2 * max(part.grid) - 1  # no token can read larger shifts
    if size == "full":
        return most
    if size > most:
        requirement = f"must be at most {most} for the {part.grid[0]} x {part.grid[1]} tokens of {name}"
        raise ValueError(bad("kernel_size", requirement, size))
    return size


def _costs(
    model: nn.Module,
    images: Tensor,
    tokens: Mapping[str, LayerTokens],
    mixings: Mapping[str, HeadMixing],
    options: Mapping[str, object],
) -> dict[str, Tensor]:
    """Return cost_h for each layer, (h,)."""
    zeros: dict[str, Tensor] = {}  # added to the output of each layer, to get gradients with respect to it

    def tap(name: str, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        first, *rest = output if isinstance(output, tuple) else (output,)
        zeros[name] = torch.zeros_like(first, requires_grad=True)
        return (first + zeros[name], *rest) if isinstance(output, tuple) else first + zeros[name]

    with torch.enable_grad(), ExitStack() as hooks:
        for name, part in tokens.items():
            hooks.enter_context(part.attention.register_forward_hook(partial(tap, name)))
        output = nonzero_output(model, images, options)
    if not output.requires_grad:
        raise ValueError(bad("model", "must be differentiable with respect to its attention layers", "no gradient"))
    used = {name: part.of(slice(len(images))) for name, part in tokens.items()}
    mixed = {name: mixing_errors(part, mixings[name]) for name, part in used.items()}
    generator = torch.Generator().manual_seed(0)
    sums: dict[str, Tensor] = {}
    exact = score_dtype(output.dtype)  # squares of half-precision numbers overflow and underflow
    for _ in range(_DRAWS):
        direction = torch.randn(output.shape, generator=generator).to(output)
        inputs = [zeros[name] for name in used]  # some may not affect the first output tensor
        slopes = torch.autograd.grad(output, inputs, direction, retain_graph=True, materialize_grads=True)
        for (name, part), slope in zip(used.items(), slopes, strict=True):
            slope = slope if part.call.batch_first else slope.transpose(0, 1)
            error, given = mixed[name]
            with torch.enable_grad():
                made = part.parts.finish(given.requires_grad_())
            (pulled,) = torch.autograd.grad(made, given, slope[:, part.prefix :])
            change = torch.einsum("bhnd,bhnd->bh", pulled.to(exact), error.to(exact))
            change = change.unflatten(0, (-1, part.sequences)).sum(1).square() / _DRAWS
            sums[name] = sums.get(name, torch.zeros_like(change)) + change
    size = output.detach().flatten(1).to(exact).square().sum(1, keepdim=True)
    return {name: (total / size).mean(0).sqrt() for name, total in sums.items()}


def _candidates(
    tokens: Mapping[str, LayerTokens], mixings: Mapping[str, HeadMixing], costs: Mapping[str, Tensor]
) -> list[HeadCandidate]:
    """Return all heads in ascending order of cost."""
    found = []
    for name, part in tokens.items():
        error, given = (each.transpose(0, 1).flatten(1).norm(dim=1) for each in mixing_errors(part, mixings[name]))
        measures = (part.constancy, relative_size(error, given), costs[name])
        columns = (measure.tolist() for measure in measures)
        sizes = [mixings[name].profile.shape[-1]] * part.parts.heads
        found += [HeadCandidate(name, *row) for row in zip(range(len(sizes)), *columns, sizes, strict=True)]
    return sorted(found, key=lambda entry: entry.cost)


def _named(
    candidates: Sequence[HeadCandidate], heads: Mapping[str, Any], left_out: Mapping[str, str]
) -> list[HeadCandidate]:
    chosen = []
    for name, some in heads.items():
        if name in left_out:
            raise ValueError(left_out[name])
        layer = {entry.head: entry for entry in candidates if entry.layer == name}
        if not layer:
            known = ", ".join(sorted({entry.layer for entry in candidates}))
            raise ValueError(bad("heads", f"must contain only attention modules, by name: {known}", repr(name)))
        chosen += [layer[head] for head in indices(f"heads[{name!r}]", some, len(layer))]
    return chosen


@torch.no_grad()
def _layer_error(tokens: LayerTokens, mixing: HeadMixing, heads: list[int]) -> float:
    """Return `|new - old| / |old|` of a layer's output with some heads replaced."""
    error, given = mixing_errors(tokens, mixing)
    old = tokens.parts.finish(given)
    given[:, heads] += error[:, heads]
    return float(relative_size((tokens.parts.finish(given) - old).norm(), tokens.outputs.norm()))


def nonzero_output(model: nn.Module, images: Tensor, options: Mapping[str, object]) -> Tensor:
    """Return the first tensor of a model's output; raise an error if relative changes of it are undefined."""
    output = output_of(model, images, options)
    size = output.detach().flatten(1).norm(dim=1)
    if not bool(((size > 0) & size.isfinite()).all()):
        fix = "Errors are relative to the output. If the last layer's weights are zero, load or train weights first."
        got = "zeros" if bool(size.isfinite().all()) else "NaN or infinity"
        raise ValueError(bad("model", "must return finite values, not all zero, for each image", got, fix))
    return output


def output_of(model: nn.Module, images: Tensor, options: Mapping[str, object]) -> Tensor:
    """Return the first tensor of a model's output, in evaluation mode."""
    with evaluating(model), uncompiled(model):
        output = first_tensor(model(images, **options))
    if output is None or not output.is_floating_point() or output.dim() == 0 or len(output) != len(images):
        got = "no tensor" if output is None else f"shape {tuple(output.shape)} of {output.dtype}"
        requirement = f"must return a floating-point tensor first, with a batch axis for {len(images)} images"
        raise ValueError(bad("model", requirement, got))
    return output
