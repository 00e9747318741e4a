"""uvicorn's HTTP, but a connection on which no whole request comes is closed: uvicorn itself waits for ever."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 15.0


class Impatient(H11Protocol):
    """h11 also bounds how long a header may be."""

    header_seconds = HEADER_SECONDS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._quiet_since = self.loop.time()
        self._look_again: asyncio.TimerHandle | None = None
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look_again is not None:
            self._look_again.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        now = self.loop.time()
        if self.cycle is not None and not self.cycle.response_complete:
            self._quiet_since = now  # an answer is under way
        elif now - self._quiet_since > self.header_seconds:
            self.transport.abort()
            return
        self._look_again = self.loop.call_later(self.header_seconds / 5, self._look)
