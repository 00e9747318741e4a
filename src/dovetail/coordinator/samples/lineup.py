"""Keeps the open iterations and the servers of each. It carries out the decisions of the allotment.

Without a lag one iteration at a time is open, and all servers draw it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from dovetail.coordinator.samples.allotment import Allotment, Left
from dovetail.coordinator.workers.fleet import Fleet, Instance
from dovetail.coordinator.workers.weights import Weights
from dovetail.protocol.process.endings import cancel

KIND = "rollout"
T = TypeVar("T")


class Drawn(Protocol):
    """The parts of `Drawing` that are used here."""

    def remaining(self) -> tuple[int, Mapping[str, int]]:
        """The number of samples that wait for a server, and the number on each server."""

    def on(self, name: str) -> bool:
        """Whether a server has any of its samples."""


class Turn:
    """One open iteration, or one evaluation. `version` is the version of the weights that draw and score it. `total` is
    its number of samples, of which `unfinished` are still to be drawn."""

    def __init__(self, lineup: Lineup, iteration: int, version: int, total: int, unfinished: int) -> None:
        self._lineup = lineup
        self.iteration, self.version, self.total = iteration, version, total
        self._given, self._is_first = asyncio.Event(), asyncio.Event()
        self._unfinished = unfinished
        self._drawing: Drawn | None = None

    def draws(self, drawing: Drawn) -> None:
        """Record that from now on `drawing` knows how many samples are left."""
        self._drawing, self._unfinished = drawing, 0

    @property
    def left(self) -> Left:
        waiting, on = (0, {}) if self._drawing is None else self._drawing.remaining()
        return Left(self.iteration, self.version, self.total, waiting + self._unfinished, on)

    def on(self, name: str) -> bool:
        """Whether a server has samples of this iteration."""
        return self._drawing is not None and self._drawing.on(name)

    @property
    def alone(self) -> bool:
        """Whether no other iteration is ever open with this one, and the trainers wait for it."""
        return not self._lineup.lag

    @property
    def lane(self) -> str:
        """The timeline's lane. There are as many lanes as iterations may be open."""
        return "phases" if self.alone else f"samples {1 + (self.iteration - 1) % (self._lineup.lag + 1)}"

    @property
    def first(self) -> bool:
        """Whether no older iteration is open. Only the oldest open iteration is scored, and only it may fail because it
        has no server."""
        return self._lineup.first is self

    async def wait_server(self) -> None:
        """Wait until this iteration has a server or is the oldest open one."""
        await self._given.wait()

    async def wait_first(self) -> None:
        """Wait until no older iteration is open."""
        await self._is_first.wait()

    def give(self, first: bool = False) -> None:
        """Record that this iteration has a server. `first` says that it is now the oldest open one."""
        self._given.set()
        if first:
            self._is_first.set()

    def settle(self) -> None:
        """Decide again which servers draw which iteration."""
        self._lineup.settle()

    def missing(self) -> list[str]:
        """The kinds of instances that must load this iteration's weights before it can begin."""
        self.settle()
        return [] if any(self.has(i) for i in self._lineup.eligible()) else [KIND]

    def has(self, instance: Instance) -> bool:
        """Whether an instance may get samples of this iteration now. It must be allotted to this iteration, hold its
        weights, and have no samples of another iteration left."""
        return (
            self._lineup.of(instance.name) == self.iteration
            and instance.weight_version == self.version
            and not self._lineup.busy_elsewhere(instance.name, self)
        )

    def lost(self, name: str) -> str | None:
        """The reason why the samples of this iteration leave a server, which is that another iteration has it now. None
        if they stay."""
        number = self._lineup.of(name)
        if number is None or number == self.iteration:
            return None
        return "tail" if number > self.iteration else "older"


