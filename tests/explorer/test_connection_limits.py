"""Limits of the server: clients that stall, too many clients, and shutdown."""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from attnconv.explorer import server
from tests.explorer.test_server import Running, picture, started, words


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    yield from started()


def begun(port: int, content: bytes = b"") -> socket.socket:
    """Open a connection with a small receive buffer and send `content`."""
    stream = socket.socket()
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stream.settimeout(20)
    stream.connect(("127.0.0.1", port))
    stream.sendall(content)
    return stream


def rest(stream: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    parts = []
    with stream, contextlib.suppress(ConnectionError):
        while part := stream.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def head(port: int, method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: localhost:{port}", *lines, "", ""]).encode()


class TestStalls:
    """Requests and responses that stall, with shorter timeouts than usual."""

    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server, "PATIENCE", 0.5)
        monkeypatch.setattr(server, "STALL", 0.5)

    @pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: "])
    def test_a_head_that_does_not_come(self, running: Running, sent: bytes) -> None:
        assert rest(begun(running.port, sent)) == b""

    def test_a_head_that_comes_byte_by_byte(self, running: Running) -> None:
        def drip(stream: socket.socket) -> None:
            for _ in range(200):
                stream.sendall(b"G")
                time.sleep(0.05)

        with begun(running.port) as stream, pytest.raises(ConnectionError):
            drip(stream)

    def test_a_body_that_stands_still(self, running: Running) -> None:
        sent = head(running.port, "POST", "/image", "Content-Type: image/png", "Content-Length: 99") + b"x"
        found = rest(begun(running.port, sent))
        assert found.startswith(b"HTTP/1.1 408 ")
        assert b"image: must arrive at 200,000 bytes per second" in found

    def test_a_body_that_comes_byte_by_byte(self, running: Running) -> None:
        stream = begun(running.port, head(running.port, "POST", "/image", "Content-Length: 9999"))
        while not select.select([stream], [], [], 0.05)[0]:  # until the server responds
            stream.sendall(b"x")
        assert rest(stream).startswith(b"HTTP/1.1 408 ")

    def test_a_body_that_comes_in_time(self, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        """The upload takes longer than a client may stall, but is fast enough."""
        monkeypatch.setattr(server, "STALL", 2.0)
        content = picture() + bytes(1_000_000)
        size = f"Content-Length: {len(content)}"
        asked = head(running.port, "POST", "/image", "Content-Type: image/png", "Connection: close", size)
        with begun(running.port, asked) as stream:
            for start in range(0, len(content), 100_000):
                stream.sendall(content[start : start + 100_000])
                time.sleep(0.25)
            assert rest(stream).startswith(b"HTTP/1.1 200 ")

    def test_an_answer_that_is_not_read(self) -> None:
        for large in started(bytes(20_000_000)):
            stream = begun(large.port, head(large.port, "GET", "/payload"))
            time.sleep(1.5)
            assert len(rest(stream)) < 20_000_000

    def test_an_answer_that_is_read_slowly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server, "PATIENCE", 1.5)
        for large in started(bytes(8_000_000)):
            with socket.create_connection(("127.0.0.1", large.port), timeout=20) as stream:
                stream.sendall(head(large.port, "GET", "/payload", "Connection: close"))
                length, start = 0, time.monotonic()
                while part := stream.recv(100_000):
                    length += len(part)
                    time.sleep(0.03)
            assert length > 8_000_000
            assert time.monotonic() - start > 1.5

    def test_the_end_of_the_server(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for patience in (server, "PATIENCE"), (server, "STALL"):
            monkeypatch.setattr(*patience, 60)
        for large in started(bytes(20_000_000)):
            asked = head(large.port, "POST", "/image", "Content-Length: 99"), head(large.port, "GET", "/payload"), b"G"
            held = [begun(large.port, some) for some in asked]
            time.sleep(0.2)
            start = time.monotonic()
        assert time.monotonic() - start < server.STOP + 2
        for stream in held:
            stream.close()


class TestNumbers:
    def test_connections_beyond_the_limit_wait_their_turn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server, "SERVED", 2)
        monkeypatch.setattr(server, "ACCEPTED", 5)
        for few in started():
            first, *others = [begun(few.port, head(few.port, "GET", "/", "Connection: close")[:-2]) for _ in range(5)]
            assert rest(begun(few.port)) == b""  # one connection more than the server accepts
            for stream in others:
                stream.sendall(b"\r\n")
            assert all(rest(stream).startswith(b"HTTP/1.1 200 ") for stream in others)
            first.sendall(b"\r\n")
            assert rest(first).startswith(b"HTTP/1.1 200 ")

    def test_uploads_beyond_the_limit_are_told_when_to_come_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server, "UPLOADS", 1)
        for few in started():
            with begun(few.port, head(few.port, "POST", "/image", "Content-Length: 99")):
                time.sleep(0.2)
                status, headers, content = few.ask("POST", "/image", picture(), Content_Type="image/png")
                assert (status, headers["retry-after"]) == (503, "3")
                assert words(content).startswith("image: the server is busy")
            time.sleep(0.2)
            assert few.ask("POST", "/image", picture(), Content_Type="image/png")[0] == 200

    def test_as_many_bodies_as_there_are_places(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An image waits for a free place among the bodies, not only for the model."""
        monkeypatch.setattr(server, "PLACES", 1)
        monkeypatch.setattr(server, "STALL", 1.0)
        for few in started():
            with begun(few.port, head(few.port, "POST", "/image", "Content-Length: 99")):
                time.sleep(0.2)
                start = time.monotonic()
                assert few.ask("POST", "/image", picture(), Content_Type="image/png")[0] == 200
                assert time.monotonic() - start > 0.4


def test_pictures_of_those_who_left_do_not_reach_the_model() -> None:
    shown: list[int] = []
    go_on = threading.Event()

    def slow(content: bytes, kind: str, heads: str | None) -> bytes:
        shown.append(len(content))
        go_on.wait(20)
        return b"done"

    for running in started(answers=slow):
        sent = head(running.port, "POST", "/image", "Content-Length: 1") + b"x"
        first = begun(running.port, sent)
        time.sleep(0.2)
        for _ in range(3):
            begun(running.port, sent).close()
        time.sleep(0.5)
        go_on.set()
        assert running.ask("POST", "/image", b"xy")[2] == b"done"
        assert shown == [1, 2]
        first.close()
