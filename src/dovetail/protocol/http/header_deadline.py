"""How long HTTP servers wait for a request's header, and how long servers and clients keep connections. It also gives
uvicorn the first limit, which it lacks."""

from __future__ import annotations

import asyncio
from typing import Any

# Peers are programs on the same network that send a request at once.
HEADER_SECONDS = 15.0
# A server that closes a connection that its client still uses breaks the client's next request. So clients keep
# connections for less time than any server, even one with uvicorn's default of 5 s. Servers of ours keep them much
# longer, because a slow machine closes its own ends late.
CLIENT_KEEP_SECONDS = 3.0
SERVER_KEEP_SECONDS = 75


class HeaderDeadline(asyncio.Protocol):
    """A mix-in before one of uvicorn's HTTP protocols: `class Http(HeaderDeadline, H11Protocol)`, then
    `uvicorn.Config(http=Http)`. It closes a connection that is open for `header_seconds` and brings no complete header
    of a request. It also closes one that still sends the rest of a request that has been answered. A connection that
    waits for its next request has uvicorn's own limit (`timeout_keep_alive`)."""

    header_seconds = HEADER_SECONDS
    # uvicorn's classes have these attributes.
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    cycle: Any
    timeout_keep_alive_task: asyncio.TimerHandle | None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waits_since = self.loop.time()
        self._next_look: asyncio.TimerHandle | None = None
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        if self.transport.get_protocol() is not self:
            return  # it has become a WebSocket
        now = self.loop.time()
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or self.timeout_keep_alive_task is not None:
            self._waits_since = now
        elif now - self._waits_since > self.header_seconds:
            self.transport.abort()
            return
        self._next_look = self.loop.call_later(self.header_seconds / 5, self._look)
