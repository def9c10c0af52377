"""The optimiser of a run, and which parameters get weight decay.

Weight decay is a prior for a weight, but it would pull the centre of a head to its own pixel, and its spread to uniform
attention. An encoding names such parameters in `undecayed`.
"""

from typing import Any

import torch
from torch import nn

from attnconv.encodings import Encoding
from attnconv.training.settings import OptimSettings


def position_names(model: nn.Module) -> set[str]:
    """Names of the centres and spreads of heads: those that the model's encodings name as `undecayed`."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, Encoding)
        for name in module.undecayed
    }


def parameter_groups(model: nn.Module, optim: OptimSettings) -> list[dict[str, Any]]:
    """Groups of parameters for an optimiser: decayed, vectors that are not, centres and spreads."""
    positions = position_names(model)
    weights: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    places: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        spared = not optim.decay_vectors and parameter.ndim <= 1  # biases and scales of norms
        (places if name in positions else vectors if spared else weights).append(parameter)
    rate = optim.learning_rate * optim.position_rate
    groups: list[dict[str, Any]] = [
        {"params": weights, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
        {"params": places, "weight_decay": 0.0, "lr": rate},
    ]
    return [group for group in groups if group["params"]]


def make_optimiser(model: nn.Module, optim: OptimSettings) -> torch.optim.Optimizer:
    """The optimiser that the settings describe, over all parameters of the model."""
    groups = parameter_groups(model, optim)
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=optim.learning_rate, betas=(optim.momentum, optim.second_beta))
    return torch.optim.SGD(groups, lr=optim.learning_rate, momentum=optim.momentum, nesterov=optim.nesterov)
