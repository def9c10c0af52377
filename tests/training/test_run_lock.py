"""One writer per run folder: with threads, processes and forks, after kills, and on file systems without locks."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from io import FileIO
from pathlib import Path

import pytest

from attnconv._util import file_lock
from attnconv.training.run_folder import RunFolder, writing

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and forks require POSIX")
HOLD = """
import os, sys, time
from pathlib import Path
from attnconv.training.run_folder import RunFolder, writing
with writing(RunFolder(Path(sys.argv[1]))):
    child = os.fork() if sys.argv[2:] == ["fork"] else None
    if not child:
        print("held" if child is None else os.getpid(), flush=True)
    time.sleep(60)
"""
REFUSED = "must be a folder that no other process writes to"


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match="first"), file_lock.locked(tmp_path / "runs" / "first" / "lock"):
        pass


def holder(folder: Path, *words: str) -> tuple["subprocess.Popen[str]", str]:
    """Start a process that locks a folder, and return it with its first output line."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HOLD, str(folder), *words]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def kill(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_nothing_is_left_of_a_lock(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "deep" / "run")
    for _ in range(2):
        with writing(run):
            assert run.is_empty()
            assert run.foreign_files() == []
            assert run.lock_file.is_file()
        assert not run.path.exists()
    with writing(run):
        run.metrics_file.touch()
    assert list(run.path.iterdir()) == [run.metrics_file]


def test_a_second_writer_of_the_same_process_is_refused(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with (
        writing(run),
        pytest.raises(ValueError, match=rf"run_dir: .*got {tmp_path}, .*process {os.getpid()} "),
        writing(run),
    ):
        pass
    with writing(run):
        pass


@posix
def test_a_writer_is_named_and_a_killed_one_is_not_in_the_way(tmp_path: Path) -> None:
    process, said = holder(tmp_path)
    assert said == "held"
    try:
        with (
            pytest.raises(ValueError, match=rf"run_dir: .*got {tmp_path}, .*process {process.pid} "),
            writing(RunFolder(tmp_path)),
        ):
            pass
    finally:
        kill(process)
    assert RunFolder(tmp_path).lock_file.is_file()
    assert RunFolder(tmp_path).is_empty()
    with writing(RunFolder(tmp_path)):
        pass


@posix
def test_a_fork_does_not_keep_the_lock_of_its_killed_parent(tmp_path: Path) -> None:
    process, said = holder(tmp_path, "fork")
    try:
        kill(process)
        os.kill(int(said), 0)  # the process exists
        with writing(RunFolder(tmp_path)):
            pass
    finally:
        os.kill(int(said), signal.SIGKILL)


@pytest.mark.parametrize("content", [b"", b"\xff", b"soon\n"])
def test_a_writer_without_a_name_is_another_process(tmp_path: Path, content: bytes) -> None:
    run = RunFolder(tmp_path)
    with writing(run):
        run.lock_file.write_bytes(content)
        with pytest.raises(ValueError, match=r"run_dir: .*another process"), writing(run):
            pass
        run.lock_file.write_bytes(b"7 elsewhere\n")
        with pytest.raises(ValueError, match=r"run_dir: .*process 7 on elsewhere"), writing(run):
            pass


def test_further_processes_of_a_training_hold_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with writing(RunFolder(tmp_path)):
        monkeypatch.setenv("RANK", "1")
        with writing(RunFolder(tmp_path)):
            pass


def test_without_locks_it_is_said_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: FileIO) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(file_lock, "_lock", none)
    with pytest.warns(UserWarning, match=rf"{tmp_path}: .*file system .*locks"), writing(RunFolder(tmp_path)):
        pass


def test_other_errors_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: FileIO) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(ValueError, match=rf"run_dir: .*{name}"), writing(RunFolder(tmp_path / name)):
            pass
    monkeypatch.setattr(file_lock, "_lock", broken)
    with pytest.raises(OSError, match="Input/output"), writing(RunFolder(tmp_path)):
        pass


def take_turns(folder: Path, times: int) -> None:
    """Lock the folder `times` times; fail if another thread or process has it at the same time."""
    held = 0
    while held < times:
        try:
            with writing(RunFolder(folder)):
                (folder / "alone").touch(exist_ok=False)
                held += 1
                (folder / "alone").unlink()
        except ValueError as error:
            if REFUSED not in str(error):
                raise


def test_no_two_hold_it_in_one_instant(tmp_path: Path) -> None:
    """Two processes with two threads each create and remove the lock file and its folder again and again."""
    folder = tmp_path / "run"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=two_threads, args=(folder,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert not folder.exists()


def two_threads(folder: Path) -> None:
    failures: list[BaseException] = []

    def turns() -> None:
        try:
            take_turns(folder, 200)
        except BaseException as error:  # otherwise an error in a thread is lost
            failures.append(error)
            raise

    threads = [threading.Thread(target=turns) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
