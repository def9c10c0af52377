"""The server over real sockets, with requests of browsers and other clients."""

import http.client
import io
import json
import random
import re
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from attnconv.explorer import app, listen, read_upload, server_for
from attnconv.explorer.server import HEADERS
from tests.explorer.hostile import malformed
from tests.explorer.pages import PAGE
from tests.explorer.test_session import png_of

PAYLOAD = b"the payload's bytes"
SECRET = "only on this disk"


@dataclass
class Running:
    """Running server."""

    port: int

    def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body; the path is sent unchanged."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        named = {"Host": f"127.0.0.1:{self.port}"} | {key.replace("_", "-"): value for key, value in headers.items()}
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for key, value in named.items():
            connection.putheader(key, value)
        if body is not None and "Transfer-Encoding" not in named and "Content-Length" not in named:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, {key.lower(): value for key, value in response.getheaders()}, content

    def raw(self, content: bytes) -> bytes:
        """Return the response, if any, to bytes that need not be HTTP."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as stream:
            parts = []
            try:
                stream.sendall(content)
                stream.shutdown(socket.SHUT_WR)
                while part := stream.recv(65536):
                    parts.append(part)
            except TimeoutError:
                raise
            except OSError:
                pass  # the server may close the connection of an invalid request
            return b"".join(parts)


def answer(content: bytes, kind: str, heads: str | None) -> bytes:
    """Answer as the explorer does, with the mean pixel value as payload."""
    return bytes(str(float(read_upload(content, kind, (4, 4)).float().mean())), "ascii")


def started(
    payload: bytes | None = PAYLOAD, *, answers: Callable[[bytes, str, str | None], bytes] | None = answer
) -> Iterator[Running]:
    place = listen(0)
    port = place.getsockname()[1]
    served = server_for(app(payload, answers, port=port, page=PAGE))
    thread = threading.Thread(target=served.run, kwargs={"sockets": [place]})
    thread.start()
    try:
        yield Running(port)
    finally:
        served.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    yield from started()


@pytest.fixture(scope="module")
def empty() -> Iterator[Running]:
    yield from started(None, answers=None)


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 20), (30, 60, 90)).save(file, "PNG")
    return file.getvalue()


def words(content: bytes) -> str:
    return str(json.loads(content)["error"])


class TestRoutes:
    def test_the_page_is_marked_as_served(self, running: Running, empty: Running) -> None:
        status, headers, content = running.ask("GET", "/")
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert b'<meta name="attnconv-server" content="images">' in content
        assert b"stand-in" in content
        assert b'<meta name="attnconv-server" content="payload">' in empty.ask("GET", "/")[2]

    def test_the_payload(self, running: Running, empty: Running) -> None:
        status, _, content = running.ask("GET", "/payload")
        assert (status, content) == (200, PAYLOAD)
        status, _, content = empty.ask("GET", "/payload")
        assert status == 404
        assert "attnconv explore MODEL" in words(content)

    def test_an_image(self, running: Running, empty: Running) -> None:
        status, _, content = running.ask("POST", "/image", picture(), Content_Type="image/png")
        assert (status, content) == (200, b"60.0")
        status, _, content = empty.ask("POST", "/image", picture(), Content_Type="image/png")
        assert status == 400
        assert re.fullmatch(r"image: .*no model.* attnconv explore MODEL\.", words(content))

    def test_every_answer_has_the_headers_of_safety(self, running: Running) -> None:
        asked = [("GET", "/"), ("GET", "/payload"), ("GET", "/none"), ("POST", "/payload"), ("POST", "/image")]
        for method, path in asked:
            headers = running.ask(method, path, b"" if method == "POST" else None)[1]
            assert {name: headers.get(name.lower()) for name in HEADERS} == HEADERS
            assert "server" not in headers
            assert "access-control-allow-origin" not in headers

    def test_other_paths_and_methods(self, running: Running) -> None:
        assert running.ask("GET", "/docs")[0] == 404
        assert running.ask("DELETE", "/payload")[0] == 405
        assert running.ask("GET", "/image")[0] == 405
        assert running.ask("OPTIONS", "/image", Origin="http://evil.example")[0] == 403


class TestFailures:
    def test_what_nobody_expected_is_answered_in_words_and_with_the_headers(self) -> None:
        def fails(content: bytes, kind: str, heads: str | None) -> bytes:
            raise RuntimeError(f"{kind} at /some/path")

        for running in started(answers=fails):
            for _ in range(2):
                status, headers, content = running.ask("POST", "/image", picture(), Content_Type="image/png")
                assert (status, headers["content-type"]) == (500, "application/json")
                assert "(RuntimeError)" in words(content)
                assert "/some/path" not in words(content)
                assert {name: headers.get(name.lower()) for name in HEADERS} == HEADERS
            assert running.ask("GET", "/payload")[2] == PAYLOAD


class TestOrigin:
    @pytest.mark.parametrize(
        "host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example", "", "[::1]"]
    )
    def test_foreign_hosts(self, running: Running, host: str) -> None:
        status, _, content = running.ask("GET", "/payload", Host=host)
        assert status == 400
        assert PAYLOAD not in content

    def test_own_hosts(self, running: Running) -> None:
        assert running.ask("GET", "/payload", Host=f"LOCALHOST:{running.port}")[0] == 200

    @pytest.mark.parametrize(
        "origin", ["http://evil.example", "null", "http://127.0.0.1", "https://127.0.0.1:{port}", ""]
    )
    def test_foreign_origins(self, running: Running, origin: str) -> None:
        origin = origin.format(port=running.port)
        status, _, content = running.ask("POST", "/image", picture(), Content_Type="image/png", Origin=origin)
        assert (status, words(content).startswith("origin: ")) == (403, True)

    def test_own_origins(self, running: Running) -> None:
        origin = f"http://localhost:{running.port}"
        assert running.ask("POST", "/image", picture(), Content_Type="image/png", Origin=origin)[0] == 200

    def test_pages_of_other_sites(self, running: Running) -> None:
        assert running.ask("GET", "/payload", Sec_Fetch_Site="cross-site")[0] == 403
        assert running.ask("GET", "/payload", Sec_Fetch_Site="same-origin")[0] == 200
        assert running.ask("GET", "/", Sec_Fetch_Site="cross-site")[0] == 200  # links from other sites are allowed


class TestUploads:
    def test_types(self, running: Running) -> None:
        for content, kind in ((b"words named .png", "image/png"), (picture(), "text/plain"), (picture(), "image/gif")):
            status, _, found = running.ask("POST", "/image", content, Content_Type=kind)
            assert status == 415
            assert words(found).startswith("image: must be ")

    def test_a_hundred_megapixels(self, running: Running) -> None:
        status, _, content = running.ask("POST", "/image", png_of(10_000, 10_000), Content_Type="image/png")
        assert status == 413
        assert re.fullmatch(r"image: .*50,000,000 pixels, got 10000 x 10000\.", words(content))

    def test_broken_and_missing(self, running: Running) -> None:
        status, _, content = running.ask("POST", "/image", picture()[:-30], Content_Type="image/png")
        assert status == 400
        assert "image: " in words(content)
        status, _, content = running.ask("POST", "/image", b"", Content_Type="image/png")
        assert status == 400
        assert re.fullmatch(r"image: .*got an empty body\.", words(content))

    def test_too_many_bytes_declared_or_sent(self, running: Running) -> None:
        status, _, content = running.ask("POST", "/image", b"x", Content_Type="image/png", Content_Length="20000001")
        assert status == 413
        assert re.fullmatch(r"image: .*20,000,000 bytes, got 20000001\.", words(content))
        chunks = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
        head = f"POST /image HTTP/1.1\r\nHost: localhost:{running.port}\r\nContent-Type: image/png\r\n"
        found = running.raw(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunks * 21 + b"0\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 413") or found == b""  # lost if the server closes early
        assert running.ask("GET", "/payload")[0] == 200


class TestPaths:
    @pytest.mark.parametrize(
        "path",
        [
            "/../secret",
            "/..%2fsecret",
            "/%2e%2e/secret",
            "/payload/../../secret",
            "//secret",
            "/payload%00",
            "/\\..\\secret",
        ],
    )
    def test_no_path_leads_to_a_file(
        self, running: Running, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "secret").write_text(SECRET)
        (tmp_path / "inner").mkdir()
        monkeypatch.chdir(tmp_path / "inner")
        for method in ("GET", "POST"):
            status, _, content = running.ask(method, path)
            assert status in (307, 400, 404, 405)
            assert SECRET.encode() not in content
        assert sorted(found.name for found in tmp_path.rglob("*")) == ["inner", "secret"]


def test_a_thousand_malformed_requests_leave_the_memory_steady(running: Running) -> None:
    draws = random.Random(0)

    def send(count: int) -> int:
        for _ in range(count):
            found = running.raw(malformed(draws, running.port))
            assert PAYLOAD not in found
            assert b" 500 " not in found[:20]
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = send(100)  # warm-up
        after = send(1000)
    finally:
        tracemalloc.stop()
    assert after - before < 300_000  # bytes: 300 per request, less than the size of a request
    assert running.ask("GET", "/payload")[2] == PAYLOAD
    assert running.ask("POST", "/image", picture(), Content_Type="image/png")[2] == b"60.0"


def test_a_port_that_is_taken() -> None:
    with listen(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"port: .*got {port} .* 0 for any"):
            listen(port)
        assert taken.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ValueError, match=r"port: .*got 70000"):
        listen(70_000)
