"""One writer per run folder: the process that has locked its file `.writer`, which names it and is removed at the end.

A kill leaves the file unlocked. Readers need no lock, because files are replaced in one step.
"""

import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from attnconv._util.errors import bad
from attnconv._util.file_lock import locked
from attnconv.training.processes import is_first_process
from attnconv.training.run_folder import RunFolder


@contextmanager
def writing(folder: RunFolder) -> Iterator[None]:
    """Lock a run folder for writing; it is made where it is missing, and removed where it is empty at the end.

    Raises `ValueError` if another process writes to the folder. With torchrun, only the first process locks.
    """
    if not is_first_process():
        yield
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(locked(folder.lock_file))
        except BlockingIOError:
            fix = "Wait for it to end, or name another folder."
            got = f"{folder.path}, to which {_holder(folder.lock_file)} writes"
            raise ValueError(bad("run_dir", "must be a folder that no other process writes to", got, fix)) from None
        except FileExistsError:
            raise ValueError(bad("run_dir", "must be a folder", f"the file {folder.path}")) from None
        with suppress(OSError):  # a full disk: the lock holds without the name
            file.truncate(0)
            file.write(f"{os.getpid()} {platform.node()}\n".encode())
        try:
            yield
        finally:
            if not file.closed:  # as it is in a fork
                with suppress(OSError):  # Windows removes no open file
                    folder.lock_file.unlink()
                with suppress(OSError):
                    folder.path.rmdir()


def _holder(file: Path) -> str:
    """The process that holds the lock, where the file names it."""
    try:
        process, _, machine = file.read_text(encoding="utf-8").strip().partition(" ")
    except (OSError, ValueError):
        process = machine = ""
    if not process.isdigit():
        return "another process"
    return f"process {process}" + ("" if machine == platform.node() else f" on {machine}")
