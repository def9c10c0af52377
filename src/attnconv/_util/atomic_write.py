"""Atomic file replacement."""

import os
import secrets
from pathlib import Path

from attnconv._util.errors import bad

PARTIAL = ".*.partial"  # names of what a kill in the middle of a save leaves


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file by new content, or leave it as it was and raise `OSError` with the system's error number.

    The content goes to `.NAME.RANDOM.partial` in the same folder, which must exist, is synchronised to the disk and
    renamed. Behind a symbolic link, the link's target is replaced.
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
    if os.name == "posix":  # other systems cannot open a folder to bring the new name to the disk as well
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def cannot_write(path: Path, size: int, error: OSError, kept: str) -> OSError:
    """The system's error in writing `size` bytes, with the file's name and one sentence about its content now."""
    got = f"{error.strerror} for {path}"
    return OSError(error.errno, bad("path", f"must take {size:,} bytes".replace(",", " "), got, kept))
