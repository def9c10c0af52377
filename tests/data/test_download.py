"""Downloads from a local server: complete, interrupted and resumed, damaged, rejected, and concurrent."""

import hashlib
import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from attnconv.data.cifar import Remote, fetch

CONTENT = bytes(range(256)) * 4000  # 1,024,000 bytes


@dataclass
class Server:
    """Behaviour of the server, and the requests it received."""

    url: str = ""
    content: bytes = CONTENT
    ranges: bool = True
    breaks: list[int] = field(default_factory=list)
    """Number of bytes after which each of the next responses breaks off."""
    status: int = 200
    asked: list[str | None] = field(default_factory=list)

    def remote(self, content: bytes = CONTENT) -> Remote:
        return Remote(self.url, len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers["Range"]
            state.asked.append(asked)
            if state.status != 200:
                self.send_error(state.status)
                return
            start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and state.ranges else 0
            if start >= len(state.content):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(state.content) - start))
            self.end_headers()
            end = start + state.breaks.pop(0) if state.breaks else len(state.content)
            self.wfile.write(state.content[start:end])

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        state.url = f"http://127.0.0.1:{httpd.server_address[1]}/archive.tar.gz"
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        httpd.shutdown()
        thread.join()


class TestGood:
    def test_a_file_in_a_new_folder(self, server: Server, tmp_path: Path) -> None:
        seen: list[tuple[int, int]] = []
        target = tmp_path / "new" / "archive.tar.gz"
        fetch(server.remote(), target, progress=lambda have, size: seen.append((have, size)))
        assert target.read_bytes() == CONTENT
        assert [path.name for path in target.parent.iterdir()] == ["archive.tar.gz"]
        assert seen[-1] == (len(CONTENT), len(CONTENT))
        assert seen == sorted(seen)
        assert server.asked == [None]

    def test_what_is_there_is_not_fetched(self, server: Server, tmp_path: Path) -> None:
        target = tmp_path / "archive.tar.gz"
        target.write_bytes(b"already here")
        fetch(server.remote(), target)
        assert target.read_bytes() == b"already here"
        assert server.asked == []
        assert [path.name for path in tmp_path.iterdir()] == ["archive.tar.gz"]


class TestBrokenOff:
    def test_it_goes_on_where_it_stopped(self, server: Server, tmp_path: Path) -> None:
        server.breaks = [300_000, 200_000]
        fetch(server.remote(), tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == CONTENT
        assert server.asked == [None, "bytes=300000-", "bytes=500000-"]

    def test_a_later_process_goes_on_as_well(self, server: Server, tmp_path: Path) -> None:
        (tmp_path / "file.part").write_bytes(CONTENT[:700_000])
        fetch(server.remote(), tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == CONTENT
        assert server.asked == ["bytes=700000-"]

    def test_a_complete_part_only_gets_its_name(self, server: Server, tmp_path: Path) -> None:
        (tmp_path / "file.part").write_bytes(CONTENT)
        fetch(server.remote(), tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == CONTENT
        assert server.asked == []

    def test_a_server_without_ranges_starts_again(self, server: Server, tmp_path: Path) -> None:
        server.ranges, server.breaks = False, [300_000]
        fetch(server.remote(), tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == CONTENT
        assert len(server.asked) == 2

    @pytest.mark.parametrize("old", [b"x" * 5000, b"x" * (len(CONTENT) + 9), b"x" * len(CONTENT)])
    def test_a_part_of_something_else_is_thrown_away(self, old: bytes, server: Server, tmp_path: Path) -> None:
        (tmp_path / "file.part").write_bytes(old)
        fetch(server.remote(), tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == CONTENT

    def test_many_breaks_are_fine_as_long_as_bytes_arrive(self, server: Server, tmp_path: Path) -> None:
        server.breaks = [50_000] * 15
        fetch(server.remote(), tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == CONTENT


class TestFailures:
    @pytest.mark.parametrize("old", [b"", CONTENT[:1000]])
    def test_another_file_at_home(self, old: bytes, server: Server, tmp_path: Path) -> None:
        remote = server.remote()
        server.content = CONTENT[:-1] + b"?"
        (tmp_path / "file.part").write_bytes(old)
        got = hashlib.sha256(server.content).hexdigest()
        with pytest.raises(ValueError, match=rf"archive\.tar\.gz: .*got {got}"):
            fetch(remote, tmp_path / "file")
        assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [("file.part", 0)]
        server.content = CONTENT
        fetch(remote, tmp_path / "file")  # no leftover file affects the next attempt
        assert (tmp_path / "file").read_bytes() == CONTENT

    def test_a_shorter_file_at_home(self, server: Server, tmp_path: Path) -> None:
        server.content = CONTENT[:5000]
        with pytest.raises(ConnectionError, match=r": .*, got 5,000 of 1,024,000 bytes \(.*416"):
            fetch(server.remote(), tmp_path / "file")

    def test_a_longer_file_at_home(self, server: Server, tmp_path: Path) -> None:
        server.content = CONTENT + b"more"
        fetch(server.remote(), tmp_path / "file")  # exactly the expected bytes are read
        assert (tmp_path / "file").read_bytes() == CONTENT

    def test_nothing_there(self, server: Server, tmp_path: Path) -> None:
        server.status = 404
        with pytest.raises(ConnectionError, match=r": .*, got 0 of 1,024,000 bytes \(HTTP Error 404"):
            fetch(server.remote(), tmp_path / "file")
        assert len(server.asked) == 1
        assert not (tmp_path / "file").exists()

    def test_a_server_in_trouble_is_asked_again(self, server: Server, tmp_path: Path) -> None:
        server.status = 503
        with pytest.raises(ConnectionError, match=r"got 0 of 1,024,000 bytes \(HTTP Error 503"):
            fetch(server.remote(), tmp_path / "file")
        assert len(server.asked) == 3

    def test_no_network_keeps_what_is_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{closed.getsockname()[1]}/file"
        (tmp_path / "file.part").write_bytes(CONTENT[:4000])
        with pytest.raises(ConnectionError, match=r"got 4,000 of 1,024,000 bytes .*refused.*next download"):
            fetch(Remote(url, len(CONTENT), "0" * 64), tmp_path / "file")
        assert (tmp_path / "file.part").read_bytes() == CONTENT[:4000]


def together(count: int, work: Callable[[], object]) -> list[BaseException]:
    """Run `work` in several threads and return the exceptions raised."""
    raised: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except (ValueError, OSError) as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_those_who_come_together_fetch_it_once(server: Server, tmp_path: Path) -> None:
    target = tmp_path / "file"
    assert together(6, lambda: fetch(server.remote(), target)) == []
    assert target.read_bytes() == CONTENT
    assert server.asked == [None]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
