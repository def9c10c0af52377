"""Exclusive file locks, which the operating system releases when the process ends for any reason."""

import errno
import os
import stat
import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

_UNKNOWN = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)  # errors of file systems without locks
_open_files: weakref.WeakSet[FileIO] = weakref.WeakSet()

if sys.platform == "win32":
    import msvcrt

    def _lock(file: FileIO) -> None:
        file.seek(1 << 30)  # past the content, since other processes cannot read locked bytes
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError(*error.args) from None

else:
    import fcntl

    def _lock(file: FileIO) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _release() -> None:
        """Close the locked files in a forked process, which would otherwise keep locks if its parent were killed."""
        for file in list(_open_files):
            file.close()

    os.register_at_fork(after_in_child=_release)


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[FileIO]:
    """Lock a file and yield it, unbuffered, for reading and appending; create it and its folder if they are missing.

    The owner of the lock may remove or rename the file; waiting processes then lock a new file of this name. Raises
    `BlockingIOError` if another process or thread has locked the file and `wait` is false. Warns if the file system
    does not support locks.
    """
    while True:
        with _open(path) as file:
            _open_files.add(file)
            if _acquire(file, path, wait=wait):
                yield file
                return


def _open(path: Path) -> FileIO:
    attempts = 0
    while True:
        try:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except FileExistsError:
                if not stat.S_ISDIR(os.lstat(path.parent).st_mode):
                    raise
            return FileIO(path, "a+")
        except FileNotFoundError:  # another process has removed the folder, or it cannot be created
            attempts += 1
            if attempts == 100:
                raise


def _acquire(file: FileIO, path: Path, *, wait: bool) -> bool:
    """Lock an open file; return False if the file has been removed or renamed in the meantime."""
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
            text = f"{path.parent}: the file system does not support locks. Write with one process at a time."
            warnings.warn(text, stacklevel=5)
            break
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
