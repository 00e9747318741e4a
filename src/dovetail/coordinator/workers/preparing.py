"""Makes instances ready for work or weights, several at a time. Scorers load their models, and sleeping rollouts wake
up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from dovetail.protocol.errors import error_text
from dovetail.protocol.process.endings import cancel


class OneProcess(Protocol):
    """A process of an instance."""

    @property
    def name(self) -> str: ...
    @property
    def incarnation(self) -> str: ...


T = TypeVar("T", bound=OneProcess)


class Preparing(Generic[T]):
    """The processes that are made ready now. `prepare` makes one process ready. It may raise OSError or TimeoutError,
    and has a deadline of its own. It is quick for a process that is ready."""

    def __init__(self, prepare: Callable[[T], Awaitable[None]]) -> None:
        self._prepare = prepare
        self._tasks: dict[tuple[str, str], asyncio.Task[str | None]] = {}

    @property
    def active(self) -> bool:
        """Whether any process is being made ready."""
        return any(not task.done() for task in self._tasks.values())

    def running(self, target: T) -> bool:
        """Whether this process is being made ready."""
        task = self._tasks.get((target.name, target.incarnation))
        return task is not None and not task.done()

    async def ready(self, targets: Sequence[T], seconds: float) -> tuple[list[T], list[tuple[T, str]]]:
        """Make these processes ready. Returns those that are ready after at most `seconds`, and those that failed, each
        with its error. The others go on. Call this again for each of them when its `running` is false."""
        mine: list[tuple[T, asyncio.Task[str | None]]] = []
        for target in targets:
            task = self._tasks.get((target.name, target.incarnation))
            # One that was ready some time ago may have gone to sleep since.
            if task is None or (task.done() and task.result() is None):
                task = asyncio.create_task(self._one(target))
                self._tasks[target.name, target.incarnation] = task
            mine.append((target, task))
        if mine:
            await asyncio.wait([task for _, task in mine], timeout=seconds)
        outcomes = [(target, task.result()) for target, task in mine if task.done()]
        told = {task for _, task in mine}
        self._tasks = {
            process: task
            for process, task in self._tasks.items()
            if not task.done() or (task not in told and task.result() is not None)
        }
        failed = [(target, problem) for target, problem in outcomes if problem is not None]
        return [target for target, problem in outcomes if problem is None], failed

    async def close(self) -> None:
        """Cancel all preparations."""
        await cancel(self._tasks.values())

    async def _one(self, target: T) -> str | None:
        try:
            await self._prepare(target)
        except (OSError, TimeoutError) as error:
            return error_text(error)
        return None
