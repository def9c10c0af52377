"""Local server of the explorer: the page, one payload, and payloads of uploaded images.

    GET  /           the page, with a mark that says whether images are accepted
    GET  /payload    the payload; 404 if there is none
    POST /image      the bytes of one image file -> a new payload
    POST /image?heads={"LAYER": {"HEAD": "zero"}}
                     the bytes of one image file, or nothing for the payload's images -> [[logit, ...], ...] with these
                     heads changed

Errors are {"error": message}, with status 400 to 415, 500 or 503. Requests with a different host name or from a
different origin are rejected. Request paths never refer to files. Images are kept in memory until the response is sent.

At most `SERVED` connections are read at a time; others wait in order of arrival. A client has `PATIENCE` seconds to
send a request's headers, and may pause for as long while it reads a response; a body may stall for `STALL` seconds.
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
SERVED = 64  # connections; above uvicorn's own `limit_concurrency`, even earlier connections would get status 503
ACCEPTED = 1000  # connections, including waiting ones
PATIENCE = 10.0  # seconds
GRACE = 1.0  # seconds for open connections at shutdown
UPLOADS = 32  # concurrent uploads; others get status 503, so that half of the connections stay free for the page
PLACES = 4  # uploads with a body or response in memory; the others wait
STALL = 3.0  # seconds that a body may stall
SLOWEST = 200_000  # minimum bytes per second of a body
STOP = 2  # seconds for the model to finish at shutdown
PIECE = 1 << 16  # bytes per chunk of a response
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
    payload: bytes | None,
    answer: Callable[[bytes, str, str | None], bytes] | None = None,
    *,
    port: int,
    page: str | None = None,
) -> ASGIApp:
    """Return the ASGI application that serves the page and responds to image uploads.

    Args:
        payload: Payload that the page shows first; None for a page without a model.
        answer: Function that computes a new payload from the bytes and the declared media type of an image file, or
            logits if its third argument is the value of `heads`. The message of a `ValueError` that it raises is shown
            to the user. None disables uploads.
        port: Port of the server; requests whose host or origin has a different port are rejected.
        page: HTML of the page; None for the page in the package.

    Raises:
        FileNotFoundError: If the package contains no page.
    """
    shown = with_server(find_page() if page is None else page, images=answer is not None)

    async def current(_: Request) -> Response:
        if payload is None:
            raise HTTPException(
                404, "no model is loaded. Open an exported file in the page, or run `attnconv explore MODEL`."
            )
        return _pieces(payload)

    routes = [
        Route("/", HTMLResponse(shown), methods=["GET"]),
        Route("/payload", current, methods=["GET"]),
        Route("/image", Images(answer), methods=["POST"]),
    ]
    handlers = dict.fromkeys((HTTPException, *STATUS, Exception), _report)
    # The guard wraps Starlette's middleware, so that error responses are guarded too.
    return Guard(Starlette(routes=routes, exception_handlers=handlers), port)


def listen(port: int) -> socket.socket:
    """Open a listening socket on 127.0.0.1.

    Args:
        port: Port number; 0 selects a free port, whose number is `getsockname()[1]` of the socket.

    Raises:
        ValueError: If the port number is out of range.
        OSError: If the port is not available.
    """
    try:
        return socket.create_server((HOST, whole("port", port, 0, 65_535)), backlog=64)  # early clients wait
    except OSError as error:
        message = bad("port", "must be free", f"{port} ({error.strerror})", "Use a free port, or 0 for any free port.")
        raise OSError(error.errno, message) from error


@final
class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 connection with limits on the number of connections and on a client's time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)  # adds this connection to `connections`, which all connections share
        self.accepted = self._moved = self.loop.time()
        self._served = len(self.connections) <= SERVED
        if len(self.connections) > ACCEPTED:
            transport.abort()
        elif not self._served:
            self.loop.call_soon(self.flow.pause_reading)  # Python 3.10 starts reading only after this method

    def look(self, *, turn: bool) -> None:
        """Start reading from the client if it is its turn, and disconnect a client that is too slow."""
        if turn and not self._served and self.flow.read_paused:
            self._served = True
            self.flow.resume_reading()
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        if self._served and (cycle is None or cycle.response_complete or self.flow.write_paused):
            if self.loop.time() > self._moved + PATIENCE:
                self.transport.abort()
        else:  # the client waits for its turn, or for the application
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
    """uvicorn's server with connection limits, checked ten times a second; waiting connections are served in order."""

    async def on_tick(self, counter: int) -> bool:
        connections: set[Any] = self.server_state.connections
        for place, connection in enumerate(sorted(connections, key=lambda connection: connection.accepted)):
            connection.look(turn=place < SERVED)
        return await super().on_tick(counter)


