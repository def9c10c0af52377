"""Rank of this process among those started by torchrun. This module does not import torch."""

import os


def rank() -> int:
    """Return the rank of this process, from 0."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return the rank of this process on its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Return the number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Return whether this is the first process, which writes all files."""
    return rank() == 0
