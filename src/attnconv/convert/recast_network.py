"""Replacement of a network's convolutions with equivalent attention layers, and back.

Layers are converted first. Then `copy.deepcopy` copies the model with a memo that maps old to new layers, so that all
references to them are replaced, whether as child modules, in lists or in hooks.
"""

import copy
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import check_module
from attnconv.convert.layer_conversion import from_conv, to_conv
from attnconv.layers.checks import check_finite, check_loaded
from attnconv.layers.self_attention import SelfAttention, renew_plan
from attnconv.theory.conv_taps import Forward, check_convolution, looks_like_convolution

Only: TypeAlias = Callable[[str, nn.Module], bool] | Iterable[str] | None
_HOOKS = [key for key in vars(nn.Module()) if "hook" in key]
_OWN_HOOKS = (check_loaded, renew_plan)


def recast(
    model: nn.Module,
    *,
    alpha: float | None = None,
    weights: Literal["slices", "nearest"] = "slices",
    only: Only = None,
    fast: bool = True,
) -> nn.Module:
    """Return a copy of a network in which attention layers replace convolutions.

    Args:
        model: Any module, such as a model from torchvision, timm or Hugging Face, or a single convolution.
        alpha: Sharpness of heads, in 1 / position^2; None for hard heads, which change outputs only by rounding.
        weights: Matrices of the heads, `slices` or `nearest`. `from_conv` explains this argument and `alpha`.
        only: Layers to replace: name patterns (`"layer1.*"`, or `"!stem.*"` to exclude layers), or a function of the
            name and the module that returns a bool; None for all convolutions. At least one must be selected.
        fast: Run hard heads as shifts, which is about as fast as a convolution (see `SelfAttention.plan`), instead of
            computing all probabilities.

    Returns:
        The copy, on the device of the model. Attention layers have parameters `weight` (heads, in / groups, out),
        `bias` and `encoding.*`. Code that reads `conv.weight` instead of calling the convolution (batch norm fusion,
        reparameterisation, some state-space models) is not supported: run it before `recast`, or exclude its layers.

    Raises:
        TypeError, ValueError: If a convolution cannot be converted (the message gives its name and the reason); if the
            model has no convolution, or stores a method of one, such as `conv.forward`; or if `only` selects none.

    Example:
        >>> cnn = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
        >>> attention, x = recast(cnn), torch.randn(1, 3, 9, 11)
        >>> bool((attention(x) - cnn(x)).abs().max() < 1e-5)
        True
    """
    found = _chosen(model, only, looks_like_convolution, "convolution")
    _check_all(found)
    _check_whole(model, found)
    _check_ties(model, found)
    with torch.random.fork_rng(devices=[]):  # new layers sample random initial weights
        made = _transcribe(model, found, lambda conv: from_conv(conv, alpha=alpha, weights=weights))
    for name in found:
        layer: Any = made.get_submodule(name)
        layer.called = name
    if fast:
        plan_shifts(made)
    return made


def plan_shifts(model: nn.Module) -> int:
    """Make all layers with hard heads run as shifts (see `SelfAttention.plan`); return the number of these layers.

    Raises:
        TypeError: If `model` is not a module.
        ValueError: If a layer with hard heads contains NaN or infinity. In this case, no layer is changed.
    """
    check_module(model)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, SelfAttention)}
    hard = {name: layer for name, layer in layers.items() if layer.hard_shifts() is not None}
    for name, layer in hard.items():  # check all layers before planning any
        check_finite(layer.named_parameters(), origin=f"in {name or 'the model'}")
    for layer in hard.values():
        layer.plan((1,) * layer.dims, choose="shift")
    return len(hard)


