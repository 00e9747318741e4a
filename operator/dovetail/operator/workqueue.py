"""A queue of keys. Each key is in it at most once, and only one worker at a time has it."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")

FIRST_BACKOFF_SECONDS = 0.5
LONGEST_BACKOFF_SECONDS = 60.0


class WorkQueue(Generic[K]):
    """The queue. Use it from one event loop. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0
        self._busy: set[K] = set()
        self._failures: dict[K, int] = {}
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        """The number of keys that wait, including those for later."""
        return len(self._due)

    def lag(self) -> float:
        """The seconds by which the most overdue key is late. Keys that a worker has do not count."""
        now = self._clock()
        late = [now - due for key, due in self._due.items() if key not in self._busy]
        return max(late, default=0.0)

    async def add(self, key: K, delay: float = 0.0) -> None:
        """Let a worker process `key` in `delay` seconds, or sooner if that was asked for before."""
        due = self._clock() + delay
        async with self._changed:
            if key not in self._due or due < self._due[key]:
                self._due[key] = due
                self._count += 1
                heapq.heappush(self._heap, (due, self._count, key))
                self._changed.notify()

    async def get(self) -> K:
        """The next key that is due. `done` or `failed` must follow."""
        async with self._changed:
            while True:
                key, wait = self._next()
                if key is not None:
                    self._busy.add(key)
                    return key
                try:
                    async with asyncio.timeout(wait):
                        await self._changed.wait()
                except TimeoutError:
                    pass

    async def done(self, key: K, again: float | None = None) -> None:
        """Record that the work on a key succeeded. The key comes back in `again` seconds, if that is given."""
        self._failures.pop(key, None)
        await self._release(key)
        if again is not None:
            await self.add(key, again)

    async def failed(self, key: K) -> float:
        """Record that the work on a key failed. The key comes back after a pause, which doubles with each failure in a
        row. Returns the pause in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        pause = min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(failures, 16))
        await self._release(key)
        await self.add(key, pause)
        return pause

    async def _release(self, key: K) -> None:
        async with self._changed:
            self._busy.discard(key)
            if key in self._due:  # asked for meanwhile
                self._count += 1
                heapq.heappush(self._heap, (self._due[key], self._count, key))
            self._changed.notify()

    def _next(self) -> tuple[K | None, float | None]:
        """A key that is due and that no worker has, or else the seconds to wait."""
        now = self._clock()
        while self._heap:
            due, _, key = self._heap[0]
            if self._due.get(key) != due or key in self._busy:
                heapq.heappop(self._heap)  # asked for sooner, or put back by `_release`
                continue
            if due > now:
                return None, due - now
            heapq.heappop(self._heap)
            del self._due[key]
            return key, None
        return None, None
