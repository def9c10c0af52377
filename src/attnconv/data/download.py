"""Fetching one file over HTTP: resumed where it stopped, checked, and put in place in one step.

The bytes go to ``NAME.part`` beside the target. A download that broke off, in this process or an earlier one, goes on
from there (``Range``); when the size and the SHA-256 are right the file gets its name. Under its name a file is
therefore always whole. Processes that fetch the same file wait for each other.
"""

import contextlib
import http.client
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from attnconv._util.errors import bad
from attnconv._util.file_lock import locked
from attnconv.data.decoded_cache import stream_digest

_LOG = logging.getLogger(__name__)
_PIECE = 1 << 18

Progress = Callable[[int, int], None]
"""Called with the bytes that are there and the bytes that the file will have."""


@dataclass(frozen=True)
class Remote:
    """A file at its home.

    Args:
        url: where it is.
        size: its size in bytes.
        sha256: its checksum, hexadecimal.
    """

    url: str
    size: int
    sha256: str


def fetch(
    remote: Remote, target: Path, *, attempts: int = 3, timeout: float = 15.0, progress: Progress | None = None
) -> Path:
    """Download a file unless it is there.

    Args:
        remote: the file at its home.
        target: where it shall be; its folder is created, and removed where nothing arrives.
        attempts: after how many requests in a row without a single new byte to give up, at least 1.
        timeout: seconds without an answer before a request is given up.
        progress: called after each piece.

    Returns:
        The target.

    Raises:
        ConnectionError: if the file could not be fetched; what has arrived is kept for the next time.
        ValueError: if what was fetched is not what was expected; it is thrown away.
    """
    absent = [folder for folder in (target.parent, *target.parent.parents) if not folder.exists()]
    part = target.with_name(target.name + ".part")
    try:
        with locked(part, wait=True) as file:
            try:
                if not target.is_file():  # else another process fetched it while this one waited
                    _complete(remote, file, attempts=attempts, timeout=timeout, progress=progress)
            finally:
                if file.seek(0, os.SEEK_END) == 0:
                    with contextlib.suppress(OSError):  # Windows keeps open files
                        part.unlink()
    finally:
        with contextlib.suppress(OSError):  # they hold what has arrived
            for folder in absent:
                folder.rmdir()
    if target.is_file():
        part.unlink(missing_ok=True)
        return target
    try:
        part.replace(target)
    except FileNotFoundError:  # a process that waited was faster
        if not target.is_file():
            raise
    return target


def _complete(remote: Remote, file: FileIO, *, attempts: int, timeout: float, progress: Progress | None) -> None:
    """Append what is missing and check the whole; start anew once if an old beginning does not fit."""
    resumed = file.seek(0, os.SEEK_END) > 0
    _receive(remote, file, attempts=attempts, timeout=timeout, progress=progress)
    if resumed and stream_digest(file) != remote.sha256:
        _LOG.warning("what an earlier download left of %s does not fit, fetching all of it", remote.url)
        file.truncate(0)
        _receive(remote, file, attempts=attempts, timeout=timeout, progress=progress)
    if (got := stream_digest(file)) != remote.sha256:
        file.truncate(0)
        fix = "The download was damaged, or the file has changed at its home; it was thrown away."
        raise ValueError(bad(remote.url, f"must have the SHA-256 {remote.sha256}", got, fix))
    os.fsync(file.fileno())


def _receive(remote: Remote, file: FileIO, *, attempts: int, timeout: float, progress: Progress | None) -> None:
    """Append what is missing, in as many requests as it takes while each brings something."""
    idle, restarted = 0, False
    while (have := file.seek(0, os.SEEK_END)) != remote.size:
        try:
            _append(remote, file, timeout=timeout, progress=progress)
            reason: Exception | str = "the connection was closed"
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            reason = error
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # it holds the connection
        now = file.seek(0, os.SEEK_END)
        idle = 0 if now > have else idle + 1
        refused = isinstance(reason, urllib.error.HTTPError) and 400 <= reason.code < 500
        if refused and have > 0 and not restarted:
            file.truncate(0)  # the server has less than what is here (416), or will not resume
            restarted = True
        elif now != remote.size and (refused or idle >= attempts):
            got = f"{now:,} of {remote.size:,} bytes ({reason})"
            fix = "What has arrived is kept, and the next download goes on from there." if now else ""
            raise ConnectionError(bad(remote.url, "must be within reach", got, fix))
        if idle:
            time.sleep(min(0.25 * 2**idle, 4.0))


def _append(remote: Remote, file: FileIO, *, timeout: float, progress: Progress | None) -> None:
    """One request for the rest of the file."""
    have = file.seek(0, os.SEEK_END)
    request = urllib.request.Request(remote.url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        if have and answer.status != http.client.PARTIAL_CONTENT:
            file.truncate(0)  # a server without ranges sends the file from its beginning
            have = 0
        while piece := answer.read(min(_PIECE, remote.size - have)):
            file.write(piece)
            have += len(piece)
            if progress is not None:
                progress(have, remote.size)
