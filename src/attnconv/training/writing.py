"""One writer per run folder: a lock that the system releases when its process ends, in whatever way it ends.

The lock is on the file `.writer` in the folder, which names the process that holds it and is removed with the lock. A
kill leaves the file, unlocked; the next writer locks it again. Readers need no lock, because files are replaced in one
step.
"""

import errno
import os
import platform
import stat
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from attnconv._errors import bad
from attnconv.training.processes import is_first_process
from attnconv.training.run_folder import RunFolder

_BUSY = (errno.EACCES, errno.EAGAIN, errno.EDEADLK, errno.EWOULDBLOCK)
_UNKNOWN = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)  # of file systems without locks
_held: set[int] = set()  # descriptors of this process

if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        os.lseek(descriptor, 1 << 30, os.SEEK_SET)  # past the text, since others cannot read bytes that are locked
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _let_go() -> None:
        """A forked process shares its parent's locks, and would keep them when the parent is killed."""
        while _held:
            os.close(_held.pop())

    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def writing(folder: RunFolder) -> Iterator[None]:
    """Hold a run folder for writing; it is made where it is missing.

    Of the processes that share a training only the first one writes, so the others hold nothing.

    Args:
        folder: of the run. A folder that is empty afterwards is removed.

    Raises:
        ValueError: if another process writes to the folder, which is named where it is known, or a file has its place.
            Nothing was changed.
        OSError: if the folder cannot be written.
    """
    if not is_first_process():
        yield
        return
    descriptor = _acquire(folder.lock_file)
    try:
        yield
    finally:
        if descriptor in _held:  # not so in a fork
            with suppress(OSError):  # Windows removes no open file
                folder.lock_file.unlink()
            with suppress(OSError):
                folder.path.rmdir()
            _held.remove(descriptor)
            os.close(descriptor)


def _acquire(file: Path) -> int:
    """The descriptor of the locked file. Its holder removes it, and the folder: what has just gone is tried again."""
    while (descriptor := _open(file)) is None or not _is_at(file, descriptor):
        if descriptor is not None:
            os.close(descriptor)
    _held.add(descriptor)
    with suppress(OSError):  # a full disk: the lock holds without the name
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} {platform.node()}\n".encode())
    return descriptor


def _open(file: Path) -> int | None:
    """Make the file where it is missing, and lock it; None if its folder has gone meanwhile."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    except (FileExistsError, FileNotFoundError):
        with suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.lstat(file.parent).st_mode):
                raise ValueError(bad("--out", "must be a folder", f"the file {file.parent}")) from None
        return None
    try:
        _try_lock(descriptor, file)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_at(file: Path, descriptor: int) -> bool:
    """Whether the locked file still has its name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    return False


def _try_lock(descriptor: int, file: Path) -> None:
    try:
        _lock(descriptor)
    except OSError as error:
        if error.errno in _UNKNOWN:
            text = f"{file.parent}: its file system has no locks. Write to it with one process at a time."
            warnings.warn(text, stacklevel=6)
        elif error.errno in _BUSY:
            fix = "Wait for it to end, or name another folder."
            got = f"{file.parent}, to which {_holder(file)} writes"
            raise ValueError(bad("--out", "must be a folder that no other process writes to", got, fix)) from None
        else:
            raise


def _holder(file: Path) -> str:
    """The process that holds the lock, in words, where the file says it."""
    try:
        process, _, machine = file.read_text(encoding="utf-8").strip().partition(" ")
    except (OSError, ValueError):
        process = machine = ""
    if not process.isdigit():
        return "another process"
    return f"process {process}" + ("" if machine == platform.node() else f" on {machine}")
