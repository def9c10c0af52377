"""Runs killed with SIGKILL at random times, also while another process tries to start, end with identical weights.

The processes are forked from one that has already imported everything, so that a restart takes one second, not ten.
"""

import multiprocessing
import os
import random
import shutil
import sys
import time
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attnconv.training.fitting import fit
from attnconv.training.run_folder import RunFolder
from attnconv.training.run_recorder import read_state
from attnconv.training.settings import RunSettings
from tests.training.making import tiny

KILLS, EPOCHS = 5, 24
CONTEST_KILLS, CONTEST_EPOCHS, SEEDS = 200, 5, (0, 1)
FLIPS = 5000
REFUSED = 3  # exit status of a process that may not write

if sys.platform == "win32":
    pytest.skip("SIGKILL and forks require POSIX", allow_module_level=True)

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])


def attempt(settings: RunSettings, folder: Path, resume: bool) -> None:
    """Train in a process."""
    torch.set_num_threads(1)
    try:
        fit(settings, folder, resume=resume, progress=False)
    except ValueError as error:
        if not str(error).startswith(("run_dir: ", "train.seed: ")):
            raise
        sys.exit(REFUSED)


def start(settings: RunSettings, folder: Path, *, resume: bool = True) -> BaseProcess:
    process = FORKS.Process(target=attempt, args=(settings, folder, resume))
    process.start()
    return process


def complete(settings: RunSettings, folder: Path) -> RunFolder:
    """Run until the end, from the start or from a checkpoint."""
    process = start(settings, folder)
    process.join()
    assert process.exitcode == 0
    return RunFolder(folder)


def require_same(run: RunFolder, whole: RunFolder) -> None:
    """Require that a run is identical to an uninterrupted one, except for times and its name."""
    for one, other in ((run.last_weights, whole.last_weights), (run.best_weights, whole.best_weights)):
        first, second = load_file(one), load_file(other)
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert torch.equal(second[name], value), name
        assert one.read_bytes() == other.read_bytes()
    lines = [[{**line, "seconds": 0.0} for line in folder.metrics()] for folder in (run, whole)]
    assert lines[0] == lines[1]
    assert run.heads() == whole.heads()
    results = [{**(folder.result() or {}), "seconds": 0.0} for folder in (run, whole)]
    assert results[0] == results[1]
    assert run.settings() == whole.settings()
    names = [{path.relative_to(folder.path) for path in folder.path.rglob("*")} for folder in (run, whole)]
    assert names[0] == names[1]


def generator() -> random.Random:
    """Return a generator of the same cases each time, or of new cases whose seed is printed."""
    seed = time.time_ns() if os.environ.get("HYPOTHESIS_PROFILE") == "explore" else 0
    print(f"cases of random.Random({seed})")
    return random.Random(seed)


def test_killed_and_resumed_runs_end_with_the_same_weights(tmp_path: Path, verify_scale: float) -> None:
    settings = tiny(epochs=EPOCHS, limit=800)
    whole, torn = complete(settings, tmp_path / "whole"), RunFolder(tmp_path / "torn")
    epoch_seconds = whole.metrics()[-1]["seconds"] / EPOCHS
    kills, draw = max(1, round(KILLS * verify_scale)), generator()
    # Kills at random times, early to late; the first may come before anything is written, the last leaves a tenth.
    for moment in sorted(draw.uniform(0.0, 0.9 * EPOCHS) for _ in range(kills)):
        process = start(settings, torn.path)
        while process.exitcode is None and len(torn.heads()) < moment:  # epoch 0 has a line too
            time.sleep(0.002)
        time.sleep(draw.uniform(0.0, epoch_seconds))
        assert process.exitcode is None, "the run ended before it could be killed: make it longer"
        process.kill()
        process.join()
    require_same(complete(settings, torn.path), whole)
    print(f"{kills} kills, resumed each time: all weights identical")


def test_two_processes_contend_for_a_folder_and_are_killed(tmp_path: Path, verify_scale: float) -> None:
    """Processes of two seeds start or resume; only the seed that created the folder may write to it."""
    draw, kills, seconds = generator(), round(CONTEST_KILLS * verify_scale), 0.0
    wholes = {}
    for seed in SEEDS:
        before = time.monotonic()
        wholes[seed] = complete(tiny(epochs=CONTEST_EPOCHS, seed=seed), tmp_path / f"whole-{seed}")
        seconds = time.monotonic() - before  # of the second run, because the first starts the fork server
    left, held, refused, folders = kills, 0, 0, 0
    while left:
        run = RunFolder(tmp_path / "run")
        left, hits, others = contest(run, draw, seconds, left)
        require_same(run, wholes[run.settings().train.seed])
        held, refused, folders = held + hits, refused + others, folders + 1
        shutil.rmtree(run.path)
    print(f"{kills} kills, {held} of them of writers, {refused} rejected starts: {folders} of {folders} runs equal")


def contest(run: RunFolder, draw: random.Random, seconds: float, kills: int) -> tuple[int, int, int]:
    """Start two processes at a time and kill one of them at a random time, until a run is complete.

    Returns:
        Number of kills left, number of writers killed, and number of attempts that were rejected.
    """
    live: list[BaseProcess] = []
    held = refused = 0
    while True:
        while len(live) < 2:
            live.append(start(settings_for(run, draw), run.path, resume=draw.random() < 0.8))
        end = time.monotonic() + draw.uniform(0.0, 1.1 * seconds)  # the two processes share the cores
        while time.monotonic() < end and any(process.exitcode is None for process in live):
            time.sleep(0.002)
        if not kills:
            live[0].join()
        codes = [process.exitcode for process in live]
        assert set(codes) <= {None, 0, REFUSED}, codes
        refused += codes.count(REFUSED)
        if 0 in codes:
            break
        live = [process for process in live if process.exitcode is None]
        if live and kills:
            victim = live.pop(draw.randrange(len(live)))
            held += writer(run) == victim.pid
            victim.kill()
            victim.join()
            kills -= 1
    for process in live:
        process.join()
        assert process.exitcode in (0, REFUSED)
    return kills, held, refused


def settings_for(run: RunFolder, draw: random.Random) -> RunSettings:
    """Return the settings of the existing run, or of a random seed."""
    other = tiny(epochs=CONTEST_EPOCHS, seed=draw.choice(SEEDS))
    return run.settings() if run.exists() and draw.random() < 0.7 else other


def writer(run: RunFolder) -> int:
    """Return the id of the process that writes to a folder, 0 if there is none."""
    try:
        return int(run.lock_file.read_text().split()[0])
    except (OSError, LookupError, ValueError):
        return 0


def test_no_bit_of_a_state_flips_unseen(tmp_path: Path, verify_scale: float) -> None:
    settings = replace(tiny(epochs=1), preset="flipped")
    state = complete(settings, tmp_path / "run").state_file
    whole, draw = state.read_bytes(), generator()
    flips = round(FLIPS * verify_scale)
    for _ in range(flips):
        content = bytearray(whole)
        content[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        state.write_bytes(content)
        with pytest.raises(ValueError, match=r"state: .*got .*state\.ckpt"):
            read_state(state)
    with pytest.raises(ValueError, match=r"state: must match its checksum"):
        fit(settings, tmp_path / "run", resume=True, progress=False)
    state.write_bytes(whole)
    assert read_state(state)["epoch"] == 1
    print(f"{flips} single-bit flips of {len(whole)} bytes: all rejected")
