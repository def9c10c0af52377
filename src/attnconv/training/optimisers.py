"""The optimiser of a run, and which parameters get weight decay.

Weight decay pulls a parameter towards 0. For a weight that is a prior; for the centre of a head it would mean "look at
your own pixel", for its spread "look everywhere". An encoding names such parameters in ``undecayed``.
"""

from typing import Any

import torch
from torch import nn

from attnconv.encodings import Encoding
from attnconv.training.settings import OptimSettings


def undecayed_names(model: nn.Module, *, decay_vectors: bool = True) -> set[str]:
    """Names of the parameters that get no weight decay.

    Args:
        model: any module.
        decay_vectors: whether biases and norm scales (tensors of at most one axis) are decayed.

    Returns:
        What the model's encodings name as ``undecayed`` and, unless they are decayed, all vectors.

    Example:
        >>> from attnconv.models.factory import build
        >>> sorted(undecayed_names(build("quadratic-digits")))[:2]
        ['blocks.0.attention.encoding.centres', 'blocks.0.attention.encoding.spread']
    """
    names = position_names(model)
    if not decay_vectors:
        names |= {name for name, parameter in model.named_parameters() if parameter.ndim <= 1}
    return names


def position_names(model: nn.Module) -> set[str]:
    """Names of the centres and spreads of heads: what the model's encodings name as ``undecayed``."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, Encoding)
        for name in module.undecayed
    }


def parameter_groups(model: nn.Module, optim: OptimSettings) -> list[dict[str, Any]]:
    """The parameters in groups for an optimiser: decayed, not decayed, centres and spreads."""
    spared = undecayed_names(model, decay_vectors=optim.decay_vectors)
    positions = position_names(model)
    named = list(model.named_parameters())
    rate = optim.learning_rate * optim.position_rate
    groups = [
        {"params": [value for name, value in named if name not in spared], "weight_decay": optim.weight_decay},
        {"params": [value for name, value in named if name in spared - positions], "weight_decay": 0.0},
        {"params": [value for name, value in named if name in positions], "weight_decay": 0.0, "lr": rate},
    ]
    return [group for group in groups if group["params"]]


def make_optimiser(model: nn.Module, optim: OptimSettings) -> torch.optim.Optimizer:
    """The optimiser that the settings describe, over all parameters of the model."""
    groups = parameter_groups(model, optim)
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=optim.learning_rate, betas=(optim.momentum, optim.second_beta))
    return torch.optim.SGD(groups, lr=optim.learning_rate, momentum=optim.momentum, nesterov=optim.nesterov)
