"""The main process of a sandbox's pod: `python -P -m dovetail.coordinator.user_code.pod_relay`.

It starts processes for the coordinator (`sandbox_pods`), which do what a user's code or a model wants. It has the token
of the sandboxes, which those must not read. A process gets a folder of its own for what it writes. With the process
ends all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from dovetail.coordinator.user_code.local_process import MARK, start_python
from dovetail.coordinator.user_code.sandbox_pods import ANSWERS, BEAT_SECONDS, MESSAGE_BYTES, PATH, SAID
from dovetail.coordinator.user_code.user_process import END_SECONDS
from dovetail.protocol.http.client_session import client_session
from dovetail.protocol.process import env
from dovetail.protocol.process.endings import cancel

_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_PAUSE_SECONDS = 1.0
_CONNECT_SECONDS = 30.0
_SWEEP_SECONDS = 0.05


class Relay:
    """Asks the coordinator for processes."""

    def __init__(self, url: str, name: str, session: aiohttp.ClientSession) -> None:
        self._url, self._name, self._session = url.rstrip("/"), name, session
        self._marks = set[str]()
        self._started = set[int]()
        # Held while one starts: until then it is in no list, and has no mark.
        self._starting = asyncio.Lock()
        self._tasks = set[asyncio.Task[None]]()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                socket = await self._session.ws_connect(
                    f"{self._url}{PATH}", params={"pod": self._name}, heartbeat=BEAT_SECONDS, max_msg_size=0
                )
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                print(f"{self._url} accepts no sandbox: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            first = await socket.receive()
            if first.type is not aiohttp.WSMsgType.TEXT:
                await socket.close()
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            task = asyncio.create_task(self._play(socket, json.loads(first.data)["module"]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _play(self, socket: aiohttp.ClientWebSocketResponse, module: str) -> None:
        """One process, from its start to its end."""
        mark, folder = uuid.uuid4().hex, tempfile.mkdtemp(prefix="sandbox-")
        self._marks.add(mark)
        process = None
        try:
            more = {MARK: mark, "HOME": folder, "TMPDIR": folder}
            async with self._starting:
                process = await start_python(module, os.getpid(), more, folder=folder)
                self._started.add(process.pid)
            assert process.stdout is not None
            assert process.stderr is not None
            answers = asyncio.create_task(_send(socket, ANSWERS, process.stdout))
            said = asyncio.create_task(_send(socket, SAID, process.stderr))
            taking = asyncio.create_task(_take(socket, process))
            await asyncio.wait({taking, answers}, return_when=asyncio.FIRST_COMPLETED)
            if answers.done():
                # What it started may hold its other pipe, for which asyncio waits.
                ending = asyncio.create_task(process.wait())
                await asyncio.wait({ending, said}, timeout=END_SECONDS)
                ending.cancel()
                with contextlib.suppress(ConnectionResetError):
                    await socket.send_str(json.dumps({"exit": process.returncode}))
            await cancel([answers, said, taking])
        finally:
            self._marks.discard(mark)
            if process is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                await self._end(process)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            await socket.close()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Until it and all that it started have ended."""
        ending = asyncio.ensure_future(process.wait())
        while not ending.done():
            async with self._starting:
                self._sweep()
            await asyncio.wait({ending}, timeout=_SWEEP_SECONDS)
        self._started.discard(process.pid)
        async with self._starting:
            self._sweep()

    def _sweep(self) -> None:
        """End what has lost its parent, and so is a child of this process, unless it is of a process that runs. What it
        started becomes a child then, too."""
        found = True
        while found:
            found = False
            for pid in _children() - self._started:
                if _mark(pid) in self._marks:
                    continue
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
                    found = True


async def _send(socket: aiohttp.ClientWebSocketResponse, kind: int, stream: asyncio.StreamReader) -> None:
    while chunk := await stream.read(MESSAGE_BYTES):
        await socket.send_bytes(bytes([kind]) + chunk)


async def _take(socket: aiohttp.ClientWebSocketResponse, process: asyncio.subprocess.Process) -> None:
    """Until the coordinator ends the connection."""
    assert process.stdin is not None
    async for message in socket:
        if message.type is aiohttp.WSMsgType.BINARY:
            # It may have ended just now.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                process.stdin.write(message.data)
                await process.stdin.drain()
        elif message.type is aiohttp.WSMsgType.TEXT and "stack" in json.loads(message.data):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)


def _children() -> set[int]:
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


def _mark(pid: int) -> str:
    """Empty for what has none, and for what has ended."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(f"{MARK}=".encode()):
                return entry.partition(b"=")[2].decode(errors="replace")
    return ""


def _prepare() -> None:
    """Keep the memory and the environment of this process from others of its user, and become the parent of what loses
    its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_PR_SET_DUMPABLE, 0), (_PR_SET_CHILD_SUBREAPER, 1)):
        if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option})")


async def _main(environ: Mapping[str, str]) -> None:
    task: asyncio.Task[Any] | None = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        # The first process of a container gets no signal that it does not ask for.
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    headers = {"Authorization": f"Bearer {environ[env.TOKEN]}"}
    limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
    async with client_session(headers=headers, timeout=limits) as session:
        with contextlib.suppress(asyncio.CancelledError):
            await Relay(environ[env.COORDINATOR], environ[env.NAME], session).run()


if __name__ == "__main__":
    _prepare()
    asyncio.run(_main(os.environ))
