"""Atomic file replacement."""

import os
import secrets
from pathlib import Path

from attnconv._util.errors import bad

PARTIAL = ".*.partial"  # pattern of files that remain if a process is killed during a write


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the content of a file, or raise `OSError` with the system's error number and leave the file unchanged.

    The content is first written to `.NAME.RANDOM.partial` in the same folder (which must exist) and flushed to disk;
    then this file is renamed to NAME. If the path is a symbolic link, its target is replaced.
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
        kept = "The existing file is unchanged." if path.exists() else "No file was created."
        raise cannot_write(path, len(content), error, kept) from error
    finally:
        partial.unlink(missing_ok=True)
    if os.name == "posix":  # other systems cannot open a folder to synchronise the new name
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def cannot_write(path: Path, size: int, error: OSError, kept: str) -> OSError:
    """Return the system's error with the file's name and a sentence about the file's current content."""
    got = f"{error.strerror} for {path}"
    return OSError(error.errno, bad("path", f"must accept {size:,} bytes".replace(",", " "), got, kept))
