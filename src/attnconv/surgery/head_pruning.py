"""Pruning heads: which ones are degenerate, which ones a statistic picks, and a model without them. Appendix E.

A head of a quadratic encoding is a Gaussian with precision P (the inverse covariance; its eigenvalues are l_1 >= .. >=
l_n >= 0). It is degenerate in one of two ways:

    a stripe       l_1 / l_n above a limit: it attends a line of pixels; a singular P is the extreme of it
    everything     l_1 below 1e-5: its scores are constant, so it averages the image

The paper's text sets the limit of the first at 1e5, the authors' code at 1000. A pruned layer sums over the heads that
stay, so its output is that of the unpruned layer whose removed heads have zero weights.
"""

import copy
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.input_checks import check_module
from attnconv._util.value_checks import is_index, is_real, whole
from attnconv.encodings.base import Encoding, gaussians_of
from attnconv.layers.self_attention import SelfAttention
from attnconv.models.settings import AttentionSettings

Criterion: TypeAlias = Literal["paper", "code"]
Score: TypeAlias = Callable[[str, SelfAttention], Float[Tensor, "h"]]
Model = TypeVar("Model", bound=nn.Module)

MOST_CONDITION: Mapping[str, float] = {"paper": 1e5, "code": 1e3}  # of the precision, and so of the covariance
LEAST_EIGENVALUE = 1e-5  # of the precision, in 1 / pixel^2


def degenerate_heads(attention: SelfAttention | Encoding, criterion: Criterion = "paper") -> tuple[int, ...]:
    """Heads whose Gaussian is a stripe or constant, by the eigenvalues of the precision (see the module's docstring).

    Args:
        attention: A layer with a `Quadratic` or `GeneralizedQuadratic` encoding, or the encoding itself.
        criterion: `paper` removes condition numbers above 1e5, `code` (the authors') above 1000; both remove largest
            eigenvalues below 1e-5.

    Returns:
        Their indices, in order.

    Raises:
        ValueError: The encoding has no Gaussians, the criterion has no such name, or a parameter is not finite.

    Example:
        >>> from attnconv import GeneralizedQuadratic
        >>> encoding = GeneralizedQuadratic(3)
        >>> stretched = torch.tensor([[1.0, 1.0], [1.0, 0.01], [0.0, 0.0]])
        >>> _ = encoding.root_precision.data.copy_(torch.diag_embed(stretched))
        >>> degenerate_heads(encoding), degenerate_heads(encoding, "code")
        ((2,), (1, 2))
    """
    if criterion not in get_args(Criterion):
        raise ValueError(bad("criterion", f"must be one of {', '.join(get_args(Criterion))}", repr(criterion)))
    encoding = attention.encoding if isinstance(attention, SelfAttention) else attention
    roots = _root_eigenvalues(encoding)
    largest, smallest = roots.amax(-1), roots.amin(-1)
    # Without a division: a singular precision has no condition number, and zero would make it NaN.
    stripe = largest > MOST_CONDITION[criterion] ** 0.5 * smallest
    return _indices(stripe | (largest.square() < LEAST_EIGENVALUE))


def condition_numbers(attention: SelfAttention | Encoding) -> Float[Tensor, "h"]:
    """How far each head's Gaussian is from round: l_1 / l_n of its precision, and so of its covariance. Float64.

    1 is a circle; a singular precision has infinity, one of zeros alone (a constant head) 1.

    Args:
        attention: A layer with a `Quadratic` or `GeneralizedQuadratic` encoding, or the encoding itself.

    Raises:
        ValueError: The encoding has no Gaussians, or a parameter is not finite.

    Example:
        >>> from attnconv import GeneralizedQuadratic
        >>> encoding = GeneralizedQuadratic(2)
        >>> _ = encoding.root_precision.data.copy_(torch.diag_embed(torch.tensor([[1.0, 1.0], [2.0, 1.0]])))
        >>> condition_numbers(encoding).tolist()
        [1.0, 4.0]
    """
    roots = _root_eigenvalues(attention.encoding if isinstance(attention, SelfAttention) else attention)
    largest, smallest = roots.amax(-1), roots.amin(-1)
    return (largest / smallest).square().where(largest > 0, 1.0)


