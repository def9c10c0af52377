"""The documented limits of the server (docs/explorer.md): its memory, its responses and its shutdown under load."""

import http.client
import io
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from tests.explorer.hostile import hostile, is_cut, picture, request
from tests.explorer.served import PAYLOAD_BYTES
from tests.explorer.test_session import plain_png

SOURCE = Path(__file__).resolve().parents[2]
MEMORY = 800  # MB above the idle memory, as documented, like the limits below
PAGE_SECONDS, UPLOAD_SECONDS, STOP_SECONDS = 2, 120, 5
REQUESTS, UPLOADS, STALLED = 2700, 30, 50

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads peak memory from /proc")


@dataclass
class Served:
    """Server in a separate process."""

    process: subprocess.Popen[str]
    port: int
    idle: float = 0.0

    def peak(self) -> float:
        """Return the peak memory in MB."""
        found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found is not None
        return int(found[1]) / 1000

    def ask(self, path: str, body: bytes | None = None, kind: str = "image/png") -> tuple[int, bytes]:
        """Return status and content of the response, repeating the request while the server is busy."""
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
            connection.request("GET" if body is None else "POST", path, body, {"Content-Type": kind})
            response = connection.getresponse()
            content = response.read()
            connection.close()
            if response.status != 503:
                return response.status, content
            time.sleep(int(response.headers["Retry-After"]))

    def send(self, content: bytes) -> bytes:
        """Return the response, up to a final status, to bytes that need not be HTTP."""
        found = b""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as stream:
            try:
                stream.sendall(content)
                if is_cut(content):
                    stream.shutdown(socket.SHUT_WR)
                while not re.search(rb"HTTP/1\.1 [2-5]", found) and (part := stream.recv(1 << 20)):
                    found += part
            except TimeoutError:
                raise
            except OSError:
                pass  # the server may close the connection of an invalid request
        return found

    def open(self, content: bytes) -> socket.socket:
        """Open a connection that sends `content`, and nothing afterwards."""
        stream = socket.socket()
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stream.settimeout(60)
        stream.connect(("127.0.0.1", self.port))
        stream.sendall(content)
        return stream


@contextmanager
def served() -> Iterator[Served]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{SOURCE / 'src'}{os.pathsep}{SOURCE}"}
    command = [sys.executable, "-m", "tests.explorer.served"]
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(
            command, cwd=SOURCE, env=environment, stdout=subprocess.PIPE, stderr=complaints, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())
            assert found is not None
            server = Served(process, int(found[1]))
            assert server.ask("/image", good())[0] == 200  # warm-up
            server.idle = server.peak()
            yield server
            complaints.seek(0)
            assert complaints.read() == ""
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """Server for all tests that do not stop it; its peak memory is that of all tests."""
    with served() as found:
        yield found


def good() -> bytes:
    return picture(random.Random(0), "PNG")


def of_megabytes(count: int) -> bytes:
    """Return a PNG of noise, whose file is as large as its pixels."""
    side = int((count * 1e6 / 3) ** 0.5)
    file = io.BytesIO()
    Image.frombytes("RGB", (side, side), random.Random(0).randbytes(3 * side * side)).save(
        file, "PNG", compress_level=0
    )
    return file.getvalue()


def stalling(port: int, count: int) -> list[bytes]:
    """Return requests that stall: empty, half a header, a body cut early or late, and an unread response."""
    late = request(port, bytes(3_000_000), "image/png", length=19_000_000)
    early = request(port, b"x", "image/png", length=999)
    head = f"GET /payload HTTP/1.1\r\nHost: localhost:{port}\r\n"
    kinds = [b"", head.encode(), early, late, f"{head}\r\n".encode()]
    return [kinds[place % len(kinds)] for place in range(count)]


def require_memory(server: Served) -> None:
    used = server.peak() - server.idle
    print(f"peak {used:.0f} MB above {server.idle:.0f} MB")
    assert used < MEMORY


