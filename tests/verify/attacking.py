"""Read many hostile files in one process, and report those that are neither read correctly nor rejected correctly.

    python -m tests.verify.attacking SEED FIRST COUNT

A file must be rejected with a `ValueError` or an `OSError` that names it. Reading it must not start a process or open a
connection, and has limits of time and memory. A separate process is used because a decoder in C could crash it.
"""

import json
import os
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from attnconv._util.errors import printable
from benchmarks.memory_process import peak
from tests.verify.hostile_files import Case, drawn

MOST_SECONDS = 10.0  # usually milliseconds, but the machine may be busy
MOST_BYTES = 800 * 10**6  # memory for the largest allowed image
_FORBIDDEN = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "socket.connect")
_AGAIN = Path("/proc/self/clear_refs")

started: list[str] = []


def attack(seed: int, first: int, count: int, folder: Path) -> dict[str, Any]:
    """Return counts of outcomes, the longest time, the largest memory, and a line for each case that failed."""
    sys.addaudithook(lambda event, _: started.append(event) if event in _FORBIDDEN else None)
    outcomes: Counter[str] = Counter()
    wrong, seconds, taken = [], 0.0, 0
    os.chdir(folder)  # executed files would write here
    for number in range(first, first + count):
        case = drawn(seed, number, folder)
        started.clear()
        _AGAIN.write_text("5", encoding="ascii")
        before, start = peak(), time.perf_counter()
        outcome = became(case)
        spent, grown = time.perf_counter() - start, peak() - before
        seconds, taken = max(seconds, spent), max(taken, grown)
        if started or (folder / "executed").exists():
            outcome = f"executed {started}"
        elif spent > MOST_SECONDS or grown > MOST_BYTES:
            outcome = f"{outcome}, after {spent:.1f} s and {grown / 1e6:.0f} MB"
        outcomes[outcome if outcome in ("right", "refused") else "wrong"] += 1
        (home,) = folder.glob(f"{number}-*")
        if outcome not in ("right", "refused"):
            wrong.append(f"case {number} of seed {seed}, {home.name}: {outcome}")
        shutil.rmtree(home)
    return {"outcomes": outcomes, "seconds": seconds, "bytes": taken, "wrong": wrong}


def became(case: Case) -> str:
    """Return `right`, `refused`, or a description of the failure."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = case.read()
        return "right" if case.right(found) else f"read as {str(found)[:200]!r}"
    except (ValueError, OSError) as error:
        text, names = str(error), (printable(str(case.path)), printable(str(case.path.parent)))
        plain = all(line.isprintable() for line in text.split("\n")) and len(text) < 10_000
        return "refused" if plain and any(name in text for name in names) else f"badly refused: {error!r}"[:500]
    except Exception as error:  # noqa: BLE001 - every other exception is a finding
        return f"{type(error).__name__}: {error}"[:500]


if __name__ == "__main__":
    bound = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize() + 6 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))  # so that bombs affect no other process
    seed, first, count = map(int, sys.argv[1:4])
    with tempfile.TemporaryDirectory() as home:
        print(json.dumps(attack(seed, first, count, Path(home))))
