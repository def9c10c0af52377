"""The process that `memory_of` starts: builds one case, takes one step, prints the peak of its memory.

    python -m benchmarks.memory_process MODULE CASE THREADS DEVICE

The case is built and stepped once before, and given up again, so that what libraries load and keep for themselves at a
first call is not counted as the step's. Freed blocks go back to the system (`attnconv._util.allocator`).

On Linux the peak is the kernel's high-water mark of this process (VmHWM), which is set back once the inputs are built.
The mark of `getrusage` (ru_maxrss) would not do there: a child inherits its parent's, however small it is itself. Other
systems have no other, and no way of setting it back: what the step took below an earlier peak is then not seen.

On a GPU the peak is torch's own count of what it has allocated there.
"""

import functools
import importlib
import json
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch.profiler import profile

from attnconv._util.allocator import give_back, map_large_blocks
from benchmarks.measure import measuring_on, settle, waited

Prepared: TypeAlias = Callable[[], Callable[[], object]]

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def main(words: Sequence[str]) -> dict[str, int]:
    """Bytes by the names that `Memory` has."""
    module, case, threads, device = words
    map_large_blocks()
    settle()
    torch.set_num_threads(int(threads))
    prepared = functools.partial(importlib.import_module(module).prepared, **json.loads(case))
    with measuring_on(device):
        return _of_the_process(prepared) if device == "cpu" else _of_the_device(prepared)


def _of_the_device(prepared: Prepared) -> dict[str, int]:
    prepared()()
    step = prepared()
    waited()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = step()
    waited()
    del kept
    most = torch.cuda.max_memory_allocated() - before
    return {"step": most, "process": torch.cuda.max_memory_reserved(), "tensors": most}


def _of_the_process(prepared: Prepared) -> dict[str, int]:
    prepared()()
    give_back()
    step = prepared()
    building = peak()
    before = _set_back()
    step()
    after = peak()
    return {"step": max(after - before, 0), "process": max(building, after), "tensors": _tensors(step)}


def _tensors(step: Callable[[], object]) -> int:
    """The most that tensors hold at once in another step, by torch's own record of what it takes and gives back."""
    with profile(profile_memory=True) as record:
        kept = step()
    del kept
    held = most = 0
    assert record.profiler is not None
    changes = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        most = max(most, held)
    return most


def peak() -> int:
    """The most bytes of this process that were resident."""
    noted = _noted("VmHWM")
    if noted is not None:
        return noted
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _set_back() -> int:
    """Begin a new mark where the system allows it; the bytes from which the step's are counted."""
    try:
        _RESET.write_text("5", encoding="ascii")
    except OSError:
        return peak()
    return peak()


def _noted(name: str) -> int | None:
    """A line of the kernel's note about this process, in bytes; None where there is none."""
    if not _STATUS.is_file():
        return None
    for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1:])) + "\n")
