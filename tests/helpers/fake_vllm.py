"""A vLLM server in the test's own process: `/inference/v1/generate` streams, aborts, and faults on order.

Its token at an absolute position depends only on (seed, position), as with position-keyed sampling."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import zlib
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from dovetail.coordinator.workers.fleet import Fleet
from dovetail.protocol.messages import WEIGHTS_HEADER, Register
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


def encoded(rows: NDArray[np.uint8]) -> str:
    """As vLLM sends it."""
    file = io.BytesIO()
    np.save(file, rows)
    return base64.b64encode(file.getvalue()).decode()


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
        self._runner: web.AppRunner | None = None
        self._connections: set[object] = set()
        self.url = ""

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/inference/v1/abort_requests", self._abort)
        self._runner, self.url = await listen(app)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

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

    async def _abort(self, request: web.Request) -> web.Response:
        for request_id in (await request.json())["request_ids"]:
            self.aborted.append(request_id)
            if request_id in self.running and not self._fault("deaf"):
                self.running[request_id].set()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        if request.headers.get(WEIGHTS_HEADER) not in (None, str(self.version)):
            self.refused += 1
            return web.json_response({"error": {"message": "other weights", "code": 503}}, status=503)
        body = await request.json()
        self.requests.append(body)
        kept = request.protocol in self._connections
        self._connections.add(request.protocol)
        if (kept and self._fault("closed")) or self._fault("broken"):
            assert request.transport is not None
            request.transport.close()
            raise asyncio.CancelledError
        if self._fault("refuse"):
            return web.json_response({"error": {"message": "prompt is too long", "code": 400}}, status=400)
        if self._fault("unavailable"):
            return web.json_response({"error": {"message": "no weights yet", "code": 503}}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        request_id = "generate-tokens-" + body["request_id"]
        assert request_id not in self.running, "one request id twice at the same time"
        self.running[request_id] = asyncio.Event()
        self.most_running = max(self.most_running, len(self.running))
        try:
            await self._stream(request, response, body, self.running[request_id])
        finally:
            del self.running[request_id]
        return response

    async def _stream(
        self, request: web.Request, response: web.StreamResponse, body: dict[str, Any], abort: asyncio.Event
    ) -> None:
        params, position = body["sampling_params"], len(body["token_ids"])
        interval = self.burst or params["stream_interval"]
        waiting: list[int] = []
        every: list[int] = list(body["token_ids"])

        def experts() -> str | None:
            start = params.get("routed_experts_prompt_start")
            return None if start is None else encoded(experts_at(every[start:-1]))

        if self._fault("empty abort"):
            await self._event(response, [], "abort")
            return
        for made in range(1, params["max_tokens"] + 1):
            await asyncio.sleep(self.step)
            if self._fault("stall"):
                await asyncio.Event().wait()
            if abort.is_set():
                await self._event(response, waiting, "abort", experts())
                return
            if self._fault("error event"):
                await response.write(b'data: {"error":{"message":"Internal server error","code":500}}\n\n')
                return
            if self._fault("garbage"):
                await response.write(b"data: {not json\n\n")
                return
            waiting.append(token_at(params["extra_args"][SEED], position))
            every.append(waiting[-1])
            position += 1
            self.tokens_sent += 1
            if self.die_after is not None and self.tokens_sent >= self.die_after:
                assert request.transport is not None
                request.transport.abort()
                if not self._fault("survive"):
                    asyncio.get_running_loop().create_task(self.stop())
                return
            ended = waiting[-1] % END_EVERY == 0
            reason = "stop" if ended else "length" if made == params["max_tokens"] else None
            if reason or made == 1 or len(waiting) >= interval:
                await self._event(response, waiting, reason, experts() if reason else None)
                waiting = []
            if reason:
                await response.write(b"data: [DONE]\n\n")
                return

    @staticmethod
    async def _event(
        response: web.StreamResponse, tokens: list[int], reason: str | None, experts: str | None = None
    ) -> None:
        content = [
            {"token_id": t, "logprob": logprob_of(t), "rank": 1, "top_logprobs": [{"token_id": t, "logprob": 0.0}]}
            for t in tokens
        ]
        choice = {"index": 0, "finish_reason": reason, "token_ids": tokens, "logprobs": {"content": content}}
        choice["routed_experts"] = experts
        event = {"request_id": "x", "usage": None, "output_mode": "tokens", "choices": [choice]}
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
