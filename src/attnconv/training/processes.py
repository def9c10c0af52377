"""The processes that share a training, as torchrun starts them; a single one never initialises torch.distributed."""

import atexit
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line asks which process this is before it needs torch
    import torch


def rank() -> int:
    """Number of this process among all."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Whether this is the process that writes."""
    return rank() == 0


def connect(device: "torch.device") -> None:
    """Initialise torch.distributed for this process's device, once, where there are several processes."""
    import torch

    if world_size() == 1 or torch.distributed.is_initialized():
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    atexit.register(torch.distributed.destroy_process_group)


def all_sum(values: "torch.Tensor") -> "torch.Tensor":
    """The sum over all processes, each of which has to call this."""
    import torch

    values = values.clone()
    if world_size() > 1:
        torch.distributed.all_reduce(values)
    return values


def wait_for_all() -> None:
    """Return once every process has called this."""
    import torch

    if world_size() > 1:
        torch.distributed.barrier()
