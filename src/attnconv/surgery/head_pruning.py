"""Head pruning: find degenerate heads, and remove heads from a model (Appendix E of the paper).

Let l_1 >= ... >= l_n be the eigenvalues of a head's precision (inverse covariance). The head is degenerate if it is

    a stripe      l_1 / l_n > 1e5 (paper) or 1e3 (authors' code): it attends to a line of positions
    constant      l_1 < 1e-5 / position^2: it averages over all positions

Removing a head is equivalent to setting its value weights to zero.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import check_module, indices
from attnconv.encodings.base import Encoding, gaussians_of
from attnconv.layers.self_attention import SelfAttention
from attnconv.models.settings import AttentionSettings

Criterion: TypeAlias = Literal["paper", "code"]
Model = TypeVar("Model", bound=nn.Module)

MOST_CONDITION: Mapping[str, float] = {"paper": 1e5, "code": 1e3}  # maximum condition number of the precision
LEAST_EIGENVALUE = 1e-5  # a head is constant if all eigenvalues of its precision are smaller; in 1 / position^2


def degenerate_heads(attention: SelfAttention | Encoding, criterion: Criterion = "paper") -> tuple[int, ...]:
    """Return the indices (from 0) of the heads whose Gaussian is a stripe or constant, in ascending order.

    Args:
        attention: A layer with a `Quadratic` or `GeneralizedQuadratic` encoding, or the encoding itself.
        criterion: A Gaussian is a stripe if its precision matrix has a condition number above 1e5 (`paper`) or 1e3
            (`code`, as in the authors' code), and constant if all eigenvalues are below 1e-5 / position^2.

    Raises:
        ValueError: If `criterion` is unknown, the encoding has no Gaussians, or its parameters are not finite.

    Example:
        >>> from attnconv import GeneralizedQuadratic
        >>> encoding = GeneralizedQuadratic(3)
        >>> stretched = torch.tensor([[1.0, 1.0], [1.0, 0.01], [0.0, 0.0]])
        >>> _ = encoding.root_precision.data.copy_(torch.diag_embed(stretched))
        >>> degenerate_heads(encoding), degenerate_heads(encoding, "code")
        ((2,), (1, 2))
    """
    if criterion not in list(MOST_CONDITION):  # a list has no hash
        raise ValueError(bad("criterion", f"must be one of {', '.join(MOST_CONDITION)}", repr(criterion)))
    largest, smallest = _root_eigenvalues(attention)
    # Compare without dividing, which would give infinity or NaN for a singular precision.
    stripe = largest > MOST_CONDITION[criterion] ** 0.5 * smallest
    degenerate = stripe | (largest.square() < LEAST_EIGENVALUE)
    return tuple(degenerate.nonzero().flatten().tolist())


def condition_numbers(attention: SelfAttention | Encoding) -> Float[Tensor, "h"]:
    """Return the condition number of each head's precision matrix (inverse covariance), computed in float64.

    This is the largest eigenvalue divided by the smallest: 1 for a circular Gaussian and for a precision matrix of
    zeros, infinite for other singular matrices. Raises the same errors as `degenerate_heads`.

    Example:
        >>> from attnconv import GeneralizedQuadratic
        >>> encoding = GeneralizedQuadratic(2)
        >>> _ = encoding.root_precision.data.copy_(torch.diag_embed(torch.tensor([[1.0, 1.0], [2.0, 1.0]])))
        >>> condition_numbers(encoding).tolist()
        [1.0, 4.0]
    """
    largest, smallest = _root_eigenvalues(attention)
    return (largest / smallest).square().where(largest > 0, 1.0)


def prune_heads(model: Model, heads: Mapping[str, Iterable[int]]) -> Model:
    """Return a copy of a model with the given heads removed.

        sum_h A_h x W_h   ->   the same sum over the remaining heads

    Weights and encoding parameters of the removed heads are deleted. Frozen parameters stay frozen. Plans of changed
    layers (`SelfAttention.plan`) are discarded. The copy has new parameters, which layers do not share, so create
    optimisers after pruning.

    Args:
        model: A module with `SelfAttention` layers, or a single layer (with the name "").
        heads: Indices (from 0) of the heads to remove, by layer name; a list may be empty.

    Raises:
        TypeError: If `model` is not a module, or `heads` is not a mapping.
        ValueError: If a layer or head does not exist, a layer would have no heads left, or an encoding does not declare
            which parameters belong to which head (`by_head`).

    Example:
        >>> from attnconv import SelfAttention2d
        >>> model = nn.Sequential(SelfAttention2d(3, 4, heads=9))
        >>> prune_heads(model, {"0": [2, 5]})[0].weight.shape
        torch.Size([7, 3, 4])
    """
    layers = attention_layers(model)
    if not isinstance(heads, Mapping):
        raise TypeError(bad("heads", "must map layer names to lists of head indices", repr(heads)))
    if unknown := [name for name in heads if name not in layers]:
        raise ValueError(bad("heads", f"keys must be layer names ({', '.join(map(repr, layers))})", repr(unknown[0])))
    kept = {name: _kept(name, layers[name].heads, removed) for name, removed in heads.items()}
    pruned = copy.deepcopy(model)
    for name, layer in attention_layers(pruned).items():
        if len(kept.get(name, ())) in (0, layer.heads):
            continue
        layer.heads, layer.encoding = len(kept[name]), layer.encoding.select_heads(kept[name])
        for tensor in ("weight", "value_weight", "output_weight"):
            parameter: nn.Parameter | None = getattr(layer, tensor)
            if parameter is not None:
                some = nn.Parameter(parameter.detach()[kept[name]], requires_grad=parameter.requires_grad)
                setattr(layer, tensor, some)
        layer.unplan()
    return pruned


def settings_after_pruning(settings: AttentionSettings, model: nn.Module) -> AttentionSettings:
    """Return the settings for a pruned model's checkpoint, given the settings before pruning.

    Raises:
        ValueError: If the model has no `SelfAttention` layer.
    """
    heads = tuple(layer.heads for layer in attention_layers(model).values())
    return settings if heads == settings.heads_per_layer else replace(settings, heads=heads)


def attention_layers(model: nn.Module) -> dict[str, SelfAttention]:
    """Return the attention layers of a model by name; raise a `ValueError` if there are none."""
    check_module(model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, SelfAttention)}
    if not layers:
        raise ValueError(bad("model", "must contain at least one SelfAttention layer", type(model).__name__))
    return layers


def _root_eigenvalues(attention: SelfAttention | Encoding) -> tuple[Float[Tensor, "h"], Float[Tensor, "h"]]:
    """Return the square roots of l_1 and l_n of each head, as singular values of S: P = S S^T would lose accuracy."""
    heads = gaussians_of(attention.encoding if isinstance(attention, SelfAttention) else attention, "attention")
    if heads.root_precision.is_meta:
        raise ValueError(bad("attention", "must have materialised parameters", "a parameter on the meta device"))
    root = heads.root_precision.detach().cpu().double()
    if not bool(torch.isfinite(root).all()):
        raise ValueError(bad("attention", "must have finite parameters", "NaN or infinity"))
    values = torch.linalg.svdvals(root)
    return values.amax(-1), values.amin(-1)


def _kept(name: str, count: int, removed: Any) -> list[int]:
    gone = indices(f"heads[{name!r}]", removed, count)
    if len(gone) == count:
        raise ValueError(bad(f"heads[{name!r}]", f"must leave at least one of the {count} heads", gone))
    return [head for head in range(count) if head not in gone]
