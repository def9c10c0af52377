"""uvicorn's HTTP/1.1 protocol with limits on the number of connections and on the time that a client may take.

At most `SERVED` connections are read at a time, and later ones wait in their order. A client has `PATIENCE` seconds for
the head of a request and to read an answer. Bodies are limited by the application.
"""

import asyncio
from typing import Any, final

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

SERVED = 64  # connections; with uvicorn's `limit_concurrency`, all of them would get 503 once there are more
ACCEPTED = 1000  # connections, with those that wait
PATIENCE = 10.0  # seconds
GRACE = 1.0  # seconds for everything once the server is to stop


@final
class Connection(H11Protocol):
    """One connection, for `uvicorn.Config(http=Connection)`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._served = False
        self._accepted = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)  # adds this one to `connections`, the set that all of a server share
        if len(self.connections) > ACCEPTED:
            transport.abort()
        elif len(self.connections) > SERVED:
            self.loop.call_soon(self._pause)  # Python 3.10 starts to read only after this method
        else:
            self._serve()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()
        others = [other for other in self.connections if isinstance(other, Connection)]
        waiting = [other for other in others if not other._served and not other.transport.is_closing()]
        if self._served and waiting:
            min(waiting, key=lambda other: other._accepted)._serve()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:  # the head of a request is complete
            self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    def shutdown(self) -> None:
        super().shutdown()
        self.loop.call_later(GRACE, self.transport.abort)

    def _pause(self) -> None:
        if not self._served:
            self.flow.pause_reading()

    def _serve(self) -> None:
        self._served = True
        self.flow.resume_reading()
        self._watch()

    def _watch(self) -> None:
        """Restart the client's time, or stop it while the application is at work."""
        self._stop()
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        if cycle is None or cycle.response_complete or self.flow.write_paused:
            self._timer = self.loop.call_later(PATIENCE, self.transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
