"""5,000 hostile files: read correctly or rejected with an error that names the file, in bounded time and memory."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.verify.attacking import MOST_BYTES, MOST_SECONDS

FILES = 5000
WORKERS = 2


def attacked(seed: int, first: int, count: int) -> dict[str, Any]:
    words = [sys.executable, "-m", "tests.verify.attacking", str(seed), str(first), str(count)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, f"from case {first} of seed {seed}: {result.stderr[-2000:]}"
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can reset the peak memory")
def test_hostile_files_are_read_right_or_refused(verify_scale: float) -> None:
    seed = time.time_ns() if os.environ.get("HYPOTHESIS_PROFILE") == "explore" else 0
    each = round(FILES * verify_scale / WORKERS)
    with ThreadPoolExecutor(WORKERS) as pool:
        parts = list(pool.map(lambda worker: attacked(seed, worker * each, each), range(WORKERS)))
    totals = {kind: sum(part["outcomes"].get(kind, 0) for part in parts) for kind in ("right", "refused", "wrong")}
    seconds, taken = max(part["seconds"] for part in parts), max(part["bytes"] for part in parts)
    print(f"seed {seed}: {totals}, {seconds:.2f} s and {taken / 1e6:.0f} MB at most")
    wrong = [line for part in parts for line in part["wrong"]]
    assert wrong == [], "\n".join(wrong)
    assert sum(totals.values()) == WORKERS * each
    assert min(totals["right"], totals["refused"]) > 0.05 * WORKERS * each
    assert seconds <= MOST_SECONDS
    assert taken <= MOST_BYTES
