"""Where a command may write.

A folder is new, empty or marked by an earlier call, which leaves the file `.attnconv` in it; a file is new.
"""

from pathlib import Path

from attnconv._util.errors import bad

_MARK = ".attnconv"


def require_room(flag: str, folder: Path) -> None:
    """Reject a folder that holds other files; before any work."""
    fix = "Name another folder."
    if folder.exists() and not folder.is_dir():
        raise ValueError(bad(flag, "must be a folder", f"the file {folder}", fix))
    if folder.exists() and not (folder / _MARK).exists() and any(folder.iterdir()):
        requirement = "must be a folder that is new, empty or from an earlier call"
        raise ValueError(bad(flag, requirement, f"{folder}, which holds other files", fix))


def mark(folder: Path) -> None:
    """Make a folder and mark it, before the first file is written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).touch()


def require_new(flag: str, file: Path) -> None:
    """Reject a file that exists; before any work."""
    if file.exists() or file.is_symlink():
        raise ValueError(bad(flag, "must be a new file", f"{file}, which exists", "Remove it, or name another."))
