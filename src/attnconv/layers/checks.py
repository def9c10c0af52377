"""What every layer does with what it is given: checks, and one node in symbolic traces."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.fx
from jaxtyping import Float
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import FLOATING

AUTOCAST = {torch.float32, torch.bfloat16, torch.float16}  # what autocast brings to one dtype


def check_device_dtype(device: torch.device | str | None, dtype: object) -> None:
    """Refuse dtypes other than `FLOATING`, and float64 on Apple's MPS."""
    if dtype is not None and dtype not in FLOATING:
        raise TypeError(bad("dtype", f"must be one of {', '.join(map(str, FLOATING))}", repr(dtype)))
    if dtype == torch.float64 and device is not None and torch.device(device).type == "mps":
        raise TypeError(bad("dtype", "Apple's MPS has no float64", str(dtype), "Use torch.float32 there."))


def check_loaded(layer: nn.Module, state: Mapping[str, Any], prefix: str, *_: object) -> None:
    """Before loading a state dict: refuse NaN and infinity, so that the layer keeps its values."""
    loaded = {name: state[prefix + name] for name, _ in layer.named_parameters() if prefix + name in state}
    check_finite(loaded.items(), origin="from the loaded state dict")


def check_finite(values: Iterable[tuple[str, object]], *, origin: str = "") -> None:
    """Refuse named tensors with NaN or infinity; `origin` says where they come from. Meta tensors pass."""
    for name, value in values:
        if isinstance(value, Tensor) and not value.is_meta and not bool(torch.isfinite(value).all()):
            raise ValueError(bad(name, "must be finite", "NaN or infinite values", origin=origin))


def channels_last(
    x: object, *, dims: int, channels: int, dtype: torch.dtype, called: str = ""
) -> Float[Tensor, "b *sizes c"]:
    """Check a layer's input and return it channels last; one image becomes a batch of one. `called` names the layer."""
    kind = f"SelfAttention{dims}d"

    def wrong(requirement: str, got: str, fix: str = "") -> str:
        return bad("input", requirement, got, fix, origin=f"at {called}" if called else "")

    if not isinstance(x, Tensor):
        raise TypeError(wrong(f"{kind} takes a tensor", type(x).__name__))
    if x.dim() == dims + 1:
        x = x[None]
    if x.dim() != dims + 2:
        sizes = ("length", "height, width", "depth, height, width")[dims - 1]
        raise ValueError(wrong(f"{kind} takes (batch, channels, {sizes})", f"shape {tuple(x.shape)}"))
    if x.shape[1] != channels:
        raise ValueError(wrong(f"{kind} was made for {channels} channels", f"shape {tuple(x.shape)}"))
    if 0 in x.shape[2:]:
        raise ValueError(wrong("every axis needs at least one pixel", f"shape {tuple(x.shape)}"))
    if x.dtype != dtype and not ({x.dtype, dtype} <= AUTOCAST and torch.is_autocast_enabled(x.device.type)):
        fix = f"Convert with x.to({dtype})" + (f" or layer.to({x.dtype})." if x.is_floating_point() else ".")
        raise TypeError(wrong(f"must have the layer's dtype {dtype}", str(x.dtype), fix))
    return x.permute(0, *range(2, dims + 2), 1)


def traced_node(layer: nn.Module, *arguments: Any) -> Any:
    """The layer as one node of the symbolic trace (`torch.fx`) that the first argument comes from, else None."""
    if not isinstance(arguments[0], torch.fx.Proxy):
        return None
    tracer: Any = arguments[0].tracer
    if not (path := tracer.path_of_module(layer)):
        raise TypeError(bad("root", "must be a model that holds the layer, which is one node", type(layer).__name__))
    return tracer.create_proxy("call_module", path, arguments, {})
