"""Starts a process that runs a user's code, asks it, says how it ended, and ends it with all that it started."""

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
from pathlib import Path
from typing import Any

from dovetail.coordinator.user_code.sandbox import Sandbox
from dovetail.coordinator.user_code.user_requests import FRAMES
from dovetail.protocol.process.env import TOKEN, started_with

# The time limit of a process's start. A module may import large libraries and load models, which takes time.
START_SECONDS = 300.0
# The time to wait for the last output and the exit status of a process that is being ended.
END_SECONDS = 2.0
LINE_BYTES = 1 << 26
TAIL_LINES = 200
# A longer line is kept from its end. A progress bar may never end its line.
LINE_CHARACTERS = 4096
_LINE_END = re.compile(r"[\r\n]+")
# What the process starts inherits this variable, whichever session or parent it has later.
MARK = "DOVETAIL_USER_CODE"
_FRAME = re.compile(r'File "(.+)", line (\d+) in (\S+)')
# The frames of these files are not the user's.
_OWN = str(Path(__file__).parents[1])


class Gone(Exception):
    """The process ended before it answered, or wrote something else."""


class UserProcess:
    """One process and its pipes."""

    def __init__(self, process: asyncio.subprocess.Process, mark: str, sandboxed: bool) -> None:
        self._process, self._mark, self._sandboxed = process, mark, sandboxed
        self._said: deque[str] = deque(maxlen=TAIL_LINES)
        self._output_changed = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())

    @staticmethod
    async def start(module: str, sandbox: Sandbox | None = None) -> UserProcess:
        """Start `module`, which calls `answer_requests`."""
        mark = uuid.uuid4().hex
        environment = {name: value for name, value in os.environ.items() if name != TOKEN} | {MARK: mark}
        inside = sandbox.command() if sandbox is not None else []
        process = await asyncio.create_subprocess_exec(
            *inside,
            sys.executable,
            "-P",
            "-m",
            module,
            # The parent of what runs in a sandbox is the first of its processes.
            str(1 if inside else os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            limit=LINE_BYTES,
            start_new_session=True,
        )
        return UserProcess(process, f"{MARK}={mark}", sandbox is not None)

    async def ask(self, request: dict[str, Any], seconds: float | None) -> dict[str, Any]:
        """Send a request and return the answer. Raises TimeoutError after `seconds`, if they are given, and Gone if the
        process ends first or writes what is no answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(seconds):
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
                answer = json.loads(line) if line.endswith(b"\n") else None
            # The last two: the line is too long, or it is no JSON.
            except (BrokenPipeError, ConnectionResetError, ValueError, RecursionError):
                answer = None
        if not isinstance(answer, dict):
            raise Gone
        return answer

    async def end(self) -> None:
        """Kill the process and all that it started."""
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
        """The last frames of the Python code that the process runs. Empty if it does not answer."""
        self._said.clear()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._python(), signal.SIGUSR1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                while not self._frames(whole=True):
                    self._output_changed.clear()
                    await self._output_changed.wait()
        return self._frames()

    def _python(self) -> int:
        """The id of the Python process. A sandbox is two processes around it. Raises ProcessLookupError."""
        pid = self._process.pid
        for _ in range(2 if self._sandboxed else 0):
            try:
                pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
            except (OSError, IndexError) as error:
                raise ProcessLookupError from error
        return pid

    async def how_it_ended(self) -> tuple[str, list[str]]:
        """How the process ended, as a verb phrase, and its last frames, if it wrote them."""
        await self._ended()
        code = self._process.returncode
        if code is None:
            return "closed its worker process's pipe", []
        if self._sandboxed and code > 128:
            code = 128 - code
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
