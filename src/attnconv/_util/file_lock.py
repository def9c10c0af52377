"""Exclusive file locks, which the system releases however the process ends."""

import errno
import os
import stat
import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

_UNKNOWN = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)  # of file systems without locks
_open_files: weakref.WeakSet[FileIO] = weakref.WeakSet()

if sys.platform == "win32":
    import msvcrt

    def _lock(file: FileIO) -> None:
        file.seek(1 << 30)  # past the contents, since others cannot read bytes that are locked
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError(*error.args) from None

else:
    import fcntl

    def _lock(file: FileIO) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _let_go() -> None:
        """A forked process shares its parent's locks, and would keep them when the parent is killed."""
        for file in list(_open_files):
            file.close()

    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[FileIO]:
    """Hold an unbuffered file for reading and appending; it and its folder are made where they are missing.

    The holder may remove or rename the file: a process that waited for it takes the next file of this name. Without
    `wait`, raises `BlockingIOError` if another process or thread holds it. Warns where the file system has no locks.
    """
    while True:
        with _open(path) as file:
            _open_files.add(file)
            if _acquire(file, path, wait=wait):
                yield file
                return


def _open(path: Path) -> FileIO:
    while True:
        with suppress(FileNotFoundError):  # the folder has gone meanwhile
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except FileExistsError:
                if not stat.S_ISDIR(os.lstat(path.parent).st_mode):
                    raise
            return FileIO(path, "a+")


def _acquire(file: FileIO, path: Path, *, wait: bool) -> bool:
    """Lock an open file; False if it has lost its name meanwhile."""
    while True:
        try:
            _lock(file)
            break
        except BlockingIOError:
            if not wait:
                raise
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise
            text = f"{path.parent}: its file system has no locks. Write to it with one process at a time."
            warnings.warn(text, stacklevel=5)
            break
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
