"""The iterations whose samples are being made while the trainers learn from an earlier one (`ppo.lag`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class OpenIterations(Generic[T]):
    """`make(iteration)` makes an iteration's experience, in the background. Which iteration gets which servers is for
    `make` to say.

    `lag`: how many iterations after the one that is taken may be open. `last`: the job's last iteration. Which
    iterations are open depends on what was taken only, never on time: when iteration i is taken, all up to i + lag are
    open."""

    def __init__(self, make: Callable[[int], Coroutine[Any, Any, T]], lag: int, last: int) -> None:
        self._make, self._lag, self._last = make, lag, last
        self._tasks: dict[int, asyncio.Task[T]] = {}

    @property
    def numbers(self) -> list[int]:
        """The open iterations that are not taken yet."""
        return sorted(self._tasks)

    def open_through(self, iteration: int) -> None:
        """Open the iteration and those up to `lag` after it."""
        for number in range(iteration, min(iteration + self._lag, self._last) + 1):
            if number not in self._tasks:
                self._tasks[number] = asyncio.create_task(self._make(number))

    async def take(self, iteration: int) -> T:
        """The iteration's experience, once it is made. Raises what `make` raised."""
        self.open_through(iteration)
        made = await asyncio.shield(self._tasks[iteration])
        for number in [n for n in self._tasks if n <= iteration]:
            del self._tasks[number]
        return made

    async def close(self) -> None:
        """End all that is being made. What is stored of it stays."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
