"""Acting on convolution-like heads: replace them by fitted depthwise kernels, and say what that costs.

Heads are ranked by what their replacement does to the model's output, to first order. With the head's error e_h (its
fitted mixing minus its own output) and the derivative J of what the model makes of the heads' output,

    cost_h = sqrt( E_r (r^T J e_h)^2 / |output|^2 ),      r standard normal, so that E_r (r^T J e)^2 = |J e|^2

with a mean over images. One backward pass per draw of r serves all heads of all layers.
"""

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._errors import bad
from attnconv._modes import evaluating
from attnconv._values import is_real, whole
from attnconv.analysis.attention_parts import first_tensor
from attnconv.analysis.convolved_attention import ConvolvedAttention, HeadMixing
from attnconv.analysis.head_kernels import Fit, LayerTokens, chosen_heads, fit_mixing, layer_error, mixing_errors
from attnconv.analysis.image_checks import blaming_images, check_images
from attnconv.analysis.reading import checked_options
from attnconv.analysis.replaceable import replaceable
from attnconv.analysis.score_terms import CallForm

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
        error: `|fitted - its own output| / |its own output|` at the image's tokens of held-out images.
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


def replace_heads(
    model: Model,
    images: Float[Tensor, "b c height width"],
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
    Queries and keys of the replaced heads are no longer computed for the image's tokens.

    Args:
        model: A vision transformer of timm (ViT, BEiT, EVA, DINOv3, Swin), of Hugging Face (ViT, DeiT, DINOv2, DINOv3,
            BEiT, Swin), of torchvision, of `nn.TransformerEncoder`, or any model whose attention modules have the
            parts that `attention_parts` knows. Other attention, as that of a pooling head, is left as it is and named
            in `passed_over`.
        images: At least 2, normalised as in training, in the size in which the model will run. The last quarter is held
            out.
        heads: Name of the attention module -> heads to replace. Exactly one of `heads` and `count` is given.
        count: Replace this many heads, those with the least cost.
        layers: Names of the attention modules to choose from; None for all whose heads can be replaced.
        least_constancy: Of those, only heads at least this constant, 0 to 1.
        kernel_size: K, odd.
        fit: `least_squares` fits the values that the heads mix, `mean` takes the mean attention.
        grid: Tokens of the image, (height, width), for models that do not say it, as `audit`.
        prefix: Class tokens and registers before them, likewise.
        options: Further arguments of the model's forward pass by name, the same for any number of images.

    Raises:
        TypeError: `images` are not floating point.
        ValueError: An image is constant or holds NaN or infinity, or is not what the model takes (its own words are
            passed on); an argument is out of range, a layer or head does not exist, no attention or not one that is
            named is softmax attention by parts of known names, or fewer heads than `count` are constant enough.

    Example:
        >>> import timm  # doctest: +SKIP
        >>> vit = timm.create_model("vit_tiny_patch16_224", pretrained=True).eval()  # doctest: +SKIP
        >>> replace_heads(vit, images, count=6).output_error  # doctest: +SKIP
    """
    _check(images, heads, count, least_constancy, kernel_size, fit)
    fitted = max(1, len(images) * 3 // 4)
    call = checked_options(model, images, options)
    with blaming_images(model, images, call):
        wanted = None if layers is None else frozenset(layers)
        looked = replaceable(model, images, layers=wanted, grid=grid, prefix=prefix, options=call)
    tokens = looked.tokens
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
        parent, _, last = name.rpartition(".")
        setattr(changed.get_submodule(parent), last, _new(tokens[name], mixings[name], some, looked.calls[name]))
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
    if len(images) < 2:
        raise ValueError(bad("images", "must be at least 2, to hold some out", len(images)))
    check_images(images)
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
        with evaluating(model), torch.enable_grad():
            output = first_tensor(model(images, **options))
    finally:
        for handle in handles:
            handle.remove()
    if output is None:
        raise ValueError(bad("model", "must give a tensor", "none among its outputs"))
    held = {name: tokens[name].of(slice(len(images))) for name in names}
    mixed = {name: mixing_errors(held[name], mixings[name]) for name in names}
    generator = torch.Generator().manual_seed(0)
    sums: dict[str, Tensor] = {}
    for _ in range(DRAWS):
        direction = torch.randn(output.shape, generator=generator).to(output)
        slopes = torch.autograd.grad(output, [zeros[name] for name in names], direction, retain_graph=True)
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
        missing, given = mixing_errors(part.of(slice(fitted, None)), mixings[name])
        errors = missing.transpose(0, 1).flatten(1).norm(dim=1) / given.transpose(0, 1).flatten(1).norm(dim=1)
        rows = zip(
            constancy[name].tolist(),
            mixings[name].profile.sum((1, 2)).tolist(),
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
    wanted = [(name, head) for name, some in heads.items() for head in dict.fromkeys(some)]
    unknown = [place for place in wanted if place not in by_place]
    if unknown:
        if unknown[0][0] in passed_over:
            raise ValueError(passed_over[unknown[0][0]])
        layers = ", ".join(sorted({entry.layer for entry in candidates}))
        raise ValueError(bad("heads", f"must name heads of {layers}", repr(unknown[0])))
    return [by_place[place] for place in wanted]


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
        with evaluating(model):
            given = first_tensor(model(images, **options))
        assert given is not None
        outputs.append(given)
    return float((outputs[0] - outputs[1]).norm() / outputs[1].norm())