def server_for(application: ASGIApp) -> uvicorn.Server:
    """Return the HTTP server; `run(sockets=[listen(port)])` serves until interrupted."""
    settings = uvicorn.Config(
        application,
        http=Connection,
        loop="asyncio",
        log_level="critical",  # errors are sent to the client; invalid requests are not worth logging
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
    """Handler of POST /image with bounded memory and time.

    At most `UPLOADS` requests are open; up to `PLACES` are received at a time, and the model processes one at a time.
    """

    def __init__(self, answer: Callable[[bytes, str, str | None], bytes] | None) -> None:
        self._answer = answer
        self._uploads = asyncio.Semaphore(UPLOADS)
        self._places = asyncio.Semaphore(PLACES)
        self._model = asyncio.Lock()  # one image at a time, to limit memory and CPU use

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._answer is None:
            raise HTTPException(400, "image: no model is loaded. Start the server with: attnconv explore MODEL.")
        if self._uploads.locked():
            busy = f"image: the server is busy with {UPLOADS} other uploads. Try again in a few seconds."
            raise HTTPException(503, busy, {"Retry-After": str(round(STALL))})
        async with self._uploads, self._places:
            request = Request(scope, receive)
            heads = request.query_params.get("heads")
            content = await _body(request, required=heads is None)
            async with self._model:
                if await request.is_disconnected():
                    raise ClientDisconnect
                give_back()  # memory of failed requests is only freed when their errors are garbage-collected
                kind = request.headers.get("content-type", "")
                answer = await anyio.to_thread.run_sync(self._answer, content, kind, heads)
            await _pieces(answer)(scope, receive, send)


@final
class Guard:
    """Middleware that rejects requests to other hosts or from other origins, and adds security headers to responses."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._hosts = [f"{name}:{port}" for name in NAMES] + (list(NAMES) if port == 80 else [])
        self._origins = {f"http://{host}" for host in self._hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # other protocols are not supported

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        headers, answer = Headers(scope=scope), self._app
        hosts = [host.lower() for host in headers.getlist("host")]
        foreign = any(origin.lower() not in self._origins for origin in headers.getlist("origin"))
        # Browsers send this header with requests from other sites, even without an origin. Links to `/` are allowed.
        foreign |= scope["path"] != "/" and "cross-site" in headers.getlist("sec-fetch-site")
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            answer = JSONResponse({"error": "host: must be 127.0.0.1 or localhost."}, 400)
        elif foreign:
            answer = JSONResponse({"error": "origin: must be this server's own page."}, 403)
        await answer(scope, receive, guarded)


async def _body(request: Request, *, required: bool) -> bytes:
    """Read a request's body within the limits; a declared length is used only to reject large bodies early."""
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
                # However fast a client is, it may stall for at most `STALL` seconds.
                time.deadline = min(time.deadline + len(part) / SLOWEST, anyio.current_time() + STALL)
    except TimeoutError:
        requirement = f"must arrive at {SLOWEST:,} bytes per second or more"
        raise HTTPException(408, bad("image", requirement, f"less, or nothing for {STALL:.0f} seconds")) from None
    if required and not content:
        raise ValueError(bad("image", "must be the bytes of an image file", "an empty body"))
    return bytes(content)


def _pieces(content: bytes) -> Response:
    """Return a response sent in chunks; sent in one piece, the unread part would be copied by the connection."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(content), PIECE):
            yield content[start : start + PIECE]
            await asyncio.sleep(0)  # otherwise the server would notice only at the end that the client has disconnected

    headers = {"Content-Length": str(len(content))}
    return StreamingResponse(pieces(), media_type="application/octet-stream", headers=headers)


async def _report(_: Request, error: Exception) -> Response:
    """Return an error's message, or only the type of an unexpected error, since its message may contain paths."""
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)
    name = type(error).__name__
    status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 500)
    unexpected = f"the explorer failed on this image ({name}). The server is still running; try a different image."
    return JSONResponse({"error": unexpected if status == 500 else str(error) or name}, status)
