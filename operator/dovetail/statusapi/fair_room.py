"""Shares what a replica has little of among tenants: streams, and memory for large answers from their first byte until
their readers have them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

CHUNK_BYTES = 1 << 16


class TooMany(Exception):
    """This process is already at its limit. The answer is HTTP 503."""


class FairRoom:
    """Room for `most` units. `what` names them all in sentences, such as "8 streams". A tenant (`User.tenant`) may take
    all of them while nobody else asks. If they are all taken, whoever asks gets those that another tenant took last,
    unless this tenant would have more than the other one."""

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what = most, what
        self._shares: list[FairShare] = []  # with units, in the order in which they got the first ones

    def held(self) -> Counter[str]:
        """The units of each tenant."""
        held = Counter[str]()
        for share in self._shares:
            held[share.tenant] += share.size
        return held

    def share(self, tenant: str) -> FairShare:
        """A share without units."""
        return FairShare(self, tenant)

    def give(self, share: FairShare, size: int) -> None:
        """Give units to a share, and end others for that. Raises TooMany, and then ends none."""
        held, left, ending = self.held(), list(self._shares), []
        while held.total() + size > self._most:
            last = max(reversed(left), key=lambda each: held[each.tenant], default=share)
            if held[last.tenant] <= held[share.tenant] + size:
                raise TooMany(f"all {self._what} are in use, and {share.tenant} would have most; try again later")
            left.remove(last)
            ending.append(last)
            held[last.tenant] -= last.size
        for each in ending:
            each.end()
        if share not in self._shares:
            self._shares.append(share)
        share.size += size

    def forget(self, share: FairShare) -> None:
        if share in self._shares:
            self._shares.remove(share)


class FairShare:
    """The units of one stream or answer: `size` of them."""

    def __init__(self, room: FairRoom, tenant: str) -> None:
        self._room, self.tenant, self.size = room, tenant, 0
        self._ended = False
        self._limit: asyncio.Timeout | None = None

    def take(self, size: int) -> None:
        """Take more units. Raises TooMany, also if the share has ended for others."""
        self._check()
        self._room.give(self, size)

    def _check(self) -> None:
        if self._ended:
            raise TooMany(f"others ask for room, and {self.tenant} has most; try again later")

    def settle(self, size: int) -> None:
        """Give back the units above `size`."""
        self.size = min(self.size, size)
        if not self.size:
            self._room.forget(self)

    def leave(self) -> None:
        """Give back all units."""
        self.settle(0)

    def end(self) -> None:
        """Give back all units, because others ask for them. What holds the share ends."""
        self._ended = True
        self.leave()
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def hold(self, seconds: float | None = None) -> AsyncIterator[None]:
        """The block that uses the units. Raises TimeoutError after `seconds`, and TooMany as soon as the share has
        ended for others."""
        try:
            async with asyncio.timeout(seconds) as self._limit:
                self._check()
                yield
        except TimeoutError:
            self._check()
            raise
        finally:
            self._limit = None


class LargeResponse(Response):
    """An answer that is sent piece by piece. All of it is in memory only while its reader takes it. A reader that takes
    more than `seconds` is cut off."""

    def __init__(
        self,
        content: bytes,
        share: FairShare,
        seconds: float,
        media_type: str,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(content, media_type=media_type, headers=headers)
        self._share, self._seconds = share, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._share.hold(self._seconds):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                for start in range(0, max(1, len(self.body)), CHUNK_BYTES):
                    end = start + CHUNK_BYTES
                    more = end < len(self.body)
                    await send({"type": "http.response.body", "body": self.body[start:end], "more_body": more})
        except (TimeoutError, TooMany):
            pass  # the server closes the connection, because the answer is incomplete
        finally:
            self._share.leave()


class EventResponse(StreamingResponse):
    """Server-sent events, for as long as the share is held."""

    def __init__(self, events: AsyncIterator[str], share: FairShare) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._share = share

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._share.hold():
                await super().__call__(scope, receive, send)
        except TooMany:
            pass  # the server closes the connection, and the reader may go on later with Last-Event-ID
        finally:
            self._share.leave()
