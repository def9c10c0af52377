"""Context managers that restore the training mode of a model, or its whole state after an error."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and restore the mode of every module on exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Undo all changes to a model, bit for bit, if the `with` block raises an exception.

    It restores the values and `requires_grad` of parameters and buffers, the submodules, hooks, modes and attributes.
    It copies all weights and is meant for functions that cannot validate their arguments before changing the model.
    """
    attributes = [vars(module) for module in model.modules()]
    registries = [entry for some in attributes for entry in some.values() if isinstance(entry, dict | set)]
    # The objects are refilled rather than replaced, since handles of hooks refer to them.
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
        with torch.inference_mode():  # the only mode in which every kind of tensor can be written
            for tensor, _, value in values:
                tensor.copy_(value)
        for tensor, trained, _ in values:
            if tensor.requires_grad != trained:
                tensor.requires_grad_(trained)
        raise
