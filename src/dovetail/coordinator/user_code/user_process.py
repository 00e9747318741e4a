"""Starts a process that runs a user's code, asks it, says how it ended, and ends it with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections import deque
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from dovetail.coordinator.user_code.user_requests import FRAMES

# The time limit of a process's start. A module may import large libraries and load models, which takes time.
START_SECONDS = 300.0
# The time to wait for the last output and the exit status of a process that is being ended.
END_SECONDS = 2.0
# The time to wait for a stack. A process writes it at once, whatever it does, if the machine lets it.
STACK_SECONDS = 10.0
# The longest request or answer, bytes.
LINE_BYTES = 1 << 26
TAIL_LINES = 200
# A longer line is kept from its end. A progress bar may never end its line.
LINE_CHARACTERS = 4096
_LINE_END = re.compile(r"[\r\n]+")
_FRAME = re.compile(r'File "(.+)", line (\d+) in (\S+)')
# The frames of these files are not the user's.
_OWN = str(Path(__file__).parents[1])


class Gone(Exception):
    """The process ended before it answered, or wrote something else."""


class NoPlace(Exception):
    """No process can be started. The message is a sentence."""


class RunningProcess(Protocol):
    """A process, wherever it runs, and its pipes."""

    answers: asyncio.StreamReader
    said: asyncio.StreamReader

    @property
    def lost(self) -> str:
        """Why it is lost, though nobody saw it end, as a verb phrase. Empty if it is not."""

    @property
    def limits(self) -> dict[str, int | None]:
        """What it is told: whether it is `limited`, and which `user` it becomes, if any."""

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal. None while it runs, and where nobody knows it."""

    async def send(self, request: bytes) -> None:
        """Raises BrokenPipeError and ConnectionResetError."""

    async def show_stack(self) -> None:
        """Have it write its stack to what it says."""

    async def wait(self) -> None:
        """Until it has ended."""

    async def kill(self) -> None:
        """With all that it started."""

    def close(self) -> None:
        """Close its input."""


class ProcessPlace(Protocol):
    """Where processes with a user's code run: here, in a sandbox or not, or in pods."""

    async def open(self, whose: str, app: web.Application | None = None) -> str | None:
        """Prepare for processes, which reach `app`. `whose` says what they are. Returns the path of the socket at which
        they reach it. None: at the job's address. It may be called again. Raises ValueError with one sentence."""

    async def start(self, module: str) -> UserProcess:
        """Start `module`, which calls `answer_requests`. Raises NoPlace."""

    async def close(self) -> None:
        """Serve no more."""


class UserProcess:
    """One process, and what it says."""

    def __init__(self, process: RunningProcess) -> None:
        self._process = process
        self._said: deque[str] = deque(maxlen=TAIL_LINES)
        self._output_changed = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())

    @property
    def limits(self) -> dict[str, int | None]:
        """What it must be told first."""
        return self._process.limits

    @property
    def lost(self) -> bool:
        """Whether it ended with its pod, which is no matter of its code."""
        return bool(self._process.lost)

    async def ask(self, request: dict[str, Any], seconds: float | None) -> dict[str, Any]:
        """Send a request and return the answer. Raises TimeoutError after `seconds`, if they are given, and Gone if the
        process ends first or writes what is no answer."""
        async with asyncio.timeout(seconds):
            try:
                await self._process.send(json.dumps(request).encode() + b"\n")
                line = await self._process.answers.readline()
                answer = json.loads(line) if line.endswith(b"\n") else None
            # The last two: the line is too long, or it is no JSON.
            except (BrokenPipeError, ConnectionResetError, ValueError, RecursionError):
                answer = None
        if not isinstance(answer, dict):
            raise Gone
        return answer

    async def end(self) -> None:
        """Kill the process and all that it started."""
        await self._process.kill()
        await self._ended()
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        self._process.close()

    async def _ended(self) -> None:
        """Wait for the exit and the last output. What the function started may hold the pipe of the output: the time
        limit must leave the listener as it is, for whoever waits next."""
        exit_ = asyncio.ensure_future(self._process.wait())
        await asyncio.wait({exit_, self._listening}, timeout=END_SECONDS)
        exit_.cancel()

    async def stack(self) -> list[str]:
        """The last frames of the Python code that the process runs. Empty if it does not answer."""
        self._said.clear()
        await self._process.show_stack()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STACK_SECONDS):
                while not self._frames(whole=True):
                    self._output_changed.clear()
                    await self._output_changed.wait()
        return self._frames()

    async def how_it_ended(self) -> tuple[str, list[str]]:
        """How the process ended, as a verb phrase, and its last frames, if it wrote them."""
        await self._ended()
        if self._process.lost:
            return self._process.lost, []
        code = self._process.exit_code
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
            if file.startswith(_OWN):
                return found[:FRAMES][::-1]
            if os.path.basename(os.path.dirname(file)) != "asyncio":
                found.append(f"{file}:{number} in {name}")
        return [] if whole else found[:FRAMES][::-1]

    async def _listen(self) -> None:
        """Copy the text that functions print to the coordinator's log."""
        while chunk := await self._process.said.read(1 << 16):
            text = chunk.decode(errors="replace")
            print(text, end="", file=sys.stderr, flush=True)
            lines = _LINE_END.split(text)
            if self._said:
                lines[0] = self._said.pop() + lines[0]
            self._said.extend(line[-LINE_CHARACTERS:] for line in lines[-TAIL_LINES:])
            self._output_changed.set()
