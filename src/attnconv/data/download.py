"""Download one file over HTTP: resumed where it stopped, verified, and put in place in one step.

The bytes go to `NAME.part` beside the target until size and SHA-256 are right. A download that broke off, in this
process or an earlier one, continues from there. Processes that download the same file wait for each other.
"""

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path

from attnconv._util.errors import bad
from attnconv._util.file_lock import locked

_PIECE = 1 << 18
_TIMEOUT = 15.0  # seconds without an answer before a request is given up
_ATTEMPTS = 3  # requests in a row that may bring no new byte

Progress = Callable[[int, int], None]  # of the bytes that are there and the bytes that the file will have


@dataclass(frozen=True)
class Remote:
    """A file to download: its URL, its size in bytes and its SHA-256, hexadecimal."""

    url: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """Name of the file."""
        return self.url.rpartition("/")[2]


def sha256_of(file: BufferedReader | FileIO) -> str:
    """Checksum of an open file, from its beginning."""
    digest = hashlib.sha256()
    file.seek(0)
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


def fetch(remote: Remote, target: Path, *, progress: Progress | None = None) -> None:
    """Download a file unless it is there. What arrives before a `ConnectionError` is kept for the next time."""
    part = target.with_name(target.name + ".part")
    with locked(part, wait=True) as file:
        if not target.is_file():  # else another process downloaded it while this one waited
            _complete(remote, file, progress=progress)
    if target.is_file():
        part.unlink(missing_ok=True)
        return
    try:
        part.replace(target)
    except FileNotFoundError:  # a process that waited was faster
        if not target.is_file():
            raise


def _complete(remote: Remote, file: FileIO, *, progress: Progress | None) -> None:
    """Append what is missing, in as many requests as it takes while each brings something, and verify the whole.

    Starts again once if the whole is wrong, or if the server does not continue what is here.
    """
    idle, again = 0, True
    while True:
        have = file.seek(0, os.SEEK_END)
        if have == remote.size:
            if (got := sha256_of(file)) == remote.sha256:
                os.fsync(file.fileno())
                return
            file.truncate(0)
            if not again:
                fix = "The download was damaged, or the file has changed at its home; it was discarded."
                raise ValueError(bad(remote.url, f"must have the SHA-256 {remote.sha256}", got, fix))
            again = False
            continue
        reason = _append(remote, file, progress=progress)
        now = file.seek(0, os.SEEK_END)
        idle = 0 if now > have else idle + 1
        refused = isinstance(reason, urllib.error.HTTPError) and 400 <= reason.code < 500
        if refused and have > 0 and again:
            file.truncate(0)  # the server has less than what is here (416), or will not resume
            again = False
        elif now != remote.size and (refused or idle >= _ATTEMPTS):
            got = f"{now:,} of {remote.size:,} bytes ({reason})"
            fix = "What has arrived is kept, and the next download continues from there." if now else ""
            raise ConnectionError(bad(remote.url, "must be within reach", got, fix))
        if idle:
            time.sleep(min(0.25 * 2**idle, 4.0))


def _append(remote: Remote, file: FileIO, *, progress: Progress | None) -> Exception | str:
    """Send one request for the rest of the file; returns what ended it."""
    have = file.seek(0, os.SEEK_END)
    request = urllib.request.Request(remote.url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            if have and answer.status != http.client.PARTIAL_CONTENT:
                file.truncate(0)  # a server without ranges sends the file from its beginning
                have = 0
            while piece := answer.read(min(_PIECE, remote.size - have)):
                file.write(piece)
                have += len(piece)
                if progress is not None:
                    progress(have, remote.size)
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        return error
    return "the connection was closed"
