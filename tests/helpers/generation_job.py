"""A generator over fake vLLM servers, its store and its fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.coordinator.samples.drawing import DrawingFollower
from dovetail.coordinator.samples.generator import Generator
from dovetail.coordinator.samples.in_flight import Generated, GenerationSettings
from dovetail.coordinator.samples.scoring import Finished
from dovetail.coordinator.store.samples import Key, NewSample, Sample, State
from dovetail.coordinator.store.store import Store
from dovetail.coordinator.workers.fleet import Fleet, Timeouts
from dovetail.manifest.training_types import Generation
from helpers.coordinated import NoWeights, drawn_with, job_of
from helpers.fake_vllm import TOKEN, FakeVllm, logprob_of, response_of
from helpers.patience import PATIENCE

# However busy the machine is, no server seems to stall or to ignore an abort: tests that want one to let time pass.
FAST = GenerationSettings(flush=0.02, stall=60.0, wait=60.0, connect=30.0, abort=20.0, stream_interval=4)
MAX_TOKENS = 40
Tail = Callable[[Sequence[tuple[Key, str | None]], Collection[str]], Collection[str] | None]


class Clock:
    """Monotonic seconds that can be made to pass."""

    def __init__(self) -> None:
        self.passed = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.passed


class Following(DrawingFollower):
    """Notes what it is told, and gathers the tail as `tail` says."""

    def __init__(self, job: Job, tail: Tail | None, on_progress: Callable[[int, int, int], None] | None) -> None:
        self.job, self.tail, self.on_progress = job, tail, on_progress

    def finished(self, samples: Sequence[Finished]) -> None:
        for told in samples:
            stored = self.job.store.samples.get(told.key)
            assert (told.prompt.tolist(), told.response.tolist()) == (
                stored.prompt_tokens.tolist(),
                stored.tokens.tolist(),
            )
            self.job.finished.append(stored)

    def progress(self, done: int, total: int, tokens: int) -> None:
        self.job.progress.append((done, total, tokens))
        if self.on_progress is not None:
            self.on_progress(done, total, tokens)

    def gathers_at(self) -> int:
        return 0 if self.tail is None else self.job.count

    def gather(self, unfinished: Sequence[tuple[Key, str | None]], able: Collection[str]) -> Collection[str] | None:
        return None if self.tail is None else self.tail(unfinished, able)


class Job:
    """A store with one iteration's samples, a fleet, and a generator."""

    def __init__(
        self,
        folder: Path,
        count: int = 16,
        settings: GenerationSettings = FAST,
        generation: dict[str, Any] | None = None,
        replay: bool = False,
        lag: int = 0,
    ) -> None:
        self.replay, self.lag = replay, lag
        self.folder, self.count, self.settings = folder, count, settings
        self.generation = Generation.model_validate(
            {"maxTokens": MAX_TOKENS, "maxConcurrent": 64, **(generation or {})}
        )
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.servers: list[FakeVllm] = []
        self.finished: list[Sample] = []
        self.progress: list[tuple[int, int, int]] = []
        self.clock = Clock()
        self.open()

    def open(self) -> None:
        def log(event: str, **fields: Any) -> None:
            self.events.append((event, fields))

        self.store = Store(self.folder)
        self.store.samples.begin_iteration(
            1, [NewSample(p, 0, np.arange(1, 4 + p % 5), 1000 + p) for p in range(self.count)]
        )
        timeouts = Timeouts(suspect=1000, dead=2000, back_off=0.02, back_off_max=0.1, revive=0.1, max_failures=100)
        self.fleet = Fleet(time.monotonic, log, timeouts)
        self.fleet.publish(1)
        spec = drawn_with(self.generation, self.lag, self.replay)
        job = job_of(self.store, log=log, spec=spec, clock=self.clock)
        self.generator = Generator(job, self.fleet, NoWeights(), TOKEN, settings=self.settings)

    async def server(self, name: str, join: bool = True, **options: Any) -> FakeVllm:
        server = FakeVllm(name, **options)
        await server.start()
        self.servers.append(server)
        if join:
            server.join(self.fleet)
        return server

    async def generate(
        self, tail: Tail | None = None, progress: Callable[[int, int, int], None] | None = None
    ) -> Generated:
        with self.generator.open(1, 1) as turn:
            return await self.generator.generate(turn, Following(self, tail, progress))

    def check(self) -> None:
        """Every sample generated once, equal to the undisturbed answer."""
        samples = self.store.samples.samples(1)
        assert len(samples) == self.count
        for sample in samples:
            tokens, reason = response_of(sample.seed, len(sample.prompt_tokens), self.generation.max_tokens)
            assert sample.state is State.GENERATED
            assert sample.tokens.tolist() == tokens
            assert sample.logprobs.tolist() == [logprob_of(t) for t in tokens]
            assert (sample.finish_reason, sample.finished) == (reason, reason == "stop")

    def reported_once(self) -> None:
        assert sorted(s.key for s in self.finished) == [s.key for s in self.store.samples.samples(1)]

    async def close(self) -> None:
        await self.generator.close()
        for server in self.servers:
            await server.stop()
        self.store.close()


async def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.002)


def play(folder: Path, scenario: Callable[[Job], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        job = Job(folder, **options)
        try:
            async with asyncio.timeout(PATIENCE):
                await scenario(job)
        finally:
            await job.close()

    asyncio.run(main())