def restore(model: nn.Module, *, only: Only = None) -> nn.Module:
    """Return a copy of a network in which equivalent convolutions replace attention layers; the inverse of `recast`.

    The weights of recast layers are restored bit for bit.

    Args:
        model: Any module with attention layers.
        only: Layers to replace, as in `recast`.

    Raises:
        TypeError: If `model` is not a module.
        ValueError: If a selected layer is not equivalent to a convolution, or the model has no attention layers.

    Example:
        >>> cnn = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> bool((restore(recast(cnn))[0].weight == cnn[0].weight).all())
        True
    """
    found = _chosen(model, only, lambda module: isinstance(module, SelfAttention), "attention layer")
    return _transcribe(model, found, to_conv)


def _chosen(model: nn.Module, only: Only, wanted: Callable[[nn.Module], bool], kind: str) -> dict[str, nn.Module]:
    """Return the modules to replace, by their first name, in the order of the model."""
    check_module(model)
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if wanted(module):
            names.setdefault(module, []).append(name)
    if not names:
        raise ValueError(bad("model", f"must have at least one {kind}", type(model).__name__))
    present = {first: module for module, (first, *_) in names.items()}
    if only is None:
        return present
    if callable(only):
        found = {name: module for name, module in present.items() if only(name, module)}
    else:
        found = {name: present[name] for name in _matching(list(names.values()), only)}
    if not found:
        few = ", ".join(list(present)[:5])
        raise ValueError(bad("only", f"must select at least one {kind}", f"none of {len(present)} ({few}, ...)"))
    return found


def _matching(names: list[list[str]], only: Any) -> list[str]:
    """Return the first name of every module that the patterns select by any of its names."""
    patterns = [only] if isinstance(only, str) or not isinstance(only, Iterable) else list(only)
    if wrong := [pattern for pattern in patterns if not isinstance(pattern, str)]:
        raise TypeError(bad("only", "must be name patterns (str) or a function of the name and module", repr(wrong[0])))
    chosen, left_out = set[str](), set[str]()
    for pattern in patterns:
        plain = pattern.removeprefix("!")
        met = {aliases[0] for aliases in names if any(fnmatchcase(name, plain) for name in aliases)}
        if not met:
            few = ", ".join(aliases[0] for aliases in names[:5])
            raise ValueError(bad("only", "must match layer names", f"{pattern!r}, which matches none of {few}, ..."))
        (left_out if plain != pattern else chosen).update(met)
    all_but = bool(left_out) and not chosen
    return [first for first, *_ in names if (all_but or first in chosen) and first not in left_out]


def _check_all(found: dict[str, nn.Module]) -> None:
    """Raise the error of the first convolution that cannot be converted, with the names of all others."""
    errors: dict[str, TypeError | ValueError] = {}
    for name, module in found.items():
        try:
            check_convolution(module, name or "model")
        except (TypeError, ValueError) as error:
            errors[name] = error
    if errors:
        first, *others = errors
        more = f" These cannot be converted either: {', '.join(others)}." if others else ""
        raise type(errors[first])(f"{errors[first]}{more}") from errors[first]


def _check_whole(model: nn.Module, found: dict[str, nn.Module]) -> None:
    """Raise an error for lazy modules, and for compiled modules that contain a convolution to replace."""
    for name, module in model.named_modules():
        if any(nn.parameter.is_lazy(value) for value in module.parameters(recurse=False)):
            fix = "Run the model once on an image to initialise its lazy layers."
            raise TypeError(bad(name, "must be initialised", f"an uninitialised {type(module).__name__}", fix))
        compiled = module._compiled_call_impl is not None or type(module).__module__.startswith("torch._dynamo")
        if compiled and any(not name or other == name or other.startswith(f"{name}.") for other in found):
            got = f"a compiled {type(module).__name__}"
            raise ValueError(bad(name or "model", "must not be compiled", got, "Compile the result of recast instead."))


