"""A vLLM server in the test's own process: it draws samples over a WebSocket, ends them, and faults on order.

Its token at an absolute position depends only on (seed, position), as with position-keyed sampling."""

from __future__ import annotations

import asyncio
import contextlib
import io
import zlib
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from dovetail.coordinator.workers.fleet import Fleet
from dovetail.protocol.messages import Register
from dovetail.protocol.sample_stream import FAILED, MOST_BYTES, REFUSED, ROUTE, Row, pack_rows, unpack_asked
from dovetail.protocol.sampling import SEED

TOKEN = "job-token"
END_EVERY = 23


def token_at(seed: int, position: int) -> int:
    return zlib.crc32(f"{seed}/{position}".encode()) % 50_000


def logprob_of(token: int) -> float:
    return -(1 + token % 15) / 8  # exact in float32


def response_of(seed: int, prompt_length: int, max_tokens: int) -> tuple[list[int], str]:
    """What an undisturbed server answers: tokens and finish reason."""
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        tokens.append(token_at(seed, prompt_length + len(tokens)))
        if tokens[-1] % END_EVERY == 0:
            return tokens, "stop"
    return tokens, "length"


def experts_at(tokens: list[int]) -> NDArray[np.uint8]:
    """(tokens, 2 layers, 1): what each token got on the server that computed it."""
    return np.array([[[token % 5], [token % 3]] for token in tokens], np.uint8).reshape(len(tokens), 2, 1)


def encoded(rows: NDArray[np.uint8]) -> bytes:
    """As a server sends it."""
    file = io.BytesIO()
    np.save(file, rows)
    return file.getvalue()


async def listen(app: web.Application) -> tuple[web.AppRunner, str]:
    """Serve on a free port; the runner, to be cleaned up, and the address."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


class FakeVllm:
    """`step` seconds a token. `faults` maps a fault's name to how often it shall still happen (None: always)."""

    def __init__(self, name: str, step: float = 0.001, max_model_len: int = 4096, burst: int | None = None) -> None:
        self.name, self.step, self.max_model_len, self.burst = name, step, max_model_len, burst
        self.incarnation = "1"
        self.version: int | None = None
        self.refused = 0  # samples of other weights
        self.faults: dict[str, int | None] = {}
        self.requests: list[dict[str, Any]] = []
        self.running: dict[str, asyncio.Event] = {}
        self.aborted: list[str] = []
        self.tokens_sent = 0
        self.die_after: int | None = None
        self.most_running = 0
        self.sockets: list[web.Request] = []  # that are open
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get(ROUTE, self._samples)
        self._runner, self.url = await listen(app)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def next_token(self, seed: int, tokens: list[int]) -> tuple[int, bool]:
        """The token that follows `tokens`, and whether it ends the response."""
        token = token_at(seed, len(tokens))
        return token, token % END_EVERY == 0

    def join(self, fleet: Fleet, version: int = 1, **abilities: Any) -> None:
        """Report to the fleet as a ready server with weights."""
        self.version = version
        message = {"name": self.name, "kind": "rollout", "group": "g", "url": self.url, "ready": True}
        abilities = {"sampler": "counter", "max_model_len": self.max_model_len, **abilities}
        extra = {"incarnation": self.incarnation, "weight_version": version, "abilities": abilities}
        fleet.register(Register.model_validate({**message, **extra}))

    def _fault(self, name: str) -> bool:
        if name not in self.faults:
            return False
        left = self.faults[name]
        if left is not None:
            if left == 0:
                return False
            self.faults[name] = left - 1
        return True

    async def _samples(self, request: web.Request) -> web.WebSocketResponse:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        socket = web.WebSocketResponse(max_msg_size=MOST_BYTES)
        await socket.prepare(request)
        self.sockets.append(request)
        tasks: set[asyncio.Task[None]] = set()
        used = False
        try:
            async for message in socket:
                if self._fault("version"):
                    await socket.close(code=1002, message=b"a message is of version 2")
                    break
                asked = unpack_asked(message.data)
                if isinstance(asked, list):
                    self._abort(asked)
                    continue
                bodies = [{**fields, "token_ids": tokens} for fields, tokens in asked[0]]
                self.requests += bodies
                if (used and not tasks and self._fault("closed")) or any(self._fault("broken") for _ in bodies):
                    break
                used = True
                for body in bodies:
                    tasks.add(task := asyncio.create_task(self._draw(request, socket, body)))
                    task.add_done_callback(tasks.discard)
        finally:
            for task in tasks:
                task.cancel()
            self.sockets.remove(request)
            if request.transport is not None:
                request.transport.abort()
        return socket

    def cut(self) -> None:
        """End all connections, as when the coordinator's host is gone."""
        for request in self.sockets:
            if request.transport is not None:
                request.transport.abort()

    def _abort(self, ids: list[str]) -> None:
        for request_id in ids:
            self.aborted.append(request_id)
            if request_id in self.running and not self._fault("deaf"):
                self.running[request_id].set()

    async def _draw(self, request: web.Request, socket: web.WebSocketResponse, body: dict[str, Any]) -> None:
        async def row(
            tokens: list[int], reason: str | None = None, experts: bytes = b"", error: str | None = None
        ) -> None:
            logprobs = array("f", [logprob_of(token) for token in tokens])
            extra = experts if error is None else error.encode()
            with contextlib.suppress(ConnectionError):  # the coordinator went away
                await socket.send_bytes(pack_rows([Row(body["number"], array("i", tokens), logprobs, reason, extra)]))

        request_id = body["request_id"]
        if body["weights"] != self.version:
            self.refused += 1
            await row([], FAILED, error="other weights")
        elif self._fault("refuse"):
            await row([], REFUSED, error="prompt is too long")
        elif self._fault("unavailable"):
            await row([], FAILED, error="no weights yet")
        elif self._fault("empty abort"):
            await row([], "abort")
        else:
            assert request_id not in self.running, "one request id twice at the same time"
            self.running[request_id] = asyncio.Event()
            self.most_running = max(self.most_running, len(self.running))
            try:
                await self._stream(request, socket, body, row)
            finally:
                del self.running[request_id]

    async def _stream(
        self, request: web.Request, socket: web.WebSocketResponse, body: dict[str, Any], row: Callable[..., Any]
    ) -> None:
        params = body["sampling_params"]
        interval, abort = self.burst or params["stream_interval"], self.running[body["request_id"]]
        waiting: list[int] = []
        every: list[int] = list(body["token_ids"])

        def experts() -> bytes:
            start = params.get("routed_experts_prompt_start")
            return b"" if start is None else encoded(experts_at(every[start:-1]))

        for made in range(1, params["max_tokens"] + 1):
            await asyncio.sleep(self.step)
            if self._fault("stall"):
                await asyncio.Event().wait()
            if abort.is_set():
                await row(waiting, "abort", experts())
                return
            if self._fault("error event"):
                await row([], FAILED, error="Internal server error")
                return
            if self._fault("garbage"):
                await socket.send_bytes(b"not a frame of this protocol")
                return
            token, ended = self.next_token(params["extra_args"][SEED], every)
            waiting.append(token)
            every.append(token)
            self.tokens_sent += 1
            if self.die_after is not None and self.tokens_sent >= self.die_after:
                if request.transport is not None:
                    request.transport.abort()
                if not self._fault("survive"):
                    asyncio.get_running_loop().create_task(self.stop())
                return
            reason = "stop" if ended else "length" if made == params["max_tokens"] else None
            if reason or made == 1 or len(waiting) >= interval:
                await row(waiting, reason, experts() if reason else b"")
                waiting = []
            if reason:
                return
