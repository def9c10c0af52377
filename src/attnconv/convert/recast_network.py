"""Replace every convolution of a network by the attention layer that equals it, and back.

Layers are converted first. `copy.deepcopy` of the model then puts the new layer wherever it finds the old one: as a
child module, in a list, or bound in a hook. All else stays.
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
from attnconv.layers.self_attention import SelfAttention, discard_plan
from attnconv.theory.conv_taps import Forward, check_convolution, looks_like_convolution

Only: TypeAlias = Callable[[str, nn.Module], bool] | Iterable[str] | None
_HOOKS = [key for key in vars(nn.Module()) if "hook" in key]
_OWN_HOOKS = (check_loaded, discard_plan)


def recast(
    model: nn.Module,
    *,
    alpha: float | None = None,
    weights: Literal["slices", "nearest"] = "slices",
    only: Only = None,
    fast: bool = True,
) -> nn.Module:
    """Return a copy of a network with attention layers in place of its convolutions.

    Args:
        model: Any module, such as one of torchvision, timm or Hugging Face; also a single convolution.
        alpha: Sharpness of the heads; None for hard ones, with which the outputs are equal. See `from_conv`.
        weights: Of soft heads, `slices` of the kernels or those `nearest` to them. See `from_conv`.
        only: Layers to replace: patterns for their names (`"layer1.*"`, or `"!stem.*"` for all but these), or a
            function of name and module; None for all. It must choose at least one.
        fast: Run hard heads as shifts, at a convolution's cost (`SelfAttention.plan`). False computes every probability
            from centres and alpha. Loading a state dict discards the plan; `plan_shifts` makes it again.

    Returns:
        The copy. A layer's parameters are called `weight` (heads, in / groups, out), `bias` and `encoding.*`. Code that
        reads `conv.weight` instead of calling the convolution (fusing batch norms, reparameterising, some state-space
        models) is not supported: run it before, or leave those layers out. A model on the meta device stays there.

    Raises:
        TypeError, ValueError: A convolution cannot be converted, with its name and the reason; the model has none, or
            keeps a method of one, such as `conv.forward`; or `only` chooses none.

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
    with torch.random.fork_rng(devices=[]):  # layers draw weights before they are given theirs
        made = _transcribe(model, found, lambda conv: from_conv(conv, alpha=alpha, weights=weights))
    for name in found:
        layer: Any = made.get_submodule(name)
        layer.called = name
    if fast:
        plan_shifts(made)
    return made


def plan_shifts(model: nn.Module) -> int:
    """Run every layer with hard heads as shifts, until `unplan` or a loaded state dict; return their number.

    Raises:
        TypeError: `model` is no module.
        ValueError: Such a layer holds NaN or infinity; then no layer was planned.
    """
    check_module(model)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, SelfAttention)}
    hard = {name: layer for name, layer in layers.items() if layer.hard_shifts() is not None}
    for name, layer in hard.items():  # before the first one is planned
        check_finite(layer.named_parameters(), origin=f"in {name or 'the model'}")
    for layer in hard.values():
        layer.plan((1,) * layer.dims, choose="shift")
    return len(hard)


def restore(model: nn.Module, *, only: Only = None) -> nn.Module:
    """Return a copy of a network with convolutions in place of attention layers with hard heads.

    The inverse of `recast`: weights of its layers come back bit for bit.

    Args:
        model: Any module with attention layers.
        only: Layers to replace, as for `recast`.

    Raises:
        ValueError: A layer is no convolution (soft heads, heads that moved), with its name, or the model has no
            attention layers.

    Example:
        >>> cnn = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> bool((restore(recast(cnn))[0].weight == cnn[0].weight).all())
        True
    """
    found = _chosen(model, only, lambda module: isinstance(module, SelfAttention), "attention layer")
    return _transcribe(model, found, to_conv)


def _chosen(model: nn.Module, only: Only, wanted: Callable[[nn.Module], bool], kind: str) -> dict[str, nn.Module]:
    """The modules to replace by their first name, in the model's order."""
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
        raise ValueError(bad("only", f"must choose at least one {kind}", f"none of {len(present)} ({few}, ..)"))
    return found


