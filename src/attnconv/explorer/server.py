"""The explorer's server, for this machine alone: the page, one payload, and payloads of one's own images.

    GET  /           the page, marked as served, and whether images are taken
    GET  /payload    the payload; 404 where there is none
    POST /image      the bytes of one picture -> a new payload; 400, 408, 413, 415, 500 or 503 with {"error": message}

It listens on 127.0.0.1. Requests that name another host or come from another origin are refused, so that neither a page
in the same browser nor a name that was pointed here can speak to it. No path of a request reaches a file: three routes
are all there is. Pictures live in memory until the answer is sent; how many, and for how long, is limited by `Images`.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, final

import anyio.to_thread
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attnconv._util.allocator import give_back
from attnconv._util.errors import bad
from attnconv.data.image_decoding import TooLargeError, UnsupportedTypeError
from attnconv.explorer.html_page import find_page, with_server
from attnconv.explorer.uploaded_images import LARGEST_UPLOAD

if TYPE_CHECKING:
    import uvicorn

HOST = "127.0.0.1"
UPLOADS = 32  # at a time; others get 503 at once, so that half of the connections is left for the page
PLACES = 4  # of them hold a body or an answer of any size; the others wait their turn
STALL = 3.0  # seconds that a body may stand still
SLOWEST = 200_000  # bytes a second of a body that does not
STOP = 2  # seconds for the model to come to an end once the server is to stop
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
_BYTES = "application/octet-stream"


def app(
    payload: bytes | None,
    answer: Callable[[bytes, str], bytes] | None = None,
    *,
    port: int,
    page: str | None = None,
) -> ASGIApp:
    """The ASGI application.

    Args:
        payload: What the page shows first; None for a page without a model.
        answer: From a picture's bytes and declared type to a new payload; raises ValueError with words for the visitor.
            None where images cannot be taken.
        port: Where it listens, which is part of the host and the origin that it accepts.
        page: HTML; None for the package's own.

    Raises:
        FileNotFoundError: The package holds no page.
    """
    shown = with_server(find_page() if page is None else page, images=answer is not None)

    async def index(_: Request) -> Response:
        return HTMLResponse(shown)

    async def current(_: Request) -> Response:
        if payload is None:
            return _refusal(404, "no model was named: open or drop a payload, or run `attnconv explore MODEL`.")
        return _pieces(payload)

    routes = [
        Route("/", index, methods=["GET"]),
        Route("/payload", current, methods=["GET"]),
        Route("/image", Images(answer), methods=["POST"]),
    ]
    # Outside of all that Starlette wraps around its routes, so that its own answer to a failure is guarded as well.
    return Guard(Starlette(routes=routes, exception_handlers={Exception: _failed}), port)


def listen(port: int) -> socket.socket:
    """A socket on 127.0.0.1 that nobody else has, before anything is said to be there.

    Args:
        port: 0 for any that is free; `listen(0).getsockname()[1]` says which.

    Raises:
        OSError: The port is taken or not to be had.
    """
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if os.name == "posix":  # elsewhere it would let two programs have one port
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((HOST, port))
        found.listen(64)  # who comes before the server runs waits
    except (OSError, OverflowError) as error:
        found.close()
        reason = error.strerror if isinstance(error, OSError) else "no such port"
        message = bad("--port", "must be free", f"{port} ({reason})", "Name another, or 0 for any.")
        raise OSError(getattr(error, "errno", None), message) from error
    return found


def server_for(application: ASGIApp) -> "uvicorn.Server":
    """The HTTP server, set up to hold little: `run(sockets=[listen(port)])` serves until interrupted."""
    import uvicorn

    from attnconv.explorer.connection_limits import Connection

    settings = uvicorn.Config(
        application,
        http=Connection,
        loop="asyncio",
        log_level="critical",  # what a stranger sends is no news; what fails here is answered in words
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_keep_alive=5,
        timeout_graceful_shutdown=STOP,
        ws="none",
    )
    return uvicorn.Server(settings)


@final
class Images:
    """POST /image, bounded in memory and time.

    Of `UPLOADS` requests at a time, `PLACES` are received, and one of these goes through the model; the others wait. A
    body that stands still for `STALL` seconds, or comes slower than `SLOWEST`, loses its place.

    Args:
        answer: As in `app`.
    """

    def __init__(self, answer: Callable[[bytes, str], bytes] | None) -> None:
        self._answer = answer
        self._uploads = 0
        self._places = asyncio.Semaphore(PLACES)
        self._model = asyncio.Lock()  # memory for one picture, and the cores are the model's

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._uploads >= UPLOADS:
            busy = _refusal(503, f"image: the server is busy with {UPLOADS} others. Send it again in some seconds.")
            busy.headers["Retry-After"] = str(round(STALL))
            return await busy(scope, receive, send)
        self._uploads += 1
        try:
            async with self._places:
                response = await self._response(Request(scope, receive))
                await response(scope, receive, send)
        finally:
            self._uploads -= 1

    async def _response(self, request: Request) -> Response:
        if self._answer is None:
            return _refusal(400, "image: there is no model here to show it to. Name one: attnconv explore MODEL.")
        try:
            content = await _body(request)
            kind = request.headers.get("content-type", "")
            async with self._model:
                if await request.is_disconnected():
                    raise ClientDisconnect
                give_back()  # what failed before is held by its error until it is collected
                return _pieces(await anyio.to_thread.run_sync(self._answer, content, kind))
        except TooLargeError as error:
            return _refusal(413, str(error))
        except UnsupportedTypeError as error:
            return _refusal(415, str(error))
        except TimeoutError:
            requirement = f"must arrive at {SLOWEST:,} bytes a second or more"
            return _refusal(408, bad("image", requirement, f"nothing for {STALL:.0f} seconds, or less"))
        except (ValueError, TypeError, ClientDisconnect) as error:
            return _refusal(400, str(error) or type(error).__name__)


@final
class Guard:
    """Refuses requests to other hosts and from other origins, and adds the security headers to every answer.

    Args:
        app: What it stands before.
        port: Part of the host and origin.
    """

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        bare = NAMES if port == 80 else ()
        self._hosts = frozenset([*(f"{name}:{port}" for name in NAMES), *bare])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no other protocol is spoken here
        headers = [(name.lower(), value.decode("latin-1").lower()) for name, value in scope["headers"]]
        response = self._wrong(headers, entrance=scope["path"] == "/")

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        await (self._app if response is None else response)(scope, receive, guarded)

    def _wrong(self, headers: list[tuple[bytes, str]], *, entrance: bool) -> Response | None:
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return _refusal(400, "host: this server answers to 127.0.0.1 and localhost alone.")
        own = {f"http://{host}" for host in self._hosts}
        if any(name == b"origin" and value not in own for name, value in headers):
            return _refusal(403, "origin: this server answers to its own page alone.")
        # A browser says this of a page of another site even where it sends no origin. A link may lead to the page.
        if not entrance and any(name == b"sec-fetch-site" and value == "cross-site" for name, value in headers):
            return _refusal(403, "origin: this server answers to its own page alone.")
        return None


async def _body(request: Request) -> bytes:
    """All bytes of a request, if they are few enough; a declared length is believed only where it is too much."""
    declared = request.headers.get("content-length", "0")
    requirement = f"must have at most {LARGEST_UPLOAD:,} bytes"
    if not declared.isascii() or not declared.isdigit() or int(declared[:20]) > LARGEST_UPLOAD:
        raise TooLargeError(bad("image", requirement, declared[:40]))
    content = bytearray()
    stream: AsyncIterator[bytes] = request.stream()
    with anyio.fail_after(STALL) as time:
        async for part in stream:
            content += part
            if len(content) > LARGEST_UPLOAD:
                raise TooLargeError(bad("image", requirement, "more"))
            # What arrives faster than it must saves up no more time than `STALL`.
            time.deadline = min(time.deadline + len(part) / SLOWEST, anyio.current_time() + STALL)
    if not content:
        raise ValueError(bad("image", "must be the bytes of a picture", "nothing"))
    return bytes(content)


def _pieces(content: bytes) -> Response:
    """An answer sent piece by piece: written at once, what a slow reader leaves would be copied by its connection."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(content), PIECE):
            yield content[start : start + PIECE]
            await asyncio.sleep(0)  # else it is heard of only at the end that the reader has hung up

    return StreamingResponse(pieces(), media_type=_BYTES, headers={"Content-Length": str(len(content))})


async def _failed(_: Request, error: Exception) -> Response:
    """What no route expected: its kind alone, since its words may hold paths of this machine."""
    return _refusal(500, f"the explorer failed ({type(error).__name__}). It goes on; another picture may do.")


def _refusal(status: int, words: str) -> JSONResponse:
    return JSONResponse({"error": words}, status)
