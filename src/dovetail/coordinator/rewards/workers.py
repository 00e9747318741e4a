"""Worker processes that call the manifest's reward functions. Each process runs one call at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from dovetail.coordinator.rewards import worker as worker_module
from dovetail.coordinator.rewards.calls import Call, CallFailed, Function, RewardAnswer, RewardError
from dovetail.coordinator.user_code.local_process import LocalProcesses
from dovetail.coordinator.user_code.user_process import START_SECONDS, Gone, UserProcess
from dovetail.manifest.types import RewardModel


class Workers:
    """Up to `reward.workers` processes. Each is started when it is first needed. A process that fails is replaced.
    Functions are imported from `reward.import_path`, or else from `folder`, before PYTHONPATH. `fields` has the
    manifest field that names each function, for messages. The default is spec.models.reward. `read` is called with a
    function's name, file and digest, whenever a process has imported it."""

    def __init__(
        self,
        reward: RewardModel,
        folder: Path,
        fields: Sequence[str] = (),
        read: Callable[[str, str, str], None] | None = None,
    ) -> None:
        self._reward = reward
        self._read = read
        single = reward.functions is None
        field = "spec.models.reward.function"
        self._field = ", ".join(fields) or (field if single else f"{field}s")
        self._order = {
            "folder": reward.import_path or str(folder),
            "functions": [
                {
                    "name": f.function,
                    "field": fields[i] if fields else field if single else f"{field}s[{i}].function",
                }
                for i, f in enumerate(reward.calls)
            ],
        }
        self._free = asyncio.Semaphore(reward.workers)
        self._idle: list[UserProcess] = []
        self._all: set[UserProcess] = set()
        self._ready: Sequence[dict[str, Any]] = ()

    async def open(self) -> list[Function]:
        """Start a first worker, which imports the functions. Returns them. Raises RewardError."""
        try:
            self._idle.append(await self._start())
        except CallFailed as error:
            frames = f"; last frames: {', '.join(error.frames)}" if error.frames else ""
            raise RewardError(f"{error.what}{frames}") from error
        found = []
        for function, ready in zip(self._reward.calls, self._ready, strict=True):
            where = function.function if ready["file"] is None else f"{ready['file']}:{ready['line']}"
            needs: Literal["Sample", "Group"] = function.needs or ready["needs"] or "Group"
            found.append(Function(function.title, function.weight, where, needs, ready["raw"]))
        return found

    async def call(self, function: int, call: Call) -> RewardAnswer:
        """Call a function. If the call fails, its worker is ended. Raises CallFailed."""
        async with self._free:
            worker = self._idle.pop() if self._idle else await self._replacement()
            request = {
                "function": function,
                "prompts": call.prompts,
                "responses": call.responses,
                "fields": call.keywords(self._ready[function]["raw"]),
            }
            started = time.time()
            try:
                reply = await self._ask(worker, request)
            except BaseException:
                await self._end(worker)
                raise
            self._idle.append(worker)
        if "wrong" in reply:
            raise CallFailed(reply["wrong"], retry=False)
        steps = None if reply["steps"] is None else [[(end, reward) for end, reward in of] for of in reply["steps"]]
        return RewardAnswer(reply["rewards"], started, time.time(), steps)

    async def _ask(self, worker: UserProcess, request: dict[str, Any]) -> dict[str, Any]:
        limit = self._reward.timeout_seconds
        try:
            reply = await worker.ask(request, limit)
        except TimeoutError:
            text = f"gave no answer within {limit:g} s (spec.models.reward.timeoutSeconds)"
            raise CallFailed(text, await worker.stack()) from None
        except Gone:
            raise CallFailed(*await worker.how_it_ended()) from None
        if "raised" in reply:
            error = reply["raised"]
            raise CallFailed(f"raised {error['what']}", error["frames"], outside=error["outside"])
        return reply

    async def _start(self) -> UserProcess:
        """Start a worker. Raises CallFailed if the functions cannot be imported."""
        field = self._field
        worker = await LocalProcesses().start(worker_module.__name__)
        self._all.add(worker)
        try:
            reply = await worker.ask(self._order, START_SECONDS)
            if "refused" in reply:
                raise CallFailed(reply["refused"])
            self._ready = reply["ready"]
            for function, ready in zip(self._reward.calls, self._ready, strict=True):
                if self._read is not None and ready["digest"] is not None:
                    self._read(function.function, ready["file"], ready["digest"])
        except TimeoutError:
            text = f"{field}: importing the reward functions took longer than {START_SECONDS:.0f} s"
            frames = await worker.stack()
            await self._end(worker)
            raise CallFailed(text, frames) from None
        except Gone:
            how, frames = await worker.how_it_ended()
            await self._end(worker)
            raise CallFailed(f"{field}: importing the reward functions {how}", frames) from None
        except BaseException:
            await self._end(worker)
            raise
        return worker

    async def _replacement(self) -> UserProcess:
        try:
            return await self._start()
        except CallFailed as error:
            raise CallFailed(f"could not be loaded by a new worker: {error.what}", error.frames) from None

    async def _end(self, worker: UserProcess) -> None:
        self._all.discard(worker)
        await worker.end()

    async def close(self) -> None:
        """End all workers."""
        self._idle.clear()
        for worker in list(self._all):
            await self._end(worker)
