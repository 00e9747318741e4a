"""Generation over two real vLLM servers, one of which is killed in the middle: the answers do not change."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import signal
import time
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp import web

from dovetail.coordinator.samples.drawing import DrawingFollower
from dovetail.coordinator.samples.generator import Generator
from dovetail.coordinator.samples.in_flight import Generated, GenerationSettings
from dovetail.coordinator.store.samples import NewSample, Sample
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.workers.fleet import Fleet
from dovetail.coordinator.workers.offers import push_offer
from dovetail.manifest.types import RLHFJob
from dovetail.protocol.messages import Offer, Publish, Receiver, Register
from helpers.coordinated import NoWeights, job_of
from helpers.nursery import Adopted
from helpers.patience import PATIENCE
from helpers.vllm_servers import TOKEN, Server, tiny_llama
from helpers.weight_trainer import Alone, actor_of, probe_of, prove, weights_of

if find_spec("vllm") is None:
    pytest.skip("needs vLLM", allow_module_level=True)
pytestmark = pytest.mark.slow

SAMPLES, MAX_TOKENS, TEMPERATURE = 24, 160, 0.8
START_SECONDS = 1200.0
JOB = {
    "apiVersion": "dovetail.dev/v1beta1",
    "kind": "RLHFJob",
    "metadata": {"name": "test"},
    "spec": {
        "models": {"actor": {"source": {"scratch": {}}}},
        "data": {"maxPromptTokens": 64},
        "generation": {
            "maxTokens": MAX_TOKENS,
            "maxConcurrent": 32,
            "temperature": TEMPERATURE,
            "topK": 100,
            "topP": 0.95,
        },
        "groups": [{"name": "rollout", "roles": ["rollout"]}, {"name": "train", "roles": ["trainer"]}],
    },
}


async def until(condition: Any, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s"
        await asyncio.sleep(0.02)


class Run:
    """A coordinator's registrations and fleet, and the servers it may start."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.fleet = Fleet(time.monotonic, self.log)
        self.servers: list[Server] = []
        self.job = RLHFJob.model_validate(JOB)
        self.url = ""

    def log(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    async def register(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        self.fleet.register(Register.model_validate_json(await request.read()))
        return web.json_response({})

    def start(self, name: str) -> Adopted:
        self.servers.append(Server.start(name, self.run_dir, self.url))
        return self.servers[-1].process

    def close(self) -> None:
        for server in self.servers:
            server.close()

    async def send_weights(self, model: Any, version: int) -> None:
        """As a trainer and the coordinator do, to every instance that is stale."""
        from dovetail.trainer.weight_sender import WeightSender

        targets = self.fleet.stale_targets(version)
        receivers = [
            Receiver(name=t.name, kind="rollout", models=["actor"], rank_offset=i + 1) for i, t in enumerate(targets)
        ]
        offers: queue.Queue[Offer] = queue.Queue()
        sender = WeightSender(Alone(), offers.put, host="127.0.0.1")
        command = Publish(id="p", version=version, epoch=version, receivers=receivers, deadline_seconds=240.0)
        sending = asyncio.create_task(asyncio.to_thread(sender.publish, command, {"actor": lambda: weights_of(model)}))
        offer = await asyncio.to_thread(offers.get, True, 240)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            pairs = list(zip(receivers, (t.url for t in targets), strict=True))
            assert await push_offer(session, offer, pairs, True) == {t.name: None for t in targets}
            await sending
            for target in targets:
                assert await prove(session, target.url, probe_of(model, version, TEMPERATURE)) is None
        sender.close()
        for t in targets:
            self.fleet.weights_acked(t.name, t.incarnation, version)

    async def generate(self, folder: str, progress: Any = None) -> tuple[list[Sample], Generated]:
        """All samples of a new store; they are the same samples every time."""
        store = Store(self.run_dir / folder)
        prompts = [np.arange(3, 8 + i % 7) + i for i in range(SAMPLES)]
        store.samples.begin_iteration(1, [NewSample(i, 0, p, 77 + i) for i, p in enumerate(prompts)])
        # Every token is seen at once: on a fast machine all are made in a second.
        settings = GenerationSettings(stall=60, wait=60, flush=0.01, stream_interval=1)
        job = job_of(store, log=self.log, spec=self.job.spec)

        class Watch(DrawingFollower):
            def progress(self, done: int, total: int, tokens: int) -> None:
                if progress is not None:
                    progress(done, total, tokens)

        try:
            async with Generator(job, self.fleet, NoWeights(), TOKEN, settings=settings) as generator:
                with generator.open(1, self.fleet.version) as turn:
                    result = await generator.generate(turn, Watch())
            return store.samples.samples(1), result
        finally:
            store.close()


@contextlib.asynccontextmanager
async def running(run_dir: Path) -> AsyncIterator[Run]:
    run = Run(run_dir)
    app = web.Application()
    app.router.add_post("/v1/instances", run.register)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    run.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    try:
        yield run
    finally:
        run.close()
        await runner.cleanup()


def actor(run_dir: Path) -> Any:
    config = tiny_llama(intermediate_size=256, initializer_range=0.2)
    config.save_pretrained(run_dir / "models" / "actor-config")
    return actor_of(config, 3)


def test_killing_a_server_in_the_middle_changes_no_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        model = actor(tmp_path)
        (tmp_path / "job.json").write_text(RLHFJob.model_validate(JOB).model_dump_json(by_alias=True))
        async with running(tmp_path) as run:
            run.fleet.publish(1)
            servers = {name: run.start(name) for name in ("rollout-0", "rollout-1")}

            def up() -> bool:
                dead = [n for n, p in servers.items() if p.poll() is not None]
                assert not dead, (tmp_path / f"{dead[0]}.log").read_text()[-3000:]
                return len(run.fleet.stale_targets(1)) == 2

            await until(up, START_SECONDS, "two servers ready for weights")
            assert run.fleet.eligible("rollout") == []
            await run.send_weights(model, 1)
            assert [i.name for i in run.fleet.eligible("rollout")] == ["rollout-0", "rollout-1"]

            undisturbed, result = await run.generate("undisturbed")
            assert (result.samples, result.retries) == (SAMPLES, 0)
            assert [s.args["samples"] for s in result.spans] == [SAMPLES // 2] * 2

            def kill(done: int, total: int, tokens: int) -> None:
                if tokens > SAMPLES * 6 and servers["rollout-1"].poll() is None:
                    servers["rollout-1"].send_signal(signal.SIGKILL)

            disturbed, result = await run.generate("disturbed", kill)
            assert servers["rollout-1"].wait(PATIENCE) == -signal.SIGKILL
            assert result.retries >= 1
            assert len(disturbed) == SAMPLES
            moved = [s for s in disturbed if s.attempt > 1]
            assert moved
            for a, b in zip(undisturbed, disturbed, strict=True):
                assert a.tokens.tolist() == b.tokens.tolist()
                assert (a.finish_reason, a.seed) == (b.finish_reason, b.seed)
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
            check_logprobs(model, disturbed[0])

    asyncio.run(scenario())


def check_logprobs(model: Any, sample: Sample) -> None:
    """The stored log-probabilities are the model's own, at the temperature at which they were sampled."""
    ids = torch.tensor([[*sample.prompt_tokens.tolist(), *sample.tokens.tolist()]])
    with torch.no_grad():
        logprobs = (model(ids).logits[0] / TEMPERATURE).log_softmax(-1)
    start = len(sample.prompt_tokens) - 1
    expected = [float(logprobs[start + i, t]) for i, t in enumerate(sample.tokens.tolist())]
    np.testing.assert_allclose(sample.logprobs, expected, atol=5e-5)
