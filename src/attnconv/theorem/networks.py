"""Whole networks: every convolution replaced by the attention layer that equals it, and back.

The model is copied; in the copy each convolution gives its place to `from_conv`'s layer and everything else stays as it
is: batch norms, activations, hooks, train or eval mode, frozen parameters, modules used at several places, parameters
shared between modules. Every layer is checked before the first is replaced, so that nothing half converted comes back.
"""

import copy
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

import torch
from torch import nn

from attnconv._errors import bad
from attnconv.layers.self_attention import SelfAttention, discard_plan
from attnconv.theorem.construct import from_conv
from attnconv.theorem.convolutions import check_convolution, is_convolution, looks_like_convolution
from attnconv.theorem.invert import to_conv

Only: TypeAlias = Callable[[str, nn.Module], bool] | Sequence[str] | None
_HOOKS = [key for key in vars(nn.Module()) if "hook" in key]


def recast(
    model: nn.Module,
    *,
    alpha: float | None = None,
    weights: Literal["slices", "nearest"] = "slices",
    only: Only = None,
    fast: bool = True,
) -> nn.Module:
    """A copy of a network in which attention layers do the work of its convolutions.

    Args:
        model: Any module: torchvision's, timm's, Hugging Face's, one's own; also a convolution itself.
        alpha: How hard the heads are; None for hard ones, with which the outputs are equal. See `from_conv`.
        weights: Of soft heads, `slices` of the kernels or those `nearest` to them. See `from_conv`.
        only: Which layers: patterns for their names (`"layer1.*"`), or a function of name and module; None for all.
        fast: Run hard heads as what they are, shifts, at a convolution's cost (`SelfAttention.plan`). False computes
            every probability from centres and alpha through the softmax. A state dict that is loaded discards the
            plan; `plan_shifts` makes it again.

    Returns:
        The copy. Parameters of a layer are called `weight` (heads, in / groups, out), `bias` and `encoding.*`.

    Raises:
        TypeError, ValueError: A convolution that cannot be converted, named with its place and the reason, or a model
            without any.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> cnn = nn.Sequential(
        ...     nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
        ... ).eval()
        >>> attention, x = recast(cnn), torch.randn(1, 3, 9, 11)
        >>> bool((attention(x) - cnn(x)).abs().max() < 1e-5)
        True
    """
    found = _chosen(model, only, looks_like_convolution, "convolution")
    for name, module in found.items():
        check_convolution(module, name or "model")
    _check_ties(model, found)
    twin = copy.deepcopy(model)
    shared: dict[nn.Parameter, nn.Parameter] = {}

    def attention(name: str, conv: nn.Module) -> nn.Module:
        assert is_convolution(conv)
        try:
            layer = from_conv(conv, alpha=alpha, weights=weights)
        except ValueError as error:
            raise ValueError(f"{name or 'model'}: {error}") from error
        layer.called = name
        _take_over(conv, layer, shared)
        return layer

    with torch.random.fork_rng(devices=[]):  # layers draw weights before they are given theirs
        made = _replace(twin, list(found), attention)
    if fast:
        plan_shifts(made)
    return made


def plan_shifts(model: nn.Module) -> int:
    """Run every layer whose heads are hard as shifts, at a convolution's cost, until `unplan` or a loaded state dict.

    Returns:
        The number of such layers.
    """
    hard = [layer for layer in model.modules() if isinstance(layer, SelfAttention) and layer.hard_shifts() is not None]
    for layer in hard:
        layer.plan((1,) * layer.dims, choose="shift")
    return len(hard)


