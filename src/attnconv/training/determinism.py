"""Numerics of a run: the same bits every time on the CPU, the fastest convolutions on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from attnconv._util.glibc_malloc import freed_memory_kept


@contextmanager
def numerics(device: torch.device) -> Iterator[None]:
    """The state of the process that a run needs; at the end all but the flushing of denormals is as it was.

    Peaked attention produces denormal numbers, on which CPUs are up to fourteen times slower. They are flushed in this
    thread and in those that it starts.
    """
    torch.set_flush_denormal(True)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # a module with properties, which its stub does not know
    filled, tried = memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    on_cpu = device.type == "cpu"
    with freed_memory_kept() if on_cpu else nullcontext(), torch.random.fork_rng(devices=[]):
        if on_cpu:
            torch.use_deterministic_algorithms(True, warn_only=True)
            memory.fill_uninitialized_memory = False  # nothing reads memory before it writes it
        else:
            torch.backends.cudnn.benchmark = True  # the batches of a run are of few sizes
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark = filled, tried
