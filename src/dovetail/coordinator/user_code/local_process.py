"""Processes of this machine that run a user's code, in a sandbox or not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path

from aiohttp import web

from dovetail.coordinator.user_code.sandbox import FIRST_USER, Sandbox
from dovetail.coordinator.user_code.user_process import END_SECONDS, LINE_BYTES, UserProcess
from dovetail.protocol.http.serving import Runner
from dovetail.protocol.process.env import TOKEN, started_with

# What the process starts inherits this variable, whichever session or parent it has later.
MARK = "DOVETAIL_USER_CODE"


class LocalProcesses:
    """Starts processes here (`ProcessPlace`). Without `sandbox` they may do what the job may."""

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        self._sandbox = sandbox
        self._runner: Runner | None = None
        self._socket: Path | None = None

    async def open(self, whose: str, app: web.Application | None = None) -> str | None:
        """Serve `app` at a Unix socket: a sandbox has no network. Raises ValueError with one sentence."""
        if self._sandbox is not None:
            await self._sandbox.check(whose)
        if app is None or self._socket is not None:
            return None if self._socket is None else str(self._socket)
        # The path of a Unix socket has at most 107 bytes, so it is not in the run's folder. Its routes ask for a key.
        folder = Path(tempfile.mkdtemp(prefix="dovetail-"))
        folder.chmod(0o711)
        self._socket = folder / "routes"
        if self._sandbox is not None:
            self._sandbox = replace(self._sandbox, also=[folder])
        self._runner = Runner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.UnixSite(self._runner, self._socket).start()
        self._socket.chmod(0o666)
        return str(self._socket)

    async def start(self, module: str) -> UserProcess:
        """Start `module`, which calls `answer_requests`."""
        mark = uuid.uuid4().hex
        inside = self._sandbox.command() if self._sandbox is not None else []
        # The parent of what runs in a sandbox is the first of its processes.
        process = await start_python(module, 1 if inside else os.getpid(), {MARK: mark}, inside)
        return UserProcess(LocalProcess(process, f"{MARK}={mark}", bool(inside)))

    async def close(self) -> None:
        """Serve no more. Processes end when `UserProcess.end` ends them."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._socket is not None:
            shutil.rmtree(self._socket.parent, ignore_errors=True)
            self._socket = None


class LocalProcess:
    """One process and its pipes (`RunningProcess`). A sandbox is two processes around it."""

    # Nothing of this machine is lost.
    lost = ""

    def __init__(self, process: asyncio.subprocess.Process, mark: str, sandboxed: bool) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process, self._mark, self._sandboxed = process, mark, sandboxed
        self.answers, self.said = process.stdout, process.stderr

    @property
    def limits(self) -> dict[str, int | None]:
        """In a sandbox, root becomes a user that no other sandbox has: the kernel counts a user's processes."""
        alone = self._sandboxed and os.geteuid() == 0
        return {"limited": self._sandboxed, "user": FIRST_USER + self._process.pid if alone else None}

    async def send(self, request: bytes) -> None:
        """Raises BrokenPipeError and ConnectionResetError."""
        assert self._process.stdin is not None
        self._process.stdin.write(request)
        await self._process.stdin.drain()

    async def show_stack(self) -> None:
        """Have it write its stack to what it says."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._python(), signal.SIGUSR1)

    async def wait(self) -> None:
        """Until it has ended."""
        await self._process.wait()

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal. None while it runs."""
        code = self._process.returncode
        return 128 - code if self._sandboxed and code is not None and code > 128 else code

    async def kill(self) -> None:
        """With all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(_kill_marked, self._mark)

    def close(self) -> None:
        """Close its input."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _python(self) -> int:
        """The id of the Python process. Raises ProcessLookupError."""
        pid = self._process.pid
        for _ in range(2 if self._sandboxed else 0):
            try:
                pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
            except (OSError, IndexError) as error:
                raise ProcessLookupError from error
        return pid


async def start_python(
    module: str, parent: int, more: dict[str, str], inside: list[str] | None = None, folder: str | None = None
) -> asyncio.subprocess.Process:
    """Start a module below the process `parent`, with pipes, without the job's token, and with `more` variables."""
    return await asyncio.create_subprocess_exec(
        *(inside or []),
        sys.executable,
        "-P",
        "-m",
        module,
        str(parent),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != TOKEN} | more,
        limit=LINE_BYTES,
        start_new_session=True,
    )


def _kill_marked(mark: str) -> None:
    """End the processes that have `mark` in their environment, also those with sessions of their own. Processes that
    are started meanwhile are found too."""
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline and (found := started_with([mark])):
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
