"""Rollouts and scorers that only wait: vLLM's and the scorer's protocols, with the durations of a profile.

Each instance is one device: a server that decodes all its requests in step, and a scorer whose passes run one after
another. They run in a process of their own, `serve`; their clocks do not drift, however late they are woken."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
from aiohttp import web

from dovetail.api.sampling import SEED
from dovetail.api.wire import CONTENT_TYPE, pack, unpack
from dovetail.planner.interstage import StageProfile

CHUNK = {"token_id": 5, "logprob": -1.25, "rank": 1, "top_logprobs": [{"token_id": 5, "logprob": -1.25}]}


class Request:
    """`left` tokens to make; `unsent` made but not sent."""

    def __init__(self, left: int, interval: int) -> None:
        self.left, self.interval = left, interval
        self.unsent = 0
        self.first = True
        self.aborted = False
        self.events: asyncio.Queue[tuple[int, str | None]] = asyncio.Queue()

    def made(self) -> bool:
        """One more token; True when it was the last."""
        self.unsent, self.left = self.unsent + 1, self.left - 1
        reason = "stop" if self.left == 0 else "abort" if self.aborted else None
        if reason or self.first or self.unsent == self.interval:
            self.events.put_nowait((self.unsent, reason))
            self.unsent, self.first = 0, False
        return reason is not None


class Instance:
    """`length(seed)`: tokens of a response. `prompt`: tokens of every prompt."""

    def __init__(self, profile: StageProfile, length: Callable[[int], int], prompt: int) -> None:
        self.profile, self.length, self.prompt = profile, length, prompt
        self.requests: dict[str, Request] = {}
        self.prefill = 0
        self.wake = asyncio.Event()
        self.scored_until = 0.0

    async def decode(self) -> None:
        """For ever: one step of all requests, the prefills of new ones first."""
        clock = asyncio.get_running_loop().time
        now = clock()
        while True:
            if not self.requests:
                self.wake.clear()
                await self.wake.wait()
                now = clock()
            tokens, self.prefill = self.prefill, 0
            now += tokens * self.profile.prefill_seconds_per_token
            now += self.profile.steps[min(len(self.requests), self.profile.max_samples)]
            await asyncio.sleep(max(0.0, now - clock()))
            for name, request in list(self.requests.items()):
                if request.made():
                    del self.requests[name]

    async def generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        params = body["sampling_params"]
        so_far = len(body["token_ids"]) - self.prompt
        left = self.length(params["extra_args"][SEED]) - so_far
        request = Request(left, params["stream_interval"])
        self.requests["generate-tokens-" + body["request_id"]] = request
        self.prefill += len(body["token_ids"])
        self.wake.set()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        reason = None
        while reason is None:
            count, reason = await request.events.get()
            choice = {"index": 0, "finish_reason": reason, "token_ids": [5] * count}
            choice["logprobs"] = {"content": [CHUNK] * count}
            event = {"request_id": "x", "usage": None, "output_mode": "tokens", "choices": [choice]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def abort(self, http: web.Request) -> web.Response:
        for name in (await http.json())["request_ids"]:
            if name in self.requests:
                self.requests[name].aborted = True
        return web.Response()

    async def score(self, http: web.Request) -> web.Response:
        arrays = unpack(await http.read())
        prompts, responses = arrays["prompt_lengths"].astype(int), arrays["response_lengths"].astype(int)
        clock = asyncio.get_running_loop().time
        seconds = sum(self.profile.scoring_seconds(n) for n in (prompts + responses).tolist())
        self.scored_until = max(self.scored_until, clock()) + seconds
        await asyncio.sleep(self.scored_until - clock())
        full = np.full((len(prompts), int(responses.max())), -1.25, np.float32)
        body = pack({"ref_logprobs": full, "values": full, "scores": np.ones(len(prompts), np.float32)})
        return web.Response(body=body, content_type=CONTENT_TYPE)

    async def start(self) -> int:
        """Its port."""
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_post("/inference/v1/abort_requests", self.abort)
        app.router.add_post("/v1/score", self.score)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        return int(runner.addresses[0][1])


def serve(profile: StageProfile, count: int, lengths: dict[int, int], prompt: int, pipe: Connection) -> None:
    """A process of `count` instances: sends their ports, then serves until the pipe closes."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def main() -> None:
        instances = [Instance(profile, lengths.__getitem__, prompt) for _ in range(count)]
        pipe.send([await instance.start() for instance in instances])
        tasks = [asyncio.create_task(instance.decode()) for instance in instances]
        over = asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), over.set)
        await over.wait()
        for task in tasks:
            task.cancel()

    asyncio.run(main())
