"""State of a model, to check that a rejected call left it unchanged."""

from typing import Any

import torch
from torch import Tensor, nn


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the bits and flags of every tensor, and the mode, hooks, plan and other attributes of each module."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for key, value in vars(module).items():
            found[f"{name}.{key}"] = _frozen(value)
        found[name] = (id(module), type(module))
    return found


def _frozen(value: object) -> object:
    if isinstance(value, Tensor):
        held = b"" if value.is_meta or nn.parameter.is_lazy(value) else _bits(value)
        return id(value), value.requires_grad, value.dtype, held
    if isinstance(value, dict):
        return tuple((key, _frozen(entry)) for key, entry in value.items())
    if isinstance(value, nn.Module):
        return id(value)
    return value if isinstance(value, bool | int | float | str | tuple | None) else id(value)


def _bits(value: Tensor) -> bytes:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
