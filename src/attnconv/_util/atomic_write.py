"""Files that are either the old one or the new one, whatever happens while they are written."""

import os
import secrets
from pathlib import Path

from attnconv._util.errors import bad

PARTIAL = ".*.partial"  # what a kill in the middle of a save leaves: the pattern of its name


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file by new content, or leave it as it was.

    The content goes to a second file in the same folder and to the disk (fsync) before that file takes the name, which
    file systems do in one step. A full disk raises and leaves the old file; so does a kill, with the second file
    (`.NAME.RANDOM.partial`) as litter.

    Args:
        path: the file; its folder exists. Behind a symbolic link, the file it leads to is replaced.
        content: all of it.

    Raises:
        OSError: if the content cannot be written, with the system's error number; the old file is as it was.
    """
    path = path.resolve()
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        kept = "The file that was there is unchanged." if path.exists() else "No file was made."
        raise cannot_write(path, len(content), error, kept) from error
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(path.parent)


def cannot_write(path: Path, size: int, error: OSError, kept: str) -> OSError:
    """The system's error with the file's name, which errors of writing do not have.

    Args:
        path: the file.
        size: bytes to be written.
        error: what the system said.
        kept: one sentence about what is in the file now.
    """
    got = f"{error.strerror} for {path}"
    return OSError(error.errno, bad("path", f"must take {size:,} bytes".replace(",", " "), got, kept))


def _sync_folder(folder: Path) -> None:
    """Bring the new name to the disk as well, on systems that can open a folder."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
