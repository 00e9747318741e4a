"""The iterations whose samples are generated while the trainers train an earlier one (`ppo.lag`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class OpenIterations(Generic[T]):
    """The open iterations of a job. `make(iteration)` makes the experience of an iteration in the background. `make`
    decides which servers each iteration uses.

    Up to `lag` iterations after the taken one may be open. `last` is the job's last iteration. Which iterations are
    open depends only on which were taken, never on time. When iteration i is taken, all iterations up to i + lag are
    open."""

    def __init__(self, make: Callable[[int], Coroutine[Any, Any, T]], lag: int, last: int) -> None:
        self._make, self._lag, self._last = make, lag, last
        self._tasks: dict[int, asyncio.Task[T]] = {}

    @property
    def numbers(self) -> list[int]:
        """The open iterations that were not taken yet, in ascending order."""
        return sorted(self._tasks)

    def open_through(self, iteration: int) -> None:
        """Open this iteration, and up to `lag` iterations after it."""
        for number in range(iteration, min(iteration + self._lag, self._last) + 1):
            if number not in self._tasks:
                self._tasks[number] = asyncio.create_task(self._make(number))

    async def take(self, iteration: int) -> T:
        """Wait for the iteration's experience and return it. Raises what `make` raised."""
        self.open_through(iteration)
        made = await asyncio.shield(self._tasks[iteration])
        for number in [n for n in self._tasks if n <= iteration]:
            del self._tasks[number]
        return made

    async def close(self) -> None:
        """Cancel all open iterations. What they have stored stays in the store."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
