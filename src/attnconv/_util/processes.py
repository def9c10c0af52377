"""Several processes: ranks, process group and exchange of results. Importing this module does not import torch."""

import atexit
import io
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def rank() -> int:
    """Return the rank of this process among those started by torchrun, from 0."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return the rank of this process on its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Return the number of processes started by torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Return whether this is the first process, which writes all files."""
    return rank() == 0


def begin_group(device: "torch.device | str" = "cpu") -> None:
    """Create the process group of the processes started by torchrun, unless it exists or there is only one process."""
    import torch

    device = torch.device(device)
    if world_size() > 1 and not torch.distributed.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(torch.distributed.destroy_process_group)


def group_rank_and_size() -> tuple[int, int]:
    """Return this process's rank in the initialised process group and the number of its processes; otherwise (0, 1)."""
    from torch import distributed

    initialised = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if initialised else (0, 1)


def in_all_processes(compute: Callable[[], T], device: "torch.device") -> list[T]:
    """Call a function in each process of the group, and return all results, by rank, with their tensors on a device.

    If it raises a `ValueError` or `TypeError` in any process, all processes raise it, so none waits for the others.
    """
    import torch

    number, count = group_rank_and_size()
    if count == 1:
        return [compute()]
    result: T | ValueError | TypeError
    try:
        result = compute()
    except (ValueError, TypeError) as error:
        result = error
    file, files = io.BytesIO(), [b""] * count
    torch.save(result, file)
    torch.distributed.all_gather_object(files, file.getvalue())
    results = [torch.load(io.BytesIO(each), map_location=device, weights_only=False) for each in files]
    results[number] = result  # with its traceback, if it is an error
    for each in results:
        if isinstance(each, ValueError | TypeError):
            raise each
    return results