class Lineup:
    """The open iterations of a job. `lag` iterations may be open after the oldest one. It tells `fleet` which weights
    each server must hold. The version of the oldest one is the current version of `weights`. Scorers take that version,
    and so do servers that no iteration can use yet."""

    def __init__(
        self, fleet: Fleet, weights: Weights, allotment: Allotment, lag: int, log: Callable[..., None]
    ) -> None:
        self._fleet, self._weights, self._log = fleet, weights, log
        self._allotment = allotment
        self.lag = lag
        self._turns: dict[int, Turn] = {}
        self._told: dict[str, int] = {}

    @contextmanager
    def open(self, iteration: int, version: int, total: int, unfinished: int) -> Iterator[Turn]:
        """Open an iteration. It stays open until this context ends. Until then its samples are drawn and scored. Of its
        `total` samples, `unfinished` are to be drawn."""
        turn = self._turns[iteration] = Turn(self, iteration, version, total, unfinished)
        self._oldest_changed()
        try:
            yield turn
        finally:
            del self._turns[iteration]
            self._oldest_changed()
            self.settle()

    @property
    def first(self) -> Turn | None:
        """The oldest open iteration. None if none is open."""
        return self._turns[min(self._turns)] if self._turns else None

    def eligible(self) -> list[Instance]:
        """The servers that hold the weights that they must hold."""
        return self._fleet.eligible(KIND)

    def of(self, name: str) -> int | None:
        """The iteration that a server draws, or will draw once it has the weights. None if it has no iteration."""
        return self._allotment.of(name)

    def busy_elsewhere(self, name: str, turn: Turn) -> bool:
        """Whether a server still has samples of an iteration other than `turn`."""
        return any(other.on(name) for other in self._turns.values() if other is not turn)

    def settle(self) -> None:
        """Decide which servers draw which iteration, and tell the fleet. A server keeps its weights until it has no
        samples left that they draw."""
        lefts = [turn.left for turn in self._turns.values()]
        usable = self._fleet.usable(KIND)
        self._allotment.settle(lefts, {i.name: i.weight_version for i in usable}, {i.name for i in usable if i.refused})
        # With a lag, a server that no iteration needs keeps its weights, because the next iterations may need newer
        # ones. One that refused a transfer must first show that it can take weights again.
        keep = [i for i in usable if self.lag and not i.refused]
        wanted = {i.name: i.weight_version for i in keep if i.weight_version is not None}
        for name in (i.name for i in usable):
            if (number := self._allotment.of(name)) is not None:
                turn = self._turns[number]
                wanted[name] = turn.version
                turn.give()
                if self._told.get(name) != number:
                    self._told[name] = number
                    self._log("server.allotted", instance=name, iteration=number, version=turn.version)
        for left in lefts:
            wanted |= dict.fromkeys(left.on, left.version)
        self._fleet.want(wanted)

    def _oldest_changed(self) -> None:
        if (first := self.first) is not None:
            self._fleet.publish(first.version)
            self._weights.begin(first.version)
            first.give(first=True)


class OpenIterations(Generic[T]):
    """The open iterations of a job. `make(iteration)` makes the experience of an iteration in the background. `make`
    decides which servers each iteration uses.

    Up to `lag` iterations after the taken one may be open. `last` is the job's last iteration. Which iterations are
    open depends only on which were taken, never on time. When iteration i is taken, all iterations up to i + lag are
    open."""

    def __init__(self, make: Callable[..., Coroutine[Any, Any, T]], lag: int, last: int) -> None:
        self._make, self._lag, self._last = make, lag, last
        self._tasks: dict[int, asyncio.Task[T]] = {}

    @property
    def numbers(self) -> list[int]:
        """The open iterations that were not taken yet, in ascending order."""
        return sorted(self._tasks)

    @property
    def waiting(self) -> list[T]:
        """What is made and was not taken yet."""
        done = (task for task in self._tasks.values() if task.done() and not task.cancelled())
        return [task.result() for task in done if task.exception() is None]

    def open_through(self, iteration: int, *given: object) -> None:
        """Open this iteration, and up to `lag` iterations after it. `make` gets what is `given`."""
        for number in range(iteration, max(iteration, min(iteration + self._lag, self._last)) + 1):
            if number not in self._tasks:
                self._tasks[number] = asyncio.create_task(self._make(number, *given))

    async def take(self, iteration: int) -> T:
        """Wait for the iteration's experience and return it. Raises what `make` raised. It is then made anew the next
        time."""
        self.open_through(iteration)
        try:
            return await self._tasks[iteration]
        finally:
            self._tasks.pop(iteration, None)

    async def close(self) -> None:
        """Cancel all open iterations. What they have stored stays in the store."""
        tasks, self._tasks = list(self._tasks.values()), {}
        await cancel(tasks)
