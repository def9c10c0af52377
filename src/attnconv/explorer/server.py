"""The explorer's server, for this machine only: the page, one payload, and payloads of a visitor's images.

    GET  /           the page, marked as served, and whether images are accepted
    GET  /payload    the payload; 404 where there is none
    POST /image      the bytes of one picture -> a new payload

Errors are {"error": message}, with status 400 to 415, 500 or 503. Requests under another host's name or from another
origin are rejected. No path of a request reaches a file. Pictures are in memory until the answer is sent.

At most `SERVED` connections are read at a time, and later ones wait in their order. A client has `PATIENCE` seconds for
the head of a request and to read an answer; a body may stall for `STALL`.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, final

import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from attnconv._util.errors import bad
from attnconv._util.glibc_malloc import give_back
from attnconv._util.value_checks import whole
from attnconv.data.image_files import TooLargeError, UnsupportedTypeError
from attnconv.explorer.html_page import find_page, with_server
from attnconv.explorer.session import LARGEST_UPLOAD

HOST = "127.0.0.1"
SERVED = 64  # connections; with uvicorn's `limit_concurrency`, all of them would get 503 once there are more
ACCEPTED = 1000  # connections, with those that wait
PATIENCE = 10.0  # seconds
GRACE = 1.0  # seconds for everything once the server is to stop
UPLOADS = 32  # at a time; others get 503 at once, so that half of the connections is left for the page
PLACES = 4  # of them hold a body or an answer of any size; the others wait their turn
STALL = 3.0  # seconds that a body may stall
SLOWEST = 200_000  # bytes a second of a body
STOP = 2  # seconds for the model to finish once the server is to stop
PIECE = 1 << 16  # bytes
NAMES = ("127.0.0.1", "localhost")
HEADERS = {
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline' data: blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
STATUS: Mapping[type[Exception], int] = {
    TooLargeError: 413,
    UnsupportedTypeError: 415,
    ValueError: 400,
    TypeError: 400,
    ClientDisconnect: 400,
}


def app(
    payload: bytes | None, answer: Callable[[bytes, str], bytes] | None = None, *, port: int, page: str | None = None
) -> ASGIApp:
    """The ASGI application.

    Args:
        payload: What the page shows first; None for a page without a model.
        answer: From a picture's bytes and declared type to a new payload; raises ValueError with a message for the
            visitor. None where images cannot be taken.
        port: Port on which it listens, a part of the host and the origin that it accepts.
        page: HTML; None for the package's own.

    Raises:
        FileNotFoundError: The package holds no page.
    """
    shown = with_server(find_page() if page is None else page, images=answer is not None)

    async def current(_: Request) -> Response:
        if payload is None:
            raise HTTPException(404, "no model was named: open or drop a payload, or run `attnconv explore MODEL`.")
        return _pieces(payload)

    routes = [
        Route("/", HTMLResponse(shown), methods=["GET"]),
        Route("/payload", current, methods=["GET"]),
        Route("/image", Images(answer), methods=["POST"]),
    ]
    handlers = dict.fromkeys((HTTPException, *STATUS, Exception), _report)
    # Outside of Starlette's own middleware, so that its answer to a failure is guarded as well.
    return Guard(Starlette(routes=routes, exception_handlers=handlers), port)


def listen(port: int) -> socket.socket:
    """Open a listening socket on 127.0.0.1.

    Args:
        port: 0 for any that is free; `listen(0).getsockname()[1]` says which.

    Raises:
        ValueError: There is no such port.
        OSError: The port is not available.
    """
    try:
        return socket.create_server((HOST, whole("port", port, 0, 65_535)), backlog=64)  # who comes too early waits
    except OSError as error:
        message = bad("port", "must be free", f"{port} ({error.strerror})", "Name another, or 0 for any.")
        raise OSError(error.errno, message) from error


@final
class Connection(H11Protocol):
    """One connection, in uvicorn's HTTP/1.1 protocol, with limits on connections and on the time of a client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)  # adds this one to `connections`, the set that all of a server share
        self.accepted = self._moved = self.loop.time()
        self._served = len(self.connections) <= SERVED
        if len(self.connections) > ACCEPTED:
            transport.abort()
        elif not self._served:
            self.loop.call_soon(self.flow.pause_reading)  # Python 3.10 starts to read only after this method

    def look(self, *, turn: bool) -> None:
        """Read from the client once it is its turn, and hang up on one that has kept the server waiting too long."""
        if turn and not self._served and self.flow.read_paused:
            self._served = True
            self.flow.resume_reading()
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        if self._served and (cycle is None or cycle.response_complete or self.flow.write_paused):
            if self.loop.time() > self._moved + PATIENCE:
                self.transport.abort()
        else:  # it waits for its turn, or the application is at work
            self._moved = self.loop.time()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._moved = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._moved = self.loop.time()

    def shutdown(self) -> None:
        super().shutdown()
        self.loop.call_later(GRACE, self.transport.abort)


