"""Validation of devices, dtypes and loaded values for all layers, and support for symbolic tracing."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from attnconv._util.errors import bad
from attnconv._util.value_checks import FLOATING


def check_device_dtype(device: torch.device | str | None, dtype: object) -> None:
    """Raise `TypeError` if the dtype is not in `FLOATING`, or if it is float64 on Apple's MPS."""
    if dtype is not None and dtype not in FLOATING:
        raise TypeError(bad("dtype", f"must be one of {', '.join(map(str, FLOATING))}", repr(dtype)))
    if dtype == torch.float64 and device is not None and torch.device(device).type == "mps":
        raise TypeError(bad("dtype", "must not be float64 on MPS", str(dtype), "Use torch.float32."))


def check_loaded(layer: nn.Module, state: Mapping[str, Any], prefix: str, *_: object) -> None:
    """Raise `ValueError` if a state dict contains NaN or infinity, before it is loaded."""
    loaded = {name: state[prefix + name] for name, _ in layer.named_parameters() if prefix + name in state}
    check_finite(loaded.items(), origin="from the loaded state dict")


def check_finite(values: Iterable[tuple[str, object]], *, origin: str = "") -> None:
    """Raise `ValueError` if a named tensor contains NaN or infinity; `origin` says where the tensors come from."""
    for name, value in values:
        if isinstance(value, Tensor) and not value.is_meta and not bool(torch.isfinite(value).all()):
            raise ValueError(bad(name, "must be finite", "NaN or infinite values", origin=origin))


def traced_node(layer: nn.Module, *arguments: Any) -> Any:
    """Return the layer as one node of a `torch.fx` trace if the first argument is a proxy, otherwise None."""
    if not isinstance(arguments[0], torch.fx.Proxy):
        return None
    tracer: Any = arguments[0].tracer
    if not (path := tracer.path_of_module(layer)):
        requirement = f"must be a model that contains the traced {type(layer).__name__} as a submodule"
        raise TypeError(bad("root", requirement, type(tracer.root).__name__))
    return tracer.create_proxy("call_module", path, arguments, {})