def test_uploads_at_once_a_tall_picture_and_stalled_connections(server: Served, verify_scale: float) -> None:
    uploads, stalled, body = (
        max(6, round(UPLOADS * verify_scale)),
        max(20, round(STALLED * verify_scale)),
        of_megabytes(16),
    )
    with ExitStack() as stack, ThreadPoolExecutor(uploads + 2) as pool:
        for some in stalling(server.port, stalled):
            stack.enter_context(server.open(some))
        start = time.monotonic()
        assert server.ask("/payload") == (200, bytes(PAYLOAD_BYTES))
        assert server.ask("/")[0] == 200
        page = time.monotonic() - start
        sent = [pool.submit(server.ask, "/image", body) for _ in range(uploads)]
        tall = pool.submit(server.ask, "/image", plain_png(1, 50_000_000))
        small = pool.submit(server.ask, "/image", good())
        assert [one.result()[0] for one in [*sent, small, tall]] == [200] * (uploads + 1) + [413]
        seconds = time.monotonic() - start
    print(f"page and payload {page:.2f} s, {uploads} uploads {seconds:.1f} s")
    assert page < PAGE_SECONDS
    assert seconds < UPLOAD_SECONDS
    require_memory(server)


@pytest.mark.parametrize("width", [7071, 763])
def test_the_largest_pictures_that_are_taken(server: Served, width: int, verify_scale: float) -> None:
    """A PNG with alpha and a JPEG whose coefficients the decoder stores, both of the largest allowed file size."""
    height, progressive, count = min(50_000_000 // width, 65_500), io.BytesIO(), max(2, round(6 * verify_scale))
    Image.new("CMYK", (width, height)).save(progressive, "JPEG", progressive=True, subsampling=0)
    for content, kind in ((plain_png(width, height, colour=6), "image/png"), (progressive.getvalue(), "image/jpeg")):
        with ThreadPoolExecutor(count) as pool:
            asked = [pool.submit(server.ask, "/image", content.ljust(20_000_000, b"\0"), kind) for _ in range(count)]
            for one in asked:
                assert one.result()[0] == 400  # rejected after decoding, because it has a single colour
        require_memory(server)


def seconds_to_stop(server: Served, sent: signal.Signals) -> float:
    start = time.monotonic()
    server.process.send_signal(sent)
    assert server.process.wait(60) == (130 if sent is signal.SIGINT else -signal.SIGTERM)
    return time.monotonic() - start


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_it_stops_whatever_clients_do(sent: signal.Signals) -> None:
    """Compare with a server without clients, because other processes on the machine delay both."""
    with served() as alone:
        without_clients = seconds_to_stop(alone, sent)
    with served() as server, ExitStack() as stack:
        for some in stalling(server.port, STALLED):
            stack.enter_context(server.open(some))
        stack.enter_context(server.open(request(server.port, good(), "image/png;slow")))
        time.sleep(0.5)
        seconds = seconds_to_stop(server, sent)
        print(f"{sent.name}: {seconds:.1f} s, without clients {without_clients:.1f} s")
        assert seconds - without_clients < STOP_SECONDS


def test_a_hundred_connections_at_once_are_all_answered(server: Served) -> None:
    asked = f"GET / HTTP/1.1\r\nHost: localhost:{server.port}\r\nConnection: close\r\n"
    with ExitStack() as stack:
        streams = [stack.enter_context(server.open(asked.encode())) for _ in range(100)]
        for stream in streams:
            stream.sendall(b"\r\n")
        for stream in streams:
            assert stream.recv(100).startswith(b"HTTP/1.1 200 ")


def test_hostile_requests(server: Served, verify_scale: float) -> None:
    seed = time.time_ns() if os.environ.get("HYPOTHESIS_PROFILE") == "explore" else 0
    print(f"seed {seed}")
    draws, count, answers = random.Random(seed), round(REQUESTS * verify_scale), 0
    for _ in range(count):
        sent = hostile(draws, server.port)
        found = server.send(sent)
        statuses = {int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", found)}
        assert statuses <= {100, 200, 307, 400, 403, 404, 405, 408, 413, 415}, sent[:200]
        answers += bool(statuses)
    assert answers > count / 2
    assert server.ask("/image", good())[0] == 200
    require_memory(server)