def restore(model: nn.Module, *, only: Only = None) -> nn.Module:
    """A copy of a network in which convolutions do the work of attention layers with hard heads: recast's inverse.

    Weights of layers that `recast` made come back bit for bit.

    Args:
        model: Any module with attention layers.
        only: Which of them, as for `recast`.

    Raises:
        ValueError: A layer that is no convolution (soft heads, heads that moved), named with its place, or a model
            without attention layers.

    Example:
        >>> from torch import nn
        >>> cnn = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> bool((restore(recast(cnn))[0].weight == cnn[0].weight).all())
        True
    """
    found = _chosen(model, only, lambda module: isinstance(module, SelfAttention), "attention layer")
    for name, module in found.items():
        assert isinstance(module, SelfAttention)
        try:
            to_conv(module)
        except ValueError as error:
            raise ValueError(f"{name or 'model'}: {error}") from error
    twin = copy.deepcopy(model)
    shared: dict[nn.Parameter, nn.Parameter] = {}

    def convolution(_: str, layer: nn.Module) -> nn.Module:
        assert isinstance(layer, SelfAttention)
        conv = to_conv(layer)
        if layer.weight is not None:
            _take_over(layer, conv, shared)
        return conv

    return _replace(twin, list(found), convolution)


def _chosen(model: nn.Module, only: Only, wanted: Callable[[nn.Module], bool], kind: str) -> dict[str, nn.Module]:
    """The modules to replace by their first name, in the model's order."""
    if not isinstance(model, nn.Module):
        raise TypeError(bad("model", "must be an nn.Module", type(model).__name__))
    present = {name: module for name, module in model.named_modules() if wanted(module)}
    if not present:
        raise ValueError(bad("model", f"must have at least one {kind}", type(model).__name__))
    found = {name: module for name, module in present.items() if _matches(name, module, only)}
    if not found:
        few = ", ".join(list(present)[:5])
        raise ValueError(bad("only", f"must choose at least one {kind}", f"none of {len(present)} ({few}, ..)"))
    return found


def _matches(name: str, module: nn.Module, only: Only) -> bool:
    if only is None:
        return True
    if callable(only):
        return only(name, module)
    patterns = [only] if isinstance(only, str) else only
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_ties(model: nn.Module, found: dict[str, nn.Module]) -> None:
    """Refuse weights that a convolution shares with something that keeps another layout."""
    layouts: dict[nn.Parameter, tuple[str, object]] = {}
    names = {id(module): name for name, module in found.items()}
    for path, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            layout: object = (path, parameter_name)  # not to be replaced: shared with nothing that is
            if id(module) in names and parameter_name == "weight":
                assert is_convolution(module)
                transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
                layout = ("transposed", module.groups) if transposed else "forward"
            elif parameter_name == "bias" and id(module) in names:
                continue  # moves as it is
            other, known = layouts.setdefault(parameter, (path, layout))
            if known != layout and (id(module) in names or other in found):
                fix = "Leave both out with `only`, or give one a weight of its own."
                raise ValueError(bad(path, "must share its weight with convolutions of its kind only", other, fix))


def _replace(twin: nn.Module, names: list[str], make: Callable[[str, nn.Module], nn.Module]) -> nn.Module:
    """Put what `make` makes of each named module in its place, wherever the module is used."""
    made: dict[nn.Module, nn.Module] = {}
    for name in names:
        old = twin.get_submodule(name)
        made[old] = make(name, old)
        _move_hooks(old, made[old])
    for parent in list(twin.modules()):
        for key, child in list(parent._modules.items()):
            if child is not None and child in made:
                parent._modules[key] = made[child]
    return made.get(twin, twin)


def _take_over(old: nn.Module, new: nn.Module, shared: dict[nn.Parameter, nn.Parameter]) -> None:
    """Give `new` the ties, the freezing and the bias of `old`; weights of one parameter stay one parameter."""
    weight = old._parameters["weight"]
    assert weight is not None
    made = new._parameters["weight"]
    assert made is not None
    for parameter in new.parameters():
        parameter.requires_grad_(weight.requires_grad)
    new.register_parameter("weight", shared.setdefault(weight, made))
    if new._parameters.get("bias") is not None:
        new.register_parameter("bias", old._parameters["bias"])


def _move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Forward, backward and state-dict hooks; not those that a class of the library registers for itself."""
    for key in _HOOKS:
        before, after = vars(old).get(key), vars(new)[key]
        if isinstance(before, dict):
            after.update({number: hook for number, hook in before.items() if hook is not discard_plan})
        elif before is not None:
            setattr(new, key, before)
