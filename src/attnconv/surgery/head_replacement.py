"""Acting on convolution-like heads: replace them by fitted depthwise kernels, and say what that costs.

Heads are ranked by what their replacement does to the model's output, to first order. With the head's error e_h (its
fitted mixing minus its own output) and the derivative J of what the model makes of the heads' output,

    cost_h = sqrt( E_r (r^T J e_h)^2 / |output|^2 ),      r standard normal, so that E_r (r^T J e)^2 = |J e|^2

with a mean over images. One backward pass per draw of r serves all heads of all layers.
"""

import copy
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.eval_mode import evaluating
from attnconv._util.input_checks import check_module
from attnconv._util.value_checks import is_real, whole
from attnconv.inspect.capture import checked_options, uncompiled
from attnconv.inspect.image_checks import blaming_images, check_images
from attnconv.inspect.module_adapters import first_tensor
from attnconv.inspect.score_modifiers import CallForm
from attnconv.surgery.head_kernel_fit import (
    Fit,
    LayerTokens,
    chosen_heads,
    fit_mixing,
    layer_error,
    mixing_errors,
    relative_size,
)
from attnconv.surgery.partly_convolved_attention import ConvolvedAttention, HeadMixing
from attnconv.surgery.replaceable_attention import replaceable

Model = TypeVar("Model", bound=nn.Module)
DRAWS = 8  # of r
RANKING_IMAGES = 16  # whose first-order costs are taken


@final
@dataclass(frozen=True)
class HeadCandidate:
    """One head and what a fixed mixing makes of it.

    Attributes:
        layer: Name of its attention module.
        head: Its index there.
        constancy: How constant its pattern is as the query moves, 0 to 1 (`ShiftProfile.constancy`).
        window_mass: The attention it spends on the K x K shifts, a mean over the image's tokens and the images.
        error: `|fitted - its own output| / |its own output|` at the image's tokens of held-out images. Where windows
            hang over the image's border, the padding in them counts as well.
        cost: First-order relative change of the model's output by its replacement alone; see the module's formula.
    """

    layer: str
    head: int
    constancy: float
    window_mass: float
    error: float
    cost: float


@final
@dataclass(frozen=True, eq=False)
class Replacement(Generic[Model]):
    """A model with replaced heads, and what was measured. Errors are on held-out images.

    Attributes:
        model: A copy; the replaced modules are `ConvolvedAttention`.
        replaced: The heads that were replaced.
        candidates: All heads that could have been, cheapest first.
        layer_errors: Per changed layer: `|new - old| / |old|` of its output, given the old model's input.
        output_error: The same for the first tensor of the model's output, with all replacements at once.
        passed_over: Name of each other attention module, whose heads cannot be replaced -> why.
    """

    model: Model
    replaced: tuple[HeadCandidate, ...]
    candidates: tuple[HeadCandidate, ...]
    layer_errors: Mapping[str, float]
    output_error: float
    passed_over: Mapping[str, str]


