"""Which of several processes this is, before Lightning has brought them together."""

import os

import torch

from attnconv.training.settings import RunSettings


def is_first_process() -> bool:
    """Whether this is the process that writes: the only one, or the first that torchrun or Lightning started."""
    if "RANK" in os.environ:  # torchrun
        return os.environ["RANK"] == "0"
    return os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("NODE_RANK", "0") == "0"


def on_cpu(settings: RunSettings) -> bool:
    """Whether the run computes on the CPU."""
    if settings.train.accelerator == "auto":
        return not (torch.cuda.is_available() or torch.backends.mps.is_available())
    return settings.train.accelerator == "cpu"