def _check_ties(model: nn.Module, found: dict[str, nn.Module]) -> None:
    """Raise an error if a convolution shares its weight with a module that uses a different layout."""
    layouts: dict[nn.Parameter, tuple[str, object]] = {}
    replaced = set(found.values())
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            layout: object = (path, name)  # of a module that is kept: unique
            if module in replaced and name == "bias":
                continue  # biases keep their layout
            if module in replaced and name == "weight":
                layout = "forward" if isinstance(module, Forward) else ("transposed", module.groups)
            other, known = layouts.setdefault(parameter, (path, layout))
            if known != layout and (module in replaced or other in found):
                fix, got = "Exclude both with `only`, or untie the weight.", f"a weight shared with {other!r}"
                raise ValueError(bad(path, "must share its weight only with convolutions of the same kind", got, fix))


def _transcribe(model: nn.Module, found: dict[str, nn.Module], make: Callable[[Any], nn.Module]) -> nn.Module:
    """Return a copy of the model in which every module `m` in `found` is replaced by `make(m)`."""
    made: dict[nn.Module, nn.Module] = {}
    shared: dict[nn.Parameter, nn.Parameter] = {}
    known: dict[int, object] = {}  # deepcopy's memo: the copy of each object
    for name, old in found.items():
        try:
            new = made[old] = make(old)
            _take_over(old, new, shared)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name or 'model'}: {error}") from error
        known[id(old)] = new
        bias = old._parameters.get("bias")
        if bias is not None:  # shared biases stay shared
            new.register_parameter("bias", copy.deepcopy(bias, known))
    twin = _copied(model, known)
    for old, new in made.items():
        _move_hooks(old, new, known)
    for held in known.values():
        if not isinstance(held, MethodType) or held.__self__ not in made.values():
            continue
        if getattr(type(held.__self__), held.__name__, None) is not held.__func__:
            got = f"{type(model).__name__}, which keeps {held.__qualname__}"
            raise ValueError(bad("model", "must not keep methods of replaced modules", got, "Keep the module instead."))
    gone = {part for old in made for part in old.modules()} - made.keys()  # parts of replaced modules
    for name, module in model.named_modules(remove_duplicate=False):
        if module in gone:
            continue
        copied = twin.get_submodule(name)
        if module in made and copied is not made[module]:
            raise ValueError(bad("model", "must be copied completely by copy.deepcopy", type(model).__name__))
        if copied.training != module.training:  # some classes change their training mode when copied
            copied.train(module.training)
    return twin


def _copied(model: nn.Module, known: dict[int, object]) -> nn.Module:
    try:
        return copy.deepcopy(model, known)
    except (RuntimeError, TypeError, ValueError) as error:
        computed = [
            f"{name}.{key}".removeprefix(".")
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, Tensor) and value.grad_fn is not None
        ]
        got = f"a computed {computed[0]}" if computed else type(model).__name__
        raise ValueError(bad("model", "must work with copy.deepcopy", got, str(error).partition("\n")[0])) from error


def _take_over(old: nn.Module, new: nn.Module, shared: dict[nn.Parameter, nn.Parameter]) -> None:
    """Copy `requires_grad` and weight tying from `old` to `new`."""
    weight, made = old._parameters.get("weight"), new.get_parameter("weight")
    if weight is None:  # factored heads
        return
    for parameter in new.parameters():
        parameter.requires_grad_(parameter.requires_grad and weight.requires_grad)
    first = shared.setdefault(weight, made)
    if not made.is_meta and not torch.equal(first, made):
        fix = "Use weights='slices', or untie the weights."
        raise ValueError(bad("weights", "must give equal values for layers that share a weight", "'nearest'", fix))
    new.register_parameter("weight", first)


def _move_hooks(old: nn.Module, new: nn.Module, known: dict[int, object]) -> None:
    """Copy the hooks from `old` to `new`, except those that the library's own classes register."""
    for key in _HOOKS:
        before, after = vars(old).get(key), vars(new)[key]
        if isinstance(before, dict):
            kept = {number: hook for number, hook in before.items() if getattr(hook, "hook", hook) not in _OWN_HOOKS}
            after.update(copy.deepcopy(kept, known))
        elif before is not None:
            setattr(new, key, before)