def _matching(names: list[list[str]], only: Any) -> list[str]:
    """The first names of the modules that the patterns choose by any of their names."""
    patterns = [only] if isinstance(only, str) or not isinstance(only, Iterable) else list(only)
    if wrong := [pattern for pattern in patterns if not isinstance(pattern, str)]:
        raise TypeError(bad("only", "must be patterns for names, or a function of name and module", repr(wrong[0])))
    chosen, left_out = set[str](), set[str]()
    for pattern in patterns:
        plain = pattern.removeprefix("!")
        met = {aliases[0] for aliases in names if any(fnmatchcase(name, plain) for name in aliases)}
        if not met:
            few = ", ".join(aliases[0] for aliases in names[:5])
            raise ValueError(bad("only", "must match layers", f"{pattern!r}, which matches none of {few}, .."))
        (left_out if plain != pattern else chosen).update(met)
    all_but = bool(left_out) and not chosen
    return [first for first, *_ in names if (all_but or first in chosen) and first not in left_out]


def _check_all(found: dict[str, nn.Module]) -> None:
    """Refuse convolutions that cannot be converted: the first one by its reason, the others by name."""
    errors: dict[str, TypeError | ValueError] = {}
    for name, module in found.items():
        try:
            check_convolution(module, name or "model")
        except (TypeError, ValueError) as error:
            errors[name] = error
    if errors:
        first, *others = errors
        more = f" Nor can {', '.join(others)} be converted." if others else ""
        raise type(errors[first])(f"{errors[first]}{more}") from errors[first]


def _check_whole(model: nn.Module, found: dict[str, nn.Module]) -> None:
    """Refuse lazy modules, and modules that were compiled with their convolutions."""
    for name, module in model.named_modules():
        if any(nn.parameter.is_lazy(value) for value in module.parameters(recurse=False)):
            fix = "Run the model once on an image, so that its lazy layers take their shapes."
            raise TypeError(bad(name, "must have its parameters", f"{type(module).__name__}, not materialised", fix))
        compiled = module._compiled_call_impl is not None or type(module).__module__.startswith("torch._dynamo")
        if compiled and any(not name or other == name or other.startswith(f"{name}.") for other in found):
            got = f"{type(module).__name__}, compiled"
            raise ValueError(bad(name or "model", "must not be compiled yet", got, "Compile the result of recast."))


def _check_ties(model: nn.Module, found: dict[str, nn.Module]) -> None:
    """Refuse weights that a convolution shares with a module that keeps another layout."""
    layouts: dict[nn.Parameter, tuple[str, object]] = {}
    replaced = set(found.values())
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            layout: object = (path, name)  # of a module that stays: equal to no other
            if module in replaced and name == "bias":
                continue  # biases move as they are
            if module in replaced and name == "weight":
                layout = "forward" if isinstance(module, Forward) else ("transposed", module.groups)
            other, known = layouts.setdefault(parameter, (path, layout))
            if known != layout and (module in replaced or other in found):
                fix = "Leave both out with `only`, or give one a weight of its own."
                raise ValueError(bad(path, "must share its weight with convolutions of its kind only", other, fix))


def _transcribe(model: nn.Module, found: dict[str, nn.Module], make: Callable[[Any], nn.Module]) -> nn.Module:
    """A copy of the model with each of these modules replaced by what `make` returns for it."""
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
            raise ValueError(bad("model", "must keep no method of a replaced module", got, "Call the module itself."))
    gone = {part for old in made for part in old.modules()} - made.keys()  # parts of replaced modules
    for name, module in model.named_modules(remove_duplicate=False):
        if module in gone:
            continue
        copied = twin.get_submodule(name)
        if module in made and copied is not made[module]:
            raise ValueError(bad("model", "must be copied by copy.deepcopy with all its parts", type(model).__name__))
        if copied.training != module.training:  # some classes change their mode when they are copied
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
    """Give `new` the freezing and the ties of `old`: layers that share a weight still do."""
    weight, made = old._parameters.get("weight"), new.get_parameter("weight")
    if weight is None:  # of factored heads
        return
    for parameter in new.parameters():
        parameter.requires_grad_(parameter.requires_grad and weight.requires_grad)
    first = shared.setdefault(weight, made)
    if not made.is_meta and not torch.equal(first, made):
        fix = "Use weights='slices', or give each layer a weight of its own."
        raise ValueError(bad("weights", "'nearest' must find the same for layers that share a weight", "others", fix))
    new.register_parameter("weight", first)


def _move_hooks(old: nn.Module, new: nn.Module, known: dict[int, object]) -> None:
    """Copy hooks; not those that a class of the library registers for itself."""
    for key in _HOOKS:
        before, after = vars(old).get(key), vars(new)[key]
        if isinstance(before, dict):
            kept = {number: hook for number, hook in before.items() if getattr(hook, "hook", hook) not in _OWN_HOOKS}
            after.update(copy.deepcopy(kept, known))
        elif before is not None:
            setattr(new, key, before)
