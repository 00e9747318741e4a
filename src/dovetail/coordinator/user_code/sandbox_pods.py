"""The pods in which a user's code runs on a cluster. Each has a relay (`pod_relay`), which asks the coordinator for
processes to start. Nothing connects to the pod.

    GET /v1/sandbox?pod=NAME     a WebSocket: one process

The relay asks with the sandbox's token, and again whenever one of its sockets is used. Text messages are JSON objects:
{"module"} starts the process, {"stack": true} has it write its stack, {"exit": code or null} says that it closed its
pipe. Binary messages to the relay are the process's input. Those of the relay begin with ANSWERS or SAID. When the
socket ends, the process is killed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import suppress
from typing import ClassVar

from aiohttp import WSMsgType, web

from dovetail.coordinator.user_code.user_process import LINE_BYTES, NoPlace, UserProcess
from dovetail.protocol.http import serving

PATH = "/v1/sandbox"
ANSWERS, SAID = 1, 2
# What is silent for longer is dead. The relay's event loop does nothing that takes long.
BEAT_SECONDS = 60.0
MESSAGE_BYTES = 1 << 20
# A pod may need a node and an image first.
WAIT_SECONDS = 900.0
# Sockets that wait for a process. Whoever has the token can open more.
MOST_IDLE = 256
FIELD = "spec.sessions.sandbox"


class PodProcess:
    """A process in a pod (`RunningProcess`). `listen` must run."""

    # The pods of a job have a user of their own.
    limits: ClassVar[dict[str, int | None]] = {"limited": True, "user": None}

    def __init__(self, socket: web.WebSocketResponse, transport: asyncio.Transport | None, pod: str) -> None:
        self.pod, self.lost = pod, ""
        self.answers, self.said = asyncio.StreamReader(limit=LINE_BYTES), asyncio.StreamReader()
        self.exit_code: int | None = None
        self._socket, self._transport = socket, transport
        self._over, self._unread = asyncio.Event(), 0

    async def begin(self, module: str) -> None:
        """Start the module. Raises ConnectionResetError."""
        await self._socket.send_str(json.dumps({"module": module}))

    async def send(self, request: bytes) -> None:
        """Raises ConnectionResetError."""
        self._unread = 0
        for start in range(0, len(request), MESSAGE_BYTES):
            await self._socket.send_bytes(request[start : start + MESSAGE_BYTES])

    async def show_stack(self) -> None:
        """Have it write its stack to what it says."""
        with suppress(ConnectionResetError):
            await self._socket.send_str(json.dumps({"stack": True}))

    async def wait(self) -> None:
        """Until it has ended."""
        await self._over.wait()

    async def kill(self) -> None:
        """With all that it started."""
        self.close()

    def close(self) -> None:
        """End the connection, without waiting for the other side."""
        self._over.set()
        if self._transport is not None:
            self._transport.abort()

    async def listen(self) -> None:
        """Take what the relay sends, until the process or the connection ends."""
        try:
            async for message in self._socket:
                if message.type is WSMsgType.BINARY:
                    if not self._take(message.data):
                        break
                elif message.type is WSMsgType.TEXT and self._exits(message.data):
                    return
            if not self._over.is_set():
                self.lost = f"ended with its sandbox, pod {self.pod}"
        finally:
            self._over.set()
            self.answers.feed_eof()
            self.said.feed_eof()

    def _take(self, data: bytes) -> bool:
        """Whether it may go on. More than a line that nobody reads fills the memory."""
        if data[:1] == bytes([SAID]):
            self.said.feed_data(data[1:])
            return True
        self._unread += len(data)
        if data[:1] != bytes([ANSWERS]) or self._unread > LINE_BYTES:
            return False
        self.answers.feed_data(data[1:])
        return True

    def _exits(self, text: str) -> bool:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return False
        if not isinstance(found, dict) or type(code := found.get("exit", "")) not in (int, type(None)):
            return False
        self.exit_code = code
        return True


class SandboxPods:
    """Starts processes in a job's pods (`ProcessPlace`). `token` is that of the sandboxes. The route is served at
    `port`, at any if it is 0."""

    def __init__(self, token: str, host: str, port: int) -> None:
        self._token, self._host, self._port = token, host, port
        self._idle: list[PodProcess] = []
        self._running = Counter[str]()
        self._changed = asyncio.Condition()
        self._runner: serving.Runner | None = None

    @property
    def address(self) -> str:
        """Where relays ask, once it is open."""
        assert self._runner is not None
        return f"http://{self._host}:{self._runner.addresses[0][1]}"

    async def open(self, whose: str, app: web.Application | None = None) -> None:
        """Serve what relays ask, and `app`. It may be called again."""
        if self._runner is not None:
            return
        app = web.Application() if app is None else app
        app.add_routes([web.get(PATH, self._join)])
        self._runner = serving.Runner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port, reuse_address=True).start()

    async def close(self) -> None:
        """Serve no more. The processes end."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def start(self, module: str) -> UserProcess:
        """Start a module where the fewest processes run. Raises NoPlace."""
        while True:
            process = await self._next()
            try:
                await process.begin(module)
            except ConnectionResetError:
                continue
            return UserProcess(process)

    async def _next(self) -> PodProcess:
        try:
            async with asyncio.timeout(WAIT_SECONDS), self._changed:
                await self._changed.wait_for(lambda: bool(self._idle))
                found = min(self._idle, key=lambda each: self._running[each.pod])
                self._idle.remove(found)
                self._running[found.pod] += 1
                return found
        except TimeoutError:
            said = f"{FIELD}: no pod of a sandbox has come within {WAIT_SECONDS:.0f} s"
            raise NoPlace(f"{said}; kubectl describe sandbox, and its pods, say why") from None

    async def _join(self, request: web.Request) -> web.StreamResponse:
        if not serving.authorized(request.headers.get("Authorization"), self._token):
            raise web.HTTPUnauthorized(text="the token of the job's sandboxes is missing or wrong")
        if len(self._idle) >= MOST_IDLE:
            raise web.HTTPServiceUnavailable(text="enough sandboxes wait")
        socket = web.WebSocketResponse(heartbeat=BEAT_SECONDS, max_msg_size=2 * MESSAGE_BYTES)
        await socket.prepare(request)
        process = PodProcess(socket, request.transport, request.query.get("pod", "")[:253])
        async with self._changed:
            self._idle.append(process)
            self._changed.notify_all()
        try:
            await process.listen()
        finally:
            if process in self._idle:
                self._idle.remove(process)
            else:
                self._running[process.pod] -= 1
        return socket
