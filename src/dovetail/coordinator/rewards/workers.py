"""Worker processes that call the manifest's reward functions. Each process runs one call at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from dovetail.coordinator.rewards import worker as worker_module
from dovetail.coordinator.rewards.calls import Call, CallFailed, Function, RewardAnswer, RewardError
from dovetail.coordinator.rewards.values import FRAMES
from dovetail.manifest.types import RewardModel
from dovetail.protocol.process.env import TOKEN, started_with

# The time limit of a worker's start. A module may import large libraries and load models, which takes time.
START_SECONDS = 300.0
# The time to wait for the last output and the exit status of a worker that is being ended.
END_SECONDS = 2.0
LINE_BYTES = 1 << 26
TAIL_LINES = 200
# A longer line is kept from its end. A progress bar may never end its line.
LINE_CHARACTERS = 4096
_LINE_END = re.compile(r"[\r\n]+")
# What a worker starts inherits this variable, whichever session or parent it has later.
MARK = "DOVETAIL_REWARD_WORKER"
_FRAME = re.compile(r'File "(.+)", line (\d+) in (\S+)')


class _Gone(Exception):
    """The process ended before it answered."""


class _Worker:
    """One process and its pipes."""

    def __init__(self, process: asyncio.subprocess.Process, mark: str) -> None:
        self._process, self._mark = process, mark
        self._said: deque[str] = deque(maxlen=TAIL_LINES)
        self._output_changed = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())

    @staticmethod
    async def start() -> _Worker:
        mark = uuid.uuid4().hex
        environment = {name: value for name, value in os.environ.items() if name != TOKEN} | {MARK: mark}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            worker_module.__name__,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            limit=LINE_BYTES,
            start_new_session=True,
        )
        return _Worker(process, f"{MARK}={mark}")

    async def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and return the worker's answer. Raises TimeoutError after `seconds`, and _Gone if the worker
        ends first."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(seconds):
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
            except (BrokenPipeError, ConnectionResetError):
                line = b""
        if not line.endswith(b"\n"):
            raise _Gone
        return dict(json.loads(line))

    async def end(self) -> None:
        """Kill the worker and all processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(_kill_marked, self._mark)
        await self._ended()
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def _ended(self) -> None:
        """Wait for the exit and the last output. What the function started may hold the pipe of the output: the time
        limit must leave the listener as it is, for whoever waits next."""
        exit_ = asyncio.ensure_future(self._process.wait())
        await asyncio.wait({exit_, self._listening}, timeout=END_SECONDS)
        exit_.cancel()

    async def stack(self) -> list[str]:
        """The last frames of the Python code that the worker runs. Empty if the worker does not answer."""
        self._said.clear()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                while not self._frames(whole=True):
                    self._output_changed.clear()
                    await self._output_changed.wait()
        return self._frames()

    async def how_it_ended(self) -> tuple[str, list[str]]:
        """How the worker ended, as a verb phrase, and its last frames, if it wrote them."""
        await self._ended()
        code = self._process.returncode
        if code is None:
            return "closed its worker process's pipe", []
        if code >= 0:
            return f"ended its worker process with exit code {code}", []
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"crashed its worker process ({name})", self._frames()

    def _frames(self, whole: bool = False) -> list[str]:
        """The frames in the output of faulthandler. With `whole` there are none if the output is incomplete."""
        found: list[str] = []
        for line in self._said:
            if "(most recent call first)" in line:
                found = []
            match = _FRAME.search(line)
            if match is None:
                continue
            file, number, name = match.groups()
            if file == worker_module.__file__:
                return found[:FRAMES][::-1]
            if os.path.basename(os.path.dirname(file)) != "asyncio":
                found.append(f"{file}:{number} in {name}")
        return [] if whole else found[:FRAMES][::-1]

    async def _listen(self) -> None:
        """Copy the text that functions print to the coordinator's log."""
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(1 << 16):
            text = chunk.decode(errors="replace")
            print(text, end="", file=sys.stderr, flush=True)
            lines = _LINE_END.split(text)
            if self._said:
                lines[0] = self._said.pop() + lines[0]
            self._said.extend(line[-LINE_CHARACTERS:] for line in lines[-TAIL_LINES:])
            self._output_changed.set()


def _kill_marked(mark: str) -> None:
    """End the processes that have `mark` in their environment, also those with sessions of their own. Processes that
    are started meanwhile are found too."""
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline and (found := started_with([mark])):
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


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
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
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

    async def _ask(self, worker: _Worker, request: dict[str, Any]) -> dict[str, Any]:
        limit = self._reward.timeout_seconds
        try:
            reply = await worker.ask(request, limit)
        except TimeoutError:
            text = f"gave no answer within {limit:g} s (spec.models.reward.timeoutSeconds)"
            raise CallFailed(text, await worker.stack()) from None
        except _Gone:
            raise CallFailed(*await worker.how_it_ended()) from None
        if "raised" in reply:
            error = reply["raised"]
            raise CallFailed(f"raised {error['what']}", error["frames"], outside=error["outside"])
        return reply

    async def _start(self) -> _Worker:
        """Start a worker. Raises CallFailed if the functions cannot be imported."""
        field = self._field
        worker = await _Worker.start()
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
        except _Gone:
            how, frames = await worker.how_it_ended()
            await self._end(worker)
            raise CallFailed(f"{field}: importing the reward functions {how}", frames) from None
        except BaseException:
            await self._end(worker)
            raise
        return worker

    async def _replacement(self) -> _Worker:
        try:
            return await self._start()
        except CallFailed as error:
            raise CallFailed(f"could not be loaded by a new worker: {error.what}", error.frames) from None

    async def _end(self, worker: _Worker) -> None:
        self._all.discard(worker)
        await worker.end()

    async def close(self) -> None:
        """End all workers."""
        self._idle.clear()
        for worker in list(self._all):
            await self._end(worker)
