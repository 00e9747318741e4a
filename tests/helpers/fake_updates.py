"""Fake vLLM servers that take weights and answer a probe of them, and fake trainers that send some."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from dovetail.coordinator.workers.publishing import Publisher, Target
from dovetail.protocol.messages import PROBE_HEADER, Bucket, CommandResult, Offer, Probe, Publish, Segment, SendOn
from helpers.fake_vllm import TOKEN, listen


def logprobs_of(version: int, tokens: list[int]) -> list[float]:
    """Of tokens[1:], with the weights of a version."""
    return [-1.0 - version - (token % 7) / 4 for token in tokens[1:]]


BUCKET = Bucket(names=["w"], dtypes=["float32"], shapes=[[1]], offsets=[0], nbytes=4)
SEGMENT = Segment(index=0, model="actor", host="127.0.0.1", port=1, secret="s", buckets=[BUCKET])


class UpdatableVllm:
    """A server that takes weights. `serves`: the version of its head, where that is another one than it took; `probe`
    changes its answers to probes."""

    def __init__(self, name: str, dtype: str | None = "float32") -> None:
        self.name, self.dtype = name, dtype
        self.arrived: int | None = None
        self.weight_version: int | None = None
        self.serves: int | None = None
        self.probe: Any = None
        self.hangs = False
        self.refuses: str | None = None  # why it fails to take weights
        self.asked: list[list[int]] = []
        self.sends: str | None = None  # why it cannot send its version to another server
        self.engines = 1
        self.stale_engine: int | None = None
        self.url = ""
        self._runner: web.AppRunner | None = None

    @property
    def target(self) -> Target:
        return Target(self.name, "rollout", self.url, "1", 1, 64, self.dtype, self.engines)

    async def start(self) -> None:
        app = web.Application()
        for path in ("/pause", "/resume", "/init_weight_transfer_engine", "/reset_prefix_cache"):
            app.router.add_post(path, self._fine)
        app.router.add_post("/update_weights", self._update)
        app.router.add_post("/start_weight_update", self._start)
        app.router.add_post("/finish_weight_update", self._finish)
        app.router.add_post("/dovetail/serve", self._serve)
        app.router.add_post("/dovetail/send_weights", self._send)
        app.router.add_post("/inference/v1/generate", self._generate)
        self._runner, self.url = await listen(app)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _fine(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        return web.Response()

    async def _update(self, _: web.Request) -> web.Response:
        return web.Response(text=self.refuses, status=200 if self.refuses is None else 500)

    async def _send(self, request: web.Request) -> web.Response:
        asked = SendOn.model_validate(await request.json())
        if self.sends is not None:
            return web.json_response({"error": {"message": self.sends}}, status=409)
        offer = Offer(version=asked.version, epoch=asked.epoch, backend="gloo", segments=[SEGMENT])
        return web.json_response(offer.model_dump(mode="json"))

    async def _start(self, _: web.Request) -> web.Response:
        self.arrived = self.weight_version = None
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.Response:
        self.arrived = int((await request.json())["weight_version"])
        return web.json_response({})

    async def _serve(self, request: web.Request) -> web.Response:
        version = (await request.json())["weight_version"]
        if version != self.arrived:
            return web.json_response({"error": {"message": "not that version"}}, status=409)
        self.weight_version = version
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert self.arrived is not None
        assert request.headers[PROBE_HEADER] == str(self.arrived), "it would answer 503"
        assert len(body["token_ids"]) < 64, "it would answer 400"
        self.asked.append(body["token_ids"])
        if self.hangs:
            await asyncio.Event().wait()
        if self.probe is not None:
            return web.json_response(self.probe)
        tokens = body["token_ids"]
        said = logprobs_of(self.arrived if self.serves is None else self.serves, tokens)
        if self.engines > 1 and int(request.headers["X-data-parallel-rank"]) == self.stale_engine:
            said = logprobs_of(self.arrived - 1, tokens)
        rows = [{str(t): {"logprob": p, "rank": 1}} for t, p in zip(tokens[1:], said, strict=True)]
        return web.json_response({"choices": [{"token_ids": [0]}], "prompt_logprobs": [None, *rows]})


class FakeTrainers:
    """The part of TrainerGroup that publishing needs: one sender, which has sent when all receivers are there."""

    generation = 1

    def __init__(self, tokens: list[int], dtype: str = "float32") -> None:
        self.tokens, self.dtype = tokens, dtype
        self.publisher: Publisher | None = None
        self.cancelled: list[str] = []

    async def execute(self, command: Publish, timeout: float, beside: bool = False) -> CommandResult:
        assert self.publisher is not None
        offer = Offer(version=command.version, epoch=command.epoch, backend="gloo", segments=[SEGMENT])
        self.publisher.offer(offer)
        said = logprobs_of(command.version, self.tokens)
        probe = Probe(version=command.version, tokens=self.tokens, logprobs=said, dtype=self.dtype)
        return CommandResult(id=command.id, ok=True, probe=probe)

    def extend(self, command: str, timeout: float) -> None:
        pass

    def cancel(self, command: str) -> None:
        self.cancelled.append(command)
