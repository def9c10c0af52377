"""Context managers that restore a model: its training mode, or all of it after an error."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all of a model in evaluation mode; at the end every module is back in its own mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Undo every change to a model if the block raises: afterwards it is bit for bit what it was before.

    That covers values and `requires_grad` of parameters and buffers, the modules, their hooks, modes and attributes. It
    copies all weights: for functions that cannot check their arguments before they change the model.
    """
    attributes = [vars(module) for module in model.modules()]
    registries = [entry for some in attributes for entry in some.values() if isinstance(entry, dict | set)]
    # The same objects are filled again, not replaced: handles of hooks refer to them.
    held = [(entry, copy.copy(entry)) for entry in (*attributes, *registries)]
    values = [
        (tensor, tensor.requires_grad, tensor.detach().clone())
        for tensor in chain(model.parameters(), model.buffers())
        if not nn.parameter.is_lazy(tensor)
    ]
    try:
        yield
    except BaseException:
        for entry, before in held:
            entry.clear()
            entry.update(before)
        with torch.inference_mode():  # the only mode that writes to every kind of tensor
            for tensor, _, value in values:
                tensor.copy_(value)
        for tensor, trained, _ in values:
            if tensor.requires_grad != trained:
                tensor.requires_grad_(trained)
        raise
