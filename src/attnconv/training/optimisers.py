"""Optimisers, parameter groups for weight decay, and learning rate schedules."""

import math
from typing import Any

import torch
from torch import nn

from attnconv.encodings import Encoding
from attnconv.training.settings import OptimSettings, ScheduleSettings


def parameter_groups(model: nn.Module, optim: OptimSettings) -> list[dict[str, Any]]:
    """Return parameter groups: those with weight decay, vectors without it, and the encodings' `undecayed` parameters.

    Weight decay would pull the centre of a head towards shift 0, and make its attention more uniform.
    """
    positions: set[int] = set()
    for module in model.modules():
        if isinstance(module, Encoding):
            positions |= {id(value) for name, value in module.named_parameters() if name in module.undecayed}
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": optim.weight_decay},
        {"params": [], "weight_decay": 0.0},
        {"params": [], "weight_decay": 0.0, "lr": optim.learning_rate * optim.position_rate},
    ]
    for parameter in model.parameters():
        spared = not optim.decay_vectors and parameter.ndim <= 1  # biases and scales of normalisation layers
        groups[2 if id(parameter) in positions else int(spared)]["params"].append(parameter)
    return [group for group in groups if group["params"]]


def make_optimiser(model: nn.Module, optim: OptimSettings) -> torch.optim.Optimizer:
    """Create the optimiser for all parameters of the model."""
    groups = parameter_groups(model, optim)
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=optim.learning_rate, betas=(optim.momentum, optim.second_beta))
    return torch.optim.SGD(groups, lr=optim.learning_rate, momentum=optim.momentum, nesterov=optim.nesterov)


def rate_factor(schedule: ScheduleSettings, step: int, *, steps_per_epoch: int, epochs: int) -> float:
    """Compute the factor, from 0 to 1, of the learning rate in an optimiser step; steps are numbered from 0.

    For step t of T steps, with W = round(warmup * T) steps of warm-up:

        t < W        (t + 1) / W
        cosine       1/2 (1 + cos(pi (t - W) / (T - W)))
        linear       1 - (t - W) / (T - W)
        steps        decay ^ (number of milestones m with m * steps_per_epoch <= t)
        constant     1

    With cosine and linear decay, the factor remains 0 after step T. The paper's code instead updates the rate once per
    epoch, so that the rate in its first epoch is 0.
    """
    total = steps_per_epoch * epochs
    warmup = round(schedule.warmup * total)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "steps":
        passed = sum(milestone * steps_per_epoch <= step for milestone in schedule.milestones)
        return float(schedule.decay**passed)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1.0 - progress if schedule.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
