"""Atomic writes: after a full disk or a kill, the file is the new one or the old one, never a mixture."""

import errno
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attnconv._util.atomic_write import write_atomically


def test_it_makes_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_behind_a_link_the_file_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"old")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    message = r"path: .*3 bytes, got No space left on device for .*weights\..*unchanged"
    with pytest.raises(OSError, match=message) as caught:
        write_atomically(path, b"new")
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits require POSIX")
def test_a_real_limit_on_the_file_size_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"old")
    code = (
        "import resource, pathlib, sys\n"
        "from attnconv._util.atomic_write import write_atomically\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "write_atomically(pathlib.Path(sys.argv[1]), bytes(100_000))"
    )
    run = _python(code, str(path))
    _, error = run.communicate()
    assert run.returncode == 1
    assert re.search("path: .*100 000 bytes, got File too large", error.decode())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"path: .*got No such file or directory for .*nowhere"):
        write_atomically(tmp_path / "nowhere" / "weights", b"x")


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL requires POSIX")
@pytest.mark.parametrize("milliseconds", [5, 11, 23, 37])
def test_a_kill_leaves_a_whole_file(tmp_path: Path, milliseconds: int) -> None:
    path = tmp_path / "weights"
    code = (
        "import hashlib, pathlib, sys\n"
        "from attnconv._util.atomic_write import write_atomically\n"
        "for round in range(10**9):\n"
        "    content = bytes([round % 256]) * 2_000_000\n"
        "    write_atomically(pathlib.Path(sys.argv[1]), hashlib.sha256(content).digest() + content)\n"
    )
    run = _python(code, str(path))
    deadline = time.monotonic() + 20
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(milliseconds / 1000)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    content = path.read_bytes()
    assert len(content) == 32 + 2_000_000
    assert hashlib.sha256(content[32:]).digest() == content[:32]


def _python(code: str, *arguments: str) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, stderr=subprocess.PIPE)
