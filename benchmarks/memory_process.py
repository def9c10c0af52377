"""Process started by `memory_of`: prepares one case, runs one step and prints its peak memory.

    python -m benchmarks.memory_process MODULE CASE THREADS DEVICE

The case is first prepared and run once without measurement, to exclude memory that libraries allocate on first use.
Freed blocks are returned to the system (`attnconv._util.glibc_malloc`).

On Linux, the peak is the kernel's high-water mark of this process (VmHWM), which is reset after creating the inputs.
`getrusage` (ru_maxrss) is not suitable, because a child process inherits its parent's value. Other systems have only
ru_maxrss, which cannot be reset, so a step that stays below an earlier peak appears to use no memory.
"""

import functools
import importlib
import json
import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import torch
from torch.profiler import profile

from attnconv._util.glibc_malloc import give_back, map_large_blocks
from benchmarks.measure import measuring_on

Prepare: TypeAlias = Callable[[], Callable[[], object]]


def main(words: Sequence[str]) -> dict[str, int]:
    """Return the fields of `Memory` in bytes."""
    module, case, threads, device = words
    map_large_blocks()
    torch.set_flush_denormal(True)
    torch.set_num_threads(int(threads))
    prepare = functools.partial(importlib.import_module(module).prepare, **json.loads(case))
    with measuring_on(device):
        return _on_cpu(prepare) if device == "cpu" else _on_gpu(prepare)


def _on_gpu(prepare: Prepare) -> dict[str, int]:
    prepare()()
    step = prepare()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    most = torch.cuda.max_memory_allocated() - before
    return {"step": most, "process": torch.cuda.max_memory_reserved(), "tensors": most}


def _on_cpu(prepare: Prepare) -> dict[str, int]:
    prepare()()
    give_back()
    step = prepare()
    building = peak()
    with suppress(OSError):  # only Linux can reset the high-water mark
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = peak()
    step()
    after = peak()
    return {"step": max(after - before, 0), "process": max(building, after), "tensors": _tensors(step)}


def _tensors(step: Callable[[], object]) -> int:
    """Run one more step and return the peak of its tensors, from the allocations recorded by torch's profiler."""
    with profile(profile_memory=True) as record:
        kept = step()
    del kept
    assert record.profiler is not None
    changes = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        most = max(most, held)
    return most


def peak() -> int:
    """Return the peak resident memory of this process in bytes."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1:])) + "\n")
