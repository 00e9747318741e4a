"""Processes in which a user's environments live. A process has many episodes, and makes one call at a time. When it
dies, its episodes go on in another one, where their calls are made again, if calls may be made again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from dovetail.coordinator.data.text.chat_template import Message
from dovetail.coordinator.sessions import environment_worker
from dovetail.coordinator.sessions.bridge import Tools
from dovetail.coordinator.sessions.effects import EpisodeLost, Failed, MayBeMade, ToolCall
from dovetail.coordinator.user_code.user_process import START_SECONDS, Gone, NoPlace, ProcessPlace, UserProcess

FIELD = "spec.sessions.environment.function"
_T = TypeVar("_T")


@dataclass(frozen=True)
class EnvironmentCode:
    """A Python class that a manifest names: `name` is module:Class, looked for in `folder`. Up to `workers` processes
    at `place` have its objects. A call must end within `seconds`. If calls are `repeatable`, they are made again where
    a process died."""

    name: str
    folder: Path
    workers: int
    seconds: float
    repeatable: bool
    place: ProcessPlace


@dataclass(eq=False)
class _Worker:
    """A process and the episodes in it. Whoever asks it holds `turn`. `died` says how, as a verb phrase. A process that
    is `worn` gets no other episode: a call failed, and perhaps because of what it has left there."""

    process: UserProcess
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    episodes: set[int] = field(default_factory=set)
    worn: bool = False
    died: str = ""


class _Died(Exception):
    """The worker died. The message says how, as a verb phrase."""


class _DiedBefore(_Died):
    """It was dead before it was asked."""


# Gets the class's name, file and digest.
Read = Callable[[str, str, str], None]


def unread(name: str, file: str, digest: str) -> None:
    """Nobody is told."""


class EnvironmentWorkers:
    """The environments of a job. Processes are started when they are needed. `read` is called whenever one has imported
    the class."""

    def __init__(self, code: EnvironmentCode, read: Read = unread) -> None:
        self.code = code
        self._tools: Tools | None = None
        self._read = read
        self._workers: list[_Worker] = []
        self._starting = asyncio.Lock()
        self._numbers = count()

    @property
    def tools(self) -> Tools:
        """The tools, as in OpenAI's API. They are known once it is open."""
        assert self._tools is not None
        return self._tools

    async def open(self) -> None:
        """Import the class in a first process. It may be called again. Raises ValueError with one sentence."""
        if self._tools is not None:
            return
        await self.code.place.open("environment")
        try:
            worker = await self._place()
            reply = await worker.process.ask({"tools": True, "seconds": START_SECONDS}, START_SECONDS)
        except (_Died, Failed) as error:
            raise ValueError(str(error)) from error
        except TimeoutError:
            what = f"did not describe the tools of {self.code.name} within {START_SECONDS:.0f} s"
            raise ValueError(f"{FIELD}: its process {what}") from None
        except Gone:
            raise ValueError(f"{FIELD}: its process ended before it described the tools of {self.code.name}") from None
        finally:
            # What describes tools takes half a gigabyte. Processes that make calls don't import it.
            await self._end_all()
        if "refused" in reply:
            raise ValueError(f"{FIELD}: {reply['refused']}")
        self._tools = reply["tools"]

    async def begin(self, episode: str, asked: Sequence[Message], fields: Mapping[str, Any]) -> WorkerEpisode:
        """An episode whose `reset` gets the fields, and what is `asked` as "prompt". Raises Failed."""
        begun = WorkerEpisode(self, {"prompt": list(asked), **fields})
        await begun.begin()
        return begun

    async def close(self) -> None:
        """End all processes."""
        await self._end_all()
        await self.code.place.close()

    async def _end_all(self) -> None:
        for worker in self._workers:
            worker.died = worker.died or "was ended"
            await worker.process.end()
        self._workers.clear()

    async def place(self, request: Mapping[str, Any]) -> tuple[_Worker, int, str]:
        """Begin an episode where there are the fewest. Returns its process, its number there, and what the model is
        told. Raises Failed and _Died."""
        worker, number = await self._place(), next(self._numbers)
        worker.episodes.add(number)
        try:
            told = await self.ask(worker, {"begin": number, **request}, "told", str)
        except BaseException:
            await self.leave(worker, number)
            raise
        return worker, number, told

    async def leave(self, worker: _Worker, number: int) -> None:
        """An episode is no longer there."""
        worker.episodes.discard(number)
        if worker.worn and not worker.episodes and not worker.died:
            worker.died = "was ended"
            await worker.process.end()

    async def ask(self, worker: _Worker, request: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
        """The value of `key` in the answer, which is of this kind. Raises Failed, and _Died if the process cannot
        answer."""
        seconds = self.code.seconds
        async with worker.turn:
            if worker.died:
                raise _DiedBefore(worker.died)
            try:
                reply = await worker.process.ask({**request, "seconds": seconds}, seconds)
            except TimeoutError:
                text = f"gave no answer within {seconds:g} s (spec.sessions.environment.timeoutSeconds)"
                await self._bury(worker, text, await worker.process.stack())
            except Gone:
                await self._bury(worker, *await worker.process.how_it_ended())
            except BaseException:
                # Its answer would be taken for that to the next request.
                worker.died = "was interrupted"
                await worker.process.end()
                raise
            if "failed" in reply:
                worker.worn = True
                raise Failed(str(reply["failed"]))
            if not isinstance(reply.get(key), kind):
                await self._bury(worker, "wrote something to its worker process's pipe", [])
            found: _T = reply[key]
            return found

    async def _place(self) -> _Worker:
        """The process with the fewest episodes. It is started if all have some, and there may be more. Raises _Died and
        Failed."""
        async with self._starting:
            living = [worker for worker in self._workers if not worker.died and not worker.worn]
            least = min(living, key=lambda worker: len(worker.episodes), default=None)
            if least is None or (least.episodes and len(living) < self.code.workers):
                least = await self._start()
            self._workers = [worker for worker in self._workers if not worker.died]
            return least

    async def _start(self) -> _Worker:
        code = self.code
        try:
            worker = _Worker(await code.place.start(environment_worker.__name__))
        except NoPlace as error:
            raise Failed(str(error)) from error
        self._workers.append(worker)
        order = {"name": code.name, "field": FIELD, "folder": str(code.folder), **worker.process.limits}
        try:
            reply = await worker.process.ask(order, START_SECONDS)
        except TimeoutError:
            text = f"{FIELD}: importing {code.name} took longer than {START_SECONDS:.0f} s"
            await self._bury(worker, text, await worker.process.stack())
        except Gone:
            how, frames = await worker.process.how_it_ended()
            await self._bury(worker, f"{FIELD}: importing {code.name} {how}", frames)
        except BaseException:
            worker.died = "was interrupted"
            await worker.process.end()
            raise
        if "refused" in reply:
            worker.died = str(reply["refused"])
            await worker.process.end()
            raise Failed(worker.died)
        ready = reply["ready"]
        if ready["digest"] is not None:
            self._read(code.name, ready["file"], ready["digest"])
        return worker

    async def _bury(self, worker: _Worker, how: str, frames: Sequence[str]) -> NoReturn:
        worker.died = how + (f"; last frames: {', '.join(frames)}" if frames else "")
        await worker.process.end()
        raise _Died(worker.died)


class WorkerEpisode:
    """An environment in an episode that lives in a worker process (`BegunEnvironment`). `observation` is what the
    episode begins with."""

    def __init__(self, workers: EnvironmentWorkers, record: Mapping[str, Any]) -> None:
        self.observation = ""
        self._workers, self._record = workers, record
        self._made: list[tuple[ToolCall, str]] = []
        self._worker: _Worker | None = None
        self._number = -1

    async def begin(self) -> None:
        """Make the object. Raises Failed."""
        self._worker, self._number, self.observation = await self._alive("reset", self._place)

    async def make(self, call: ToolCall) -> str:
        """Make the call. If the process dies, the episode's calls are made again in another one, if they may be. A call
        that ends its process twice is a failure. Raises Failed and EpisodeLost."""
        told = await self._ask({"name": call.name, "arguments": dict(call.arguments)}, "call", "told", str)
        self._made.append((call, told))
        return told

    async def recall(self, call: ToolCall) -> str:
        """Raises MayBeMade: the process in which the call was made is gone."""
        raise MayBeMade

    async def restore(self, call: ToolCall, observation: str) -> None:
        """Make the call of an earlier coordinator again. Raises Failed if it is answered otherwise, and EpisodeLost if
        it must not be made twice."""
        if not self._workers.code.repeatable:
            raise EpisodeLost(self._lost("ended with the coordinator"))
        _same(call.name, observation, await self.make(call))

    async def reward(self) -> float | None:
        """What the episode earned. None if the class has no get_reward. Raises Failed and EpisodeLost."""
        (found,) = await self._ask({}, "reward", "reward", list)
        return None if found is None else float(found)

    async def end(self) -> None:
        """Drop the object."""
        worker = self._worker
        if worker is None or worker.died:
            return
        with suppress(_Died):
            await self._workers.ask(worker, {"end": self._number}, "ended", int)
        await self._workers.leave(worker, self._number)

    async def _ask(self, request: Mapping[str, Any], verb: str, key: str, kind: type[_T]) -> _T:
        async def ask() -> _T:
            worker = await self._living()
            return await self._workers.ask(worker, {verb: self._number, **request}, key, kind)

        return await self._alive(request.get("name", "get_reward"), ask)

    async def _alive(self, what: str, ask: Callable[[], Awaitable[_T]]) -> _T:
        """What `ask` returns. If it ends the process and may be made again, it is tried once more. If the process had
        died before, it is not counted. Raises Failed and EpisodeLost."""
        code, tries = self._workers.code, 0
        while True:
            try:
                return await ask()
            except _DiedBefore as error:
                if not code.repeatable and what != "reset":
                    raise EpisodeLost(self._lost(str(error))) from error
            except _Died as error:
                tries += 1
                if not code.repeatable or tries == 2:
                    often = ", twice" if tries == 2 else ""
                    raise Failed(f"{code.name}.{what} {error}{often}") from error

    async def _place(self) -> tuple[_Worker, int, str]:
        return await self._workers.place({"record": dict(self._record)})

    async def _living(self) -> _Worker:
        """The process with the object. If it died, the object is made again. Raises Failed, _Died and EpisodeLost."""
        assert self._worker is not None
        if not self._worker.died:
            return self._worker
        if not self._workers.code.repeatable:
            raise EpisodeLost(self._lost(self._worker.died))
        worker, number, told = await self._place()
        self._worker, self._number = worker, number
        _same("reset", self.observation, told)
        for call, observation in self._made:
            request = {"call": number, "name": call.name, "arguments": dict(call.arguments)}
            _same(call.name, observation, await self._workers.ask(worker, request, "told", str))
        return worker

    def _lost(self, how: str) -> str:
        return (
            f"the process of {self._workers.code.name} {how}, and the episode's calls must not be made twice "
            "(effects: AtMostOnce)"
        )


def _same(what: str, before: str, now: str) -> None:
    """Raises Failed if a call that was made again is answered otherwise."""
    if before != now:
        raise Failed(
            f"{what} was made again after a death and answered {now[:80]!r} in place of {before[:80]!r}; let it depend "
            "on the record and the calls only, or set effects: AtMostOnce"
        )
