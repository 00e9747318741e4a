"""Limits the memory of large answers, from their first byte until their readers have them."""

from __future__ import annotations

import asyncio
from collections import Counter

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

CHUNK_BYTES = 1 << 16


class TooMany(Exception):
    """This process is already at its limit. The answer is HTTP 503."""


class AnswerRoom:
    """The memory for large answers. All that are in progress have at most `most` bytes. Those to one user have at most
    `each` bytes, so that nobody takes all."""

    def __init__(self, most: int, each: int) -> None:
        self._most, self._each = most, each
        self._users: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """The bytes of all answers in progress."""
        return self._users.total()

    def share(self, user: str) -> AnswerShare:
        """Room for one answer. Its size is still 0."""
        return AnswerShare(self, user)

    def take(self, user: str, size: int) -> None:
        """Reserve bytes. Raises TooMany."""
        if self._users[user] + size > self._each:
            raise TooMany("too many large answers to you are under way; wait for them, then ask again")
        if self.taken + size > self._most:
            raise TooMany("too many large answers to others are under way; try again in a few seconds")
        self._users[user] += size

    def leave(self, user: str, size: int) -> None:
        self._users[user] -= size
        if self._users[user] <= 0:
            del self._users[user]


class AnswerShare:
    """The memory of one answer."""

    def __init__(self, room: AnswerRoom, user: str) -> None:
        self._room, self._user, self._size = room, user, 0

    def take(self, size: int) -> None:
        """Reserve bytes that have come. Raises TooMany."""
        self._room.take(self._user, size)
        self._size += size

    def settle(self, size: int) -> None:
        """Give back what was reserved above `size`."""
        if size < self._size:
            self._room.leave(self._user, self._size - size)
            self._size = size

    def leave(self) -> None:
        """Give back all of the answer's memory."""
        self.settle(0)


class LargeResponse(Response):
    """An answer that is sent piece by piece. All of it is in memory only while its reader takes it. A reader that takes
    more than `seconds` is cut off."""

    def __init__(
        self,
        content: bytes,
        share: AnswerShare,
        seconds: float,
        media_type: str,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(content, media_type=media_type, headers=headers)
        self._share, self._seconds = share, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                for start in range(0, max(1, len(self.body)), CHUNK_BYTES):
                    end = start + CHUNK_BYTES
                    more = end < len(self.body)
                    await send({"type": "http.response.body", "body": self.body[start:end], "more_body": more})
        except TimeoutError:
            pass  # the server closes the connection, because the answer is incomplete
        finally:
            self._share.leave()
