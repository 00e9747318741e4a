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
from typing import Any

from dovetail.coordinator.user_code.local_process import END_SECONDS, LocalProcess
from dovetail.coordinator.user_code.sandbox import Sandbox
from dovetail.coordinator.user_code.sandbox_pods import PodProcess, SandboxPods
from dovetail.coordinator.user_code.user_requests import FRAMES

# The time limit of a process's start. A module may import large libraries and load models, which takes time.
START_SECONDS = 300.0
TAIL_LINES = 200
# A longer line is kept from its end. A progress bar may never end its line.
LINE_CHARACTERS = 4096
_LINE_END = re.compile(r"[\r\n]+")
_FRAME = re.compile(r'File "(.+)", line (\d+) in (\S+)')
# The frames of these files are not the user's.
_OWN = str(Path(__file__).parents[1])


def limits(sandbox: Sandbox | SandboxPods | None) -> dict[str, bool]:
    """What a process is told of its limits. A pod has a user of its own."""
    return {"limited": sandbox is not None, "nobody": isinstance(sandbox, Sandbox)}


class Gone(Exception):
    """The process ended before it answered, or wrote something else."""


class UserProcess:
    """One process, here or in a pod."""

    def __init__(self, process: LocalProcess | PodProcess) -> None:
        self._process = process
        self._said: deque[str] = deque(maxlen=TAIL_LINES)
        self._output_changed = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())

    @staticmethod
    async def start(module: str, sandbox: Sandbox | SandboxPods | None = None) -> UserProcess:
        """Start `module`, which calls `answer_requests`. Raises NoSandbox if there is no pod for it."""
        if isinstance(sandbox, SandboxPods):
            return UserProcess(await sandbox.start(module))
        return UserProcess(await LocalProcess.start(module, sandbox))

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
            async with asyncio.timeout(END_SECONDS):
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
