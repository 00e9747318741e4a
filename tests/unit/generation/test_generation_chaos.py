"""Random faults in random order on random servers: all samples are answered, once, and as if nothing had happened."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.fake_vllm import FakeVllm
from helpers.generation_job import FAST, Job, play

FAULTS = ("unavailable", "empty abort", "error event", "garbage", "deaf", "stall")


async def replace(job: Job, name: str, incarnation: str) -> None:
    server = FakeVllm(name)
    server.incarnation = incarnation
    await server.start()
    job.servers.append(server)
    server.join(job.fleet)


@pytest.mark.slow
@given(st.integers(0, 2**32))
@settings(max_examples=12, deadline=None)
def test_chaos(seed: int) -> None:
    rng = random.Random(seed)

    async def scenario(job: Job) -> None:
        for i in range(3):
            server = await job.server(f"r{i}", step=rng.choice([0.0, 0.001, 0.003]))
            server.faults = {fault: rng.randrange(3) for fault in FAULTS if rng.random() < 0.5}
            if i and rng.random() < 0.7:
                server.die_after = rng.randrange(1, 150)

        async def disturb() -> None:
            life = 2
            while True:
                await asyncio.sleep(rng.random() * 0.05)
                name = f"r{rng.randrange(3)}"
                last = next(s for s in reversed(job.servers) if s.name == name)
                if last._runner is None:
                    await replace(job, name, str(life))
                    life += 1
                elif rng.random() < 0.3 and name != "r0":
                    await job.generator.drain(name)
                    job.fleet.drain(name, False)

        threshold = rng.randrange(17)

        def tail(unfinished: Sequence[object], eligible: Collection[str]) -> Collection[str] | None:
            """As inter-stage fusion: at some number of samples left, to some of the servers."""
            if len(unfinished) > threshold or len(eligible) < 2:
                return None
            return rng.sample(sorted(eligible), rng.randrange(1, len(eligible)))

        disturbing = asyncio.create_task(disturb())
        try:
            while True:
                task = asyncio.create_task(job.generate(tail))
                if rng.random() < 0.5:
                    await asyncio.wait([task], timeout=rng.random() * 0.1)
                    task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():
                    task.result()
                    break
        finally:
            disturbing.cancel()
            await asyncio.wait([disturbing])
        job.check()
        keys = [s.key for s in job.finished]
        assert len(keys) == len(set(keys))

    with tempfile.TemporaryDirectory() as folder:
        play(Path(folder), scenario, settings=dataclasses.replace(FAST, stall=0.5, abort=0.5))
