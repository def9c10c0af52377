"""Which of the processes that torchrun started this one is. Free of torch, since the command line asks early."""

import os


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