def heads_to_prune(
    model: nn.Module, score: Score, *, above: float | None = None, count: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Heads that any statistic picks: those scored above a threshold, or a number of those scored highest.

    Args:
        model: A module with `SelfAttention` layers.
        score: Called with each layer's name and the layer; gives one number for each head (h,), larger for a head that
            is rather removed. To keep what a statistic ranks high, give its negative.
        above: Remove every head with a score above this. Exactly one of `above` and `count` is given.
        count: Remove this many heads in the whole model, those with the largest scores. The last head of a layer is
            passed over; of equal scores the earlier head is taken.

    Returns:
        Name of the layer -> indices of its heads to remove, in order, perhaps none: what `prune_heads` takes.

    Raises:
        ValueError: Not exactly one of the two is given, `count` is more than can be removed, a score is NaN or has
            another shape, or the model has no attention layer.

    Example:
        >>> from attnconv import SelfAttention2d
        >>> model = nn.Sequential(SelfAttention2d(3, 4, heads=3), SelfAttention2d(4, 4, heads=2))
        >>> for layer, size in ((model[0], 1.0), (model[1], 2.0)):
        ...     _ = layer.weight.data.fill_(size)
        >>> heads_to_prune(model, lambda name, layer: -layer.weight.flatten(1).norm(dim=1), count=2)
        {'0': (0, 1), '1': ()}
    """
    if (above is None) == (count is None):
        raise ValueError(bad("above, count", "must be given the one or the other", f"above={above}, count={count}"))
    if not callable(score):
        raise TypeError(bad("score", "must be a function of a layer's name and the layer", type(score).__name__))
    layers = attention_layers(model)
    scores = {name: _scored(score, name, layer) for name, layer in layers.items()}
    if above is not None:
        if not is_real(above):
            raise ValueError(bad("above", "must be a finite number", repr(above)))
        return {name: _indices(values > above) for name, values in scores.items()}
    most = sum(layer.heads - 1 for layer in layers.values())
    if whole("count", count, 0) > most:
        raise ValueError(bad("count", f"must be at most {most}, which leaves one head in each layer", count))
    found: dict[str, list[int]] = {name: [] for name in layers}
    ranking = [(-value, name, head) for name, values in scores.items() for head, value in enumerate(values.tolist())]
    for _, name, head in sorted(ranking, key=lambda entry: entry[0]):
        if sum(map(len, found.values())) < count and len(found[name]) < layers[name].heads - 1:  # type: ignore[operator]
            found[name].append(head)
    return {name: tuple(sorted(heads)) for name, heads in found.items()}


def prune_heads(model: Model, heads: Mapping[str, Iterable[int]]) -> Model:
    """A copy of a model without these heads; the model itself stays as it is.

        sum_h A_h x W_h   ->   the same sum over the heads that stay

    Weights and every parameter of the encoding that belongs to a head lose the head's part. What was frozen stays
    frozen; the plans of changed layers (`SelfAttention.plan`) are discarded. The copy has new parameters, so an
    optimiser is made after pruning.

    Args:
        model: A module with `SelfAttention` layers, or such a layer (whose name is "").
        heads: Name of the layer in the model -> indices of the heads to remove, perhaps none.

    Raises:
        ValueError: There is no such layer or head, no head would stay in a layer, or its encoding does not say which
            parameters belong to a head.

    Example:
        >>> from attnconv import SelfAttention2d
        >>> model = nn.Sequential(SelfAttention2d(3, 4, heads=9))
        >>> prune_heads(model, {"0": [2, 5]})[0].weight.shape
        torch.Size([7, 3, 4])
    """
    layers = attention_layers(model)
    if not isinstance(heads, Mapping):
        raise TypeError(bad("heads", "must be a mapping from names of layers to lists of heads", repr(heads)))
    unknown = [name for name in heads if name not in layers]
    if unknown:
        raise ValueError(bad("heads", f"must name layers among {', '.join(map(repr, layers))}", repr(unknown[0])))
    kept = {name: _kept(name, layers[name], removed) for name, removed in heads.items()}
    pruned = copy.deepcopy(model)
    for name, layer in attention_layers(pruned).items():
        if len(kept.get(name, ())) not in (0, layer.heads):
            _keep(layer, kept[name])
    return pruned


def settings_after_pruning(settings: AttentionSettings, model: nn.Module) -> AttentionSettings:
    """The settings with the number of heads that each layer of a pruned model has: what its checkpoint is saved with.

    Args:
        settings: Of the model before.
        model: The pruned model.

    Example:
        >>> from attnconv.models.factory import build
        >>> settings = AttentionSettings(layers=2, heads=3, width=8, mlp_width=8)
        >>> settings_after_pruning(settings, prune_heads(build(settings), {"blocks.1.attention": [0]})).heads
        (3, 2)
    """
    heads = tuple(layer.heads for layer in attention_layers(model).values())
    return settings if heads == settings.heads_per_layer else replace(settings, heads=heads)


def attention_layers(model: nn.Module) -> dict[str, SelfAttention]:
    """The attention layers of a model by their names, in the order in which the model holds them.

    Raises:
        TypeError: `model` is no module.
        ValueError: There is none.
    """
    check_module(model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, SelfAttention)}
    if not layers:
        raise ValueError(bad("model", "must have at least one SelfAttention layer", type(model).__name__))
    return layers


def _root_eigenvalues(encoding: Encoding) -> Float[Tensor, "h dims"]:
    """Square roots of the eigenvalues of each head's precision, in float64: the singular values of S, the spreads s.

    Of S itself, since rounding S S^T would hide condition numbers above 1 / eps.
    """
    heads = gaussians_of(encoding, "attention")
    return torch.linalg.svdvals(_finite("attention", heads.root_precision))


def _finite(name: str, parameter: Tensor) -> Tensor:
    """A parameter's values in float64 on the CPU; not every device has float64."""
    if parameter.is_meta:
        raise ValueError(bad(name, "must have values", "a parameter on the meta device"))
    values = parameter.detach().cpu().double()
    if not bool(torch.isfinite(values).all()):
        raise ValueError(bad(name, "must be finite", "NaN or infinite values"))
    return values


def _scored(score: Score, name: str, layer: SelfAttention) -> Float[Tensor, "h"]:
    with torch.no_grad():
        values = score(name, layer)
    if not isinstance(values, Tensor):
        raise TypeError(bad("score", "must give a tensor", type(values).__name__))
    values = values.detach().cpu().double()
    if values.shape != (layer.heads,):
        requirement = f"must give one number for each of the {layer.heads} heads of {name!r}"
        raise ValueError(bad("score", requirement, f"shape {tuple(values.shape)}"))
    if bool(values.isnan().any()):
        raise ValueError(bad("score", "must be a number for every head", f"NaN for heads {_indices(values.isnan())}"))
    return values


def _indices(chosen: Bool[Tensor, "h"]) -> tuple[int, ...]:
    return tuple(chosen.nonzero().flatten().tolist())


def _kept(name: str, layer: SelfAttention, removed: Any) -> list[int]:
    """The heads of a layer that stay."""
    gone = list(removed) if isinstance(removed, Iterable) else [removed]
    if any(not (is_index(head) and 0 <= operator.index(head) < layer.heads) for head in gone):
        raise ValueError(bad(f"heads[{name!r}]", f"must be heads of 0 .. {layer.heads - 1}", gone))
    kept = [head for head in range(layer.heads) if head not in gone]
    if not kept:
        fix = "Leave out one of them: a layer without heads is no layer."
        raise ValueError(bad(f"heads[{name!r}]", f"must leave at least one of the {layer.heads} heads", gone, fix))
    return kept


def _keep(layer: SelfAttention, kept: list[int]) -> None:
    """Take all other heads out of a layer, in place."""
    layer.encoding = layer.encoding.select_heads(kept)
    for name in ("weight", "value_weight", "output_weight"):
        parameter: nn.Parameter | None = getattr(layer, name)
        if parameter is not None:
            part = parameter.detach()[kept]
            setattr(layer, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    layer.heads = len(kept)
    layer.unplan()