@final
class Server(uvicorn.Server):
    """uvicorn's server with limits on connections, checked ten times a second; those that wait are served in order."""

    async def on_tick(self, counter: int) -> bool:
        connections: set[Any] = self.server_state.connections
        for place, connection in enumerate(sorted(connections, key=lambda connection: connection.accepted)):
            connection.look(turn=place < SERVED)
        return await super().on_tick(counter)


def server_for(application: ASGIApp) -> uvicorn.Server:
    """The HTTP server: `run(sockets=[listen(port)])` serves until interrupted."""
    settings = uvicorn.Config(
        application,
        http=Connection,
        loop="asyncio",
        log_level="critical",  # failures are answered with a message; what a stranger sends is no news
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_keep_alive=5,
        timeout_graceful_shutdown=STOP,
        ws="none",
    )
    return Server(settings)


@final
class Images:
    """POST /image, bounded in memory and time.

    Of `UPLOADS` requests at a time, `PLACES` are received, and one of these goes through the model; the others wait.
    """

    def __init__(self, answer: Callable[[bytes, str], bytes] | None) -> None:
        self._answer = answer
        self._uploads = asyncio.Semaphore(UPLOADS)
        self._places = asyncio.Semaphore(PLACES)
        self._model = asyncio.Lock()  # memory for one picture, and the cores are the model's

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._answer is None:
            raise HTTPException(400, "image: there is no model here to show it to. Name one: attnconv explore MODEL.")
        if self._uploads.locked():
            busy = f"image: the server is busy with {UPLOADS} others. Send it again in some seconds."
            raise HTTPException(503, busy, {"Retry-After": str(round(STALL))})
        async with self._uploads, self._places:
            request = Request(scope, receive)
            content = await _body(request)
            async with self._model:
                if await request.is_disconnected():
                    raise ClientDisconnect
                give_back()  # what failed before is held by its error until it is collected
                kind = request.headers.get("content-type", "")
                answer = await anyio.to_thread.run_sync(self._answer, content, kind)
            await _pieces(answer)(scope, receive, send)


@final
class Guard:
    """Rejects requests to other hosts and from other origins, and adds the security headers to every answer."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._hosts = [f"{name}:{port}" for name in NAMES] + (list(NAMES) if port == 80 else [])
        self._origins = {f"http://{host}" for host in self._hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no other protocol is spoken here

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        headers, answer = Headers(scope=scope), self._app
        hosts = [host.lower() for host in headers.getlist("host")]
        foreign = any(origin.lower() not in self._origins for origin in headers.getlist("origin"))
        # A browser says this of a page of another site even where it sends no origin. A link may lead to the page.
        foreign |= scope["path"] != "/" and "cross-site" in headers.getlist("sec-fetch-site")
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            answer = JSONResponse({"error": "host: this server answers to 127.0.0.1 and localhost only."}, 400)
        elif foreign:
            answer = JSONResponse({"error": "origin: this server answers to its own page only."}, 403)
        await answer(scope, receive, guarded)


async def _body(request: Request) -> bytes:
    """All bytes of a request, within limits; a declared length counts only where it is too much."""
    requirement = f"must have at most {LARGEST_UPLOAD:,} bytes"
    declared = request.headers.get("content-length", "0")
    if int(declared) > LARGEST_UPLOAD:
        raise TooLargeError(bad("image", requirement, declared))
    content = bytearray()
    try:
        with anyio.fail_after(STALL) as time:
            async for part in request.stream():
                content += part
                if len(content) > LARGEST_UPLOAD:
                    raise TooLargeError(bad("image", requirement, "more"))
                # What arrives faster than it must saves up no more time than `STALL`.
                time.deadline = min(time.deadline + len(part) / SLOWEST, anyio.current_time() + STALL)
    except TimeoutError:
        requirement = f"must arrive at {SLOWEST:,} bytes a second or more"
        raise HTTPException(408, bad("image", requirement, f"nothing for {STALL:.0f} seconds, or less")) from None
    if not content:
        raise ValueError(bad("image", "must be the bytes of a picture", "nothing"))
    return bytes(content)


def _pieces(content: bytes) -> Response:
    """An answer in pieces: written at once, what a slow reader leaves would be copied by its connection."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(content), PIECE):
            yield content[start : start + PIECE]
            await asyncio.sleep(0)  # else the server learns only at the end that the reader has hung up

    headers = {"Content-Length": str(len(content))}
    return StreamingResponse(pieces(), media_type="application/octet-stream", headers=headers)


async def _report(_: Request, error: Exception) -> Response:
    """An error's message; of an unexpected error only its type, since its message may hold paths."""
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)
    name = type(error).__name__
    status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 500)
    unexpected = f"the explorer failed ({name}). It goes on; another picture may do."
    return JSONResponse({"error": unexpected if status == 500 else str(error) or name}, status)
