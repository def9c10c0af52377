"""Models of other people: that one was given at all, and its mode, training or evaluation, while it is inspected."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from attnconv._errors import bad


def check_module(model: object, argument: str = "model") -> None:
    """Refuse what is no module.

    Args:
        model: What was given.
        argument: The argument's name.

    Raises:
        TypeError: It is no module; a class of modules is none.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(bad(argument, "must be an nn.Module", type(model).__name__))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """All of a model in evaluation mode; every module of it is put back into its own mode at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
