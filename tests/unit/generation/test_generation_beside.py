"""Two iterations with different weights on the same servers: those that the tail of the first needs no more begin the
second, and a tail whose server dies goes on elsewhere."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.coordinator.rewards.calls import evaluation_slot
from dovetail.coordinator.store.samples import NewSample, State
from helpers.fake_vllm import FakeVllm, response_of
from helpers.generation_job import Job, play, until

# As many of each iteration; the versions that draw them.
COUNT, VERSIONS = 16, {1: 1, 2: 2, 3: 3}


class Beside:
    """Draws iterations at the same time. Whoever shall hold other weights gets them at once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.taken: list[tuple[str, int]] = []
        for iteration in (2, 3):
            samples = [NewSample(p, 0, np.arange(1, 4 + p % 5), 1000 * iteration + p) for p in range(COUNT)]
            job.store.samples.begin_iteration(iteration, samples)

    async def draw(self, iteration: int) -> None:
        with self.job.generator.open(iteration, VERSIONS[iteration]) as turn:
            await self.job.generator.generate(turn)
            await turn.wait_first()

    async def publish(self) -> None:
        fleet, servers = self.job.fleet, {s.name: s for s in self.job.servers}
        while True:
            for target in fleet.stale_targets(fleet.version or 1):
                server = servers[target.name]
                if target.version is None or server.incarnation != target.incarnation:
                    continue
                assert not server.running, "it still draws samples with the weights that it holds"
                fleet.update(target.name, True)
                await asyncio.sleep(0.01)
                server.version = target.version
                fleet.weights_acked(target.name, target.incarnation, target.version)
                fleet.update(target.name, False)
                self.taken.append((target.name, target.version))
            await asyncio.sleep(0.005)

    async def all(self, disturb: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        publishing = asyncio.create_task(self.publish())
        disturbing = asyncio.create_task(disturb()) if disturb is not None else None
        try:
            await asyncio.gather(*(self.draw(iteration) for iteration in VERSIONS))
        finally:
            for task in (publishing, disturbing):
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
        assert [s.refused for s in self.job.servers] == [0] * len(self.job.servers)
        for iteration, version in VERSIONS.items():
            samples = self.job.store.samples.samples(iteration)
            assert len(samples) == COUNT
            for sample in samples:
                tokens, _ = response_of(sample.seed, len(sample.prompt_tokens), self.job.generation.max_tokens)
                assert (sample.state, sample.tokens.tolist()) == (State.GENERATED, tokens)
                assert sample.first_version == sample.weight_version == version


@pytest.mark.slow
def test_a_free_server_begins_the_next_iteration_while_the_tail_is_drawn(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        slow = await job.server("r0", step=1.0)
        await job.server("r1")
        beside = Beside(job)

        async def watch() -> None:
            def overlapped() -> bool:
                states = {s.state for s in job.store.samples.samples(2)}
                tail = bool(slow.running) and slow.version == 1
                return tail and State.GENERATED in states

            await until(overlapped)
            beside.taken.append(("overlapped", 0))
            slow.step = 0.001

        await beside.all(watch)
        assert ("overlapped", 0) in beside.taken

    play(tmp_path, scenario, count=COUNT, lag=2)


@pytest.mark.slow
def test_a_tail_whose_server_dies_goes_on_with_the_same_weights(tmp_path: Path) -> None:
    """The other server has begun the next iteration. It takes the older weights again."""

    async def scenario(job: Job) -> None:
        slow = await job.server("r0", step=1.0)
        other = await job.server("r1", step=0.02)
        beside = Beside(job)

        async def kill() -> None:
            await until(lambda: other.version == 2 and bool(other.running) and bool(slow.running))
            await slow.stop()
            job.fleet.retire("r0")

        await beside.all(kill)
        versions = [version for name, version in beside.taken if name == "r1"]
        assert versions == [2, 1, 2, 3]

    play(tmp_path, scenario, count=COUNT, lag=2)


@pytest.mark.parametrize("seed", range(4))
def test_servers_that_die_and_come_back_at_random(tmp_path: Path, seed: int) -> None:
    async def scenario(job: Job) -> None:
        chosen = random.Random(seed)
        for name in ("r0", "r1", "r2"):
            await job.server(name, step=chosen.choice([0.001, 0.004, 0.01]))
        beside = Beside(job)

        async def again(server: FakeVllm) -> None:
            server.incarnation = str(int(server.incarnation) + 1)
            await server.start()
            server.join(job.fleet)

        async def disturb() -> None:
            for _ in range(6):
                await asyncio.sleep(chosen.random() / 10)
                server = chosen.choice(job.servers)
                await server.stop()
                await asyncio.sleep(chosen.random() / 10)
                await again(server)

        await beside.all(disturb)

    play(tmp_path, scenario, count=COUNT, lag=2)


def test_an_evaluation_is_drawn_before_the_iteration_that_waits_for_it(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        await job.server("r0")
        slot = evaluation_slot(1)
        job.store.samples.begin_iteration(slot, [NewSample(p, 0, np.arange(1, 4), p) for p in range(COUNT)])
        with job.generator.open(1, 1) as turn:
            with job.generator.open(slot, 1) as evaluation:
                assert (evaluation.first, turn.first) == (True, False)
                await job.generator.generate(evaluation)
            assert job.store.samples.counts(slot) == {State.GENERATED: COUNT}
            assert job.store.samples.counts(1) == {State.PENDING: COUNT}
            assert turn.first
            await job.generator.generate(turn)
        assert job.store.samples.counts(1) == {State.GENERATED: COUNT}

    play(tmp_path, scenario, count=COUNT, lag=2)
