"""How a run computes: the same bits every time on the CPU, the fastest convolutions on a GPU, and no noise not ours."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from attnconv._util.allocator import freed_memory_kept
from attnconv.training.process_rank import on_cpu
from attnconv.training.settings import RunSettings

# Lightning's remarks about itself and about choices that are meant.
_NOISE = (
    r".*isinstance\(treespec, LeafSpec\).*",  # Lightning 2.6 against torch 2.13
    r".*You defined a `validation_step` but have no `val_dataloader`.*",  # nothing was held out
)


@contextmanager
def numerics(settings: RunSettings) -> Iterator[None]:
    """The state of the process that a run needs; on leaving all but the flushing of denormals is as it was.

    Peaked attention produces denormal numbers, on which CPUs are up to fourteen times slower. They are flushed from
    here on, in this thread and in those that it starts.
    """
    torch.set_flush_denormal(True)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # a module with properties, which its stub does not know
    filled = memory.fill_uninitialized_memory
    tried = torch.backends.cudnn.benchmark
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    kept = freed_memory_kept() if on_cpu(settings) else nullcontext()
    with kept, warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        for message in _NOISE:
            warnings.filterwarnings("ignore", message=message)
        if on_cpu(settings):
            torch.use_deterministic_algorithms(True, warn_only=True)
            memory.fill_uninitialized_memory = False  # nothing reads memory before it writes it
        else:
            torch.backends.cudnn.benchmark = True  # the batches of a run are of few sizes
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            memory.fill_uninitialized_memory = filled
            torch.backends.cudnn.benchmark = tried
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