@torch.inference_mode(False)
def replace_heads(
    model: Model,
    images: Float[Tensor, "b *image"],
    *,
    heads: Mapping[str, Iterable[int]] | None = None,
    count: int | None = None,
    layers: Collection[str] | None = None,
    least_constancy: float = 0.0,
    kernel_size: int = 3,
    fit: Fit = "least_squares",
    grid: Sequence[int] | None = None,
    prefix: int | None = None,
    options: Mapping[str, object] | None = None,
) -> Replacement[Model]:
    """Replace heads of a vision transformer by depthwise convolutions fitted to them; see `ConvolvedAttention`.

    The kernels, the weights on class tokens and that on the image's mean are parameters: the copy can be trained on.
    Queries of the replaced heads are no longer computed for the image's tokens, nor are keys, unless there are class
    tokens to read them and keys are normalised or turned.

    Args:
        model: A vision transformer of timm (ViT, BEiT, EVA, DINOv3, Swin), of Hugging Face (ViT, DeiT, DINOv2, DINOv3,
            BEiT, Swin), of torchvision, of `nn.TransformerEncoder`, or any model whose attention modules have the
            parts that `attention_parts` knows. Other attention, as that of a pooling head, is left as it is and named
            in `passed_over`.
        images: At least 2, (b, c, height, width), normalised as in training, in the size in which the model will run.
            The last quarter is held out. For a model of tokens, as `nn.TransformerEncoder`, these, with `grid`.
        heads: Name of the attention module -> heads to replace. Exactly one of `heads` and `count` is given.
        count: Replace this many heads, those with the least cost.
        layers: Names of the attention modules to choose from; None for all whose heads can be replaced.
        least_constancy: With `count`, only heads at least this constant, 0 to 1.
        kernel_size: K, odd, at most 2 n - 1 on n x n tokens (or windows): beyond that no token reads all of it.
        fit: `least_squares` fits the values that the heads mix, `mean` takes the mean attention.
        grid: Tokens of the image, (height, width), for models that do not say it, as `audit`.
        prefix: Class tokens and registers before them, likewise.
        options: Further arguments of the model's forward pass by name, the same for any number of images.

    Raises:
        TypeError: `model` is no module, or `images` are no dense tensor of floating point.
        ValueError: An image is constant or holds NaN or infinity, or is not what the model takes (its own words are
            passed on); an argument is out of range, a layer or head does not exist, no attention or not one that is
            named is softmax attention by parts of known names, or fewer heads than `count` are constant enough; or
            the first tensor of the model's output has no gradients, is not finite or is zero.

    Example:
        >>> import timm  # doctest: +SKIP
        >>> vit = timm.create_model("vit_tiny_patch16_224", pretrained=True).eval()  # doctest: +SKIP
        >>> replace_heads(vit, images, count=6).output_error  # doctest: +SKIP
    """
    check_module(model)
    _check(images, heads, count, least_constancy, kernel_size, fit)
    _check_names(heads, layers, least_constancy)
    images = images.clone() if images.is_inference() else images  # costs need gradients
    fitted = max(1, len(images) * 3 // 4)
    call = checked_options(model, images, options)
    with blaming_images(model, images, call):
        wanted = None if layers is None else frozenset(layers)
        looked = replaceable(model, images, layers=wanted, grid=grid, prefix=prefix, options=call)
    tokens = looked.tokens
    _check_extents(tokens, kernel_size)
    mixings: dict[str, HeadMixing] = {
        name: fit_mixing(part.of(slice(fitted)), kernel_size, fit=fit) for name, part in tokens.items()
    }
    costs = _costs(model, images[: min(fitted, RANKING_IMAGES)], tokens, mixings, calls=looked.calls, options=call)
    candidates = _candidates(tokens, mixings, looked.constancy, costs, fitted)
    chosen = (
        _named(candidates, heads, looked.passed_over)
        if heads is not None
        else _cheapest(candidates, count or 0, least_constancy)
    )
    changed, errors = copy.deepcopy(model), {}
    for name in dict.fromkeys(entry.layer for entry in chosen):
        some = sorted(entry.head for entry in chosen if entry.layer == name)
        errors[name] = layer_error(tokens[name].of(slice(fitted, None)), mixings[name], some)
        new, old = _new(tokens[name], mixings[name], some, looked.calls[name]), changed.get_submodule(name)
        for place in _places(changed, old):
            parent, _, last = place.rpartition(".")
            setattr(changed.get_submodule(parent), last, new)
    output_error = _relative_error(changed, model, images[fitted:], call)
    return Replacement(changed, tuple(chosen), tuple(candidates), errors, output_error, looked.passed_over)


def _check(
    images: Tensor,
    heads: object,
    count: int | None,
    least_constancy: float,
    kernel_size: int,
    fit: str,
) -> None:
    check_images(images, least=2)  # one is held out
    if (heads is None) == (count is None):
        raise ValueError(bad("heads, count", "must be given the one or the other", f"heads={heads}, count={count}"))
    if count is not None:
        whole("count", count, 0)
    if not is_real(least_constancy) or not 0 <= least_constancy <= 1:
        raise ValueError(bad("least_constancy", "must be a number from 0 to 1", repr(least_constancy)))
    if whole("kernel_size", kernel_size, 1) % 2 == 0:
        raise ValueError(bad("kernel_size", "must be odd", kernel_size))
    if fit not in get_args(Fit):
        raise ValueError(bad("fit", f"must be one of {', '.join(get_args(Fit))}", repr(fit)))


def _check_extents(tokens: Mapping[str, LayerTokens], kernel_size: int) -> None:
    """Refuse kernels with rows or columns that no token can read: they would cost time and memory for nothing."""
    for name, part in tokens.items():
        if kernel_size > (most := 2 * max(part.grid) - 1):
            height, width = part.grid
            raise ValueError(
                bad("kernel_size", f"must be at most {most} on {height} x {width} tokens of {name}", kernel_size)
            )


def _check_names(heads: object, layers: object, least_constancy: float) -> None:
    """Refuse names that are none, which would be read letter by letter or not at all."""
    if isinstance(layers, str) or (layers is not None and not layers):
        raise ValueError(bad("layers", "must be a list of at least one name, or None", repr(layers)))
    if heads is None:
        return
    lists = isinstance(heads, Mapping) and all(
        isinstance(some, Iterable) and not isinstance(some, str) for some in heads.values()
    )
    if not lists:
        raise ValueError(
            bad("heads", "must be a mapping from names of attention modules to lists of heads", repr(heads))
        )
    if least_constancy > 0:
        requirement = "must be 0 where `heads` are named: it chooses among those to be counted"
        raise ValueError(bad("least_constancy", requirement, least_constancy))


def _places(model: nn.Module, wanted: nn.Module) -> list[str]:
    """All names of a module: the forward pass may call it by another than the first."""
    return [name for name, module in model.named_modules(remove_duplicate=False) if module is wanted]


def _new(part: LayerTokens, mixing: HeadMixing, some: list[int], call: CallForm) -> ConvolvedAttention:
    """The module with some heads replaced, in the mode of the old one."""
    new = ConvolvedAttention(
        part.attention,
        chosen_heads(mixing, some),
        heads=some,
        grid=part.grid,
        call=call,
        added=part.terms.added is not None,
        masked=part.terms.blocks(),
    )
    return new.train(part.attention.training)


def _costs(
    model: nn.Module,
    images: Tensor,
    tokens: Mapping[str, LayerTokens],
    mixings: Mapping[str, HeadMixing],
    *,
    calls: Mapping[str, CallForm],
    options: Mapping[str, object],
) -> dict[str, Tensor]:
    """cost_h of the module's formula, (h,) per layer."""
    names = list(tokens)
    zeros: dict[str, Tensor] = {}

    def tap(name: str) -> Any:
        def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
            first, *rest = output if isinstance(output, tuple) else (output,)
            zeros[name] = torch.zeros_like(first, requires_grad=True)
            return (first + zeros[name], *rest) if isinstance(output, tuple) else first + zeros[name]

        return hook

    handles = [tokens[name].attention.register_forward_hook(tap(name)) for name in names]
    try:
        with evaluating(model), uncompiled(model), torch.enable_grad():
            output = _output(model, images, options)
    finally:
        for handle in handles:
            handle.remove()
    if not output.requires_grad:
        raise ValueError(bad("model", "must have gradients from its attention to its output", "none"))
    held = {name: tokens[name].of(slice(len(images))) for name in names}
    mixed = {name: mixing_errors(held[name], mixings[name]) for name in names}
    generator = torch.Generator().manual_seed(0)
    sums: dict[str, Tensor] = {}
    for _ in range(DRAWS):
        direction = torch.randn(output.shape, generator=generator).to(output)
        inputs = [zeros[name] for name in names]  # not all need reach the first tensor of the output
        slopes = torch.autograd.grad(output, inputs, direction, retain_graph=True, materialize_grads=True)
        for name, slope in zip(names, slopes, strict=True):
            part = held[name]
            slope = slope if calls[name].batch_first else slope.transpose(0, 1)
            missing, given = mixed[name]
            with torch.enable_grad():
                made = part.parts.finish(given.requires_grad_())
            (pulled,) = torch.autograd.grad(made, given, slope[:, part.prefix :])
            change = torch.einsum("bhnd,bhnd->bh", pulled, missing)
            change = change.unflatten(0, (-1, part.sequences)).sum(1).square() / DRAWS
            sums[name] = sums.get(name, torch.zeros_like(change)) + change
    size = output.detach().flatten(1).square().sum(1, keepdim=True)
    return {name: (total / size).mean(0).sqrt() for name, total in sums.items()}


def _candidates(
    tokens: Mapping[str, LayerTokens],
    mixings: Mapping[str, HeadMixing],
    constancy: Mapping[str, Tensor],
    costs: Mapping[str, Tensor],
    fitted: int,
) -> list[HeadCandidate]:
    """All heads, cheapest first."""
    found = []
    for name, part in tokens.items():
        missing, given = (each.transpose(0, 1) for each in mixing_errors(part.of(slice(fitted, None)), mixings[name]))
        errors = relative_size(missing.flatten(1).norm(dim=1), given.flatten(1).norm(dim=1))
        rows = zip(
            constancy[name].tolist(),
            part.taps(mixings[name].profile.shape[-1]).mass(mixings[name].profile).tolist(),
            errors.tolist(),
            costs[name].tolist(),
            strict=True,
        )
        found += [HeadCandidate(name, head, *row) for head, row in enumerate(rows)]
    return sorted(found, key=lambda entry: entry.cost)


def _named(
    candidates: Sequence[HeadCandidate], heads: Mapping[str, Iterable[int]], passed_over: Mapping[str, str]
) -> list[HeadCandidate]:
    by_place = {(entry.layer, entry.head): entry for entry in candidates}
    layers = dict.fromkeys(sorted(entry.layer for entry in candidates))
    for name in heads:
        if name in passed_over:
            raise ValueError(passed_over[name])
        if name not in layers:
            raise ValueError(bad("heads", f"must name heads of {', '.join(layers)}", repr(name)))
    wanted = [(name, head) for name, some in heads.items() for head in _numbers(name, some)]
    for name, head in wanted:
        if (name, head) not in by_place:
            count = sum(entry.layer == name for entry in candidates)
            raise ValueError(bad("heads", f"must be from 0 to {count - 1} in {name}", head))
    return [by_place[place] for place in wanted]


def _numbers(name: str, some: Iterable[int]) -> list[int]:
    """Heads as whole numbers, each once; numpy and torch have their own."""
    try:
        return list(dict.fromkeys(operator.index(head) for head in some))
    except TypeError as error:
        raise ValueError(bad("heads", f"must be whole numbers in {name}", str(error))) from error


def _cheapest(candidates: Sequence[HeadCandidate], count: int, least_constancy: float) -> list[HeadCandidate]:
    enough = [entry for entry in candidates if entry.constancy >= least_constancy]
    if count > len(enough):
        requirement = f"must be at most {len(enough)}, the heads of constancy {least_constancy:g} and more"
        raise ValueError(bad("count", requirement, count))
    return enough[:count]


@torch.no_grad()
def _relative_error(new: nn.Module, old: nn.Module, images: Tensor, options: Mapping[str, object]) -> float:
    """|new - old| / |old| of two models in evaluation mode."""
    outputs = []
    for model in (new, old):
        with evaluating(model), uncompiled(model):
            outputs.append(_output(model, images, options))
    return float((outputs[0] - outputs[1]).norm() / outputs[1].norm())


def _output(model: nn.Module, images: Tensor, options: Mapping[str, object]) -> Tensor:
    """The first tensor that a model gives, refused where no relative change of it can be taken."""
    output = first_tensor(model(images, **options))
    if output is None:
        raise ValueError(bad("model", "must give a tensor", "none among its outputs"))
    if not output.is_floating_point() or output.dim() == 0 or len(output) != len(images):
        got = f"shape {tuple(output.shape)} of {output.dtype} for {len(images)} images"
        raise ValueError(bad("model", "must first give floating point numbers for each image, the batch first", got))
    size = output.detach().flatten(1).norm(dim=1)
    if not bool(size.isfinite().all()):
        raise ValueError(bad("model", "must give finite numbers", "NaN or infinity"))
    if not bool((size > 0).all()):
        fix = "Errors are measured against them. A last layer that starts at zero needs weights first."
        raise ValueError(bad("model", "must give numbers that are not all zero for an image", "zeros", fix))
    return output
