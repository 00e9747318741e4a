"""The experts that rollouts chose travel with their samples to the batch, whatever happens to servers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from dovetail.coordinator.store.experience_files import routed_experts
from dovetail.coordinator.store.experts import UNKNOWN, checked_rows, whole
from dovetail.coordinator.store.samples import Sample
from dovetail.protocol.wire import padded
from helpers.fake_vllm import encoded, experts_at
from helpers.generation_job import Job, play, until


def in_batch(job: Job) -> tuple[list[Sample], np.ndarray]:
    samples = job.store.samples.samples(1)
    flat, unknown = routed_experts(samples, job.store.samples.experts(1))
    lengths = np.array([len(s.prompt_tokens) + len(s.tokens) for s in samples])
    table = padded(flat, lengths, UNKNOWN)
    assert [(row[: n - 1, 0, 0] == UNKNOWN).sum() for row, n in zip(table, lengths, strict=True)] == unknown.tolist()
    return samples, table


def compare(job: Job) -> dict[int, int]:
    """What is known is what the servers chose; how many tokens of which sample are unknown, without the last."""
    unknown = {}
    samples, table = in_batch(job)
    for sample, row in zip(samples, table, strict=True):
        tokens = [*sample.prompt_tokens.tolist(), *sample.tokens.tolist()]
        assert (row[len(tokens) - 1 :] == UNKNOWN).all(), "nobody computes the last token"
        known = row[: len(tokens) - 1, 0, 0] != UNKNOWN
        np.testing.assert_array_equal(row[: len(tokens) - 1][known], experts_at(tokens[:-1])[known])
        if not known.all():
            unknown[sample.key.prompt] = int((~known).sum())
            # Of the tokens that the dead server computed; the next one computes the last of them again.
            assert not known[: unknown[sample.key.prompt]].any()
    return unknown


def test_experts_come_with_the_samples(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        await job.server("r0")
        await job.generate()
        job.check()
        assert compare(job) == {}

    play(tmp_path, scenario, replay=True)


def test_servers_are_not_asked_without_replay(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        server = await job.server("r0")
        await job.generate()
        assert not any("routed_experts_prompt_start" in r["sampling_params"] for r in server.requests)
        assert job.store.samples.experts(1) == {}

    play(tmp_path, scenario)


def test_samples_that_move_keep_their_experts(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        a = await job.server("r0", step=0.005)
        running = asyncio.create_task(job.generate())
        await until(lambda: a.tokens_sent > 5 * job.count)
        b = await job.server("r1")
        await job.generator.drain("r0")
        await running
        job.check()
        assert b.requests
        assert compare(job) == {}

    play(tmp_path, scenario, replay=True)


def test_the_next_server_reports_what_a_dead_one_did_not(tmp_path: Path) -> None:
    """So what is learnt does not depend on when a server dies."""

    async def scenario(job: Job) -> None:
        a, b = await job.server("r0"), await job.server("r1")
        a.die_after = 90
        await job.generate()
        job.check()
        assert compare(job) == {}
        starts = {request["sampling_params"]["routed_experts_prompt_start"] for request in b.requests}
        assert starts == {0}
        assert any(
            len(request["token_ids"]) > len(job.store.samples.samples(1)[0].prompt_tokens) for request in b.requests
        )

    play(tmp_path, scenario, replay=True)


def test_a_restarted_coordinator_asks_for_experts_that_nobody_reported(tmp_path: Path) -> None:
    """Some samples left a server that reported, others were on their first one."""

    async def scenario(job: Job) -> None:
        a = await job.server("r0", step=0.005)
        running = asyncio.create_task(job.generate())
        await until(lambda: a.tokens_sent > 5 * job.count)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await job.generator.close()
        job.store.close()
        job.open()
        b = await job.server("r1")
        await job.generate()
        job.check()
        assert b.requests
        assert compare(job) == {}

    play(tmp_path, scenario, replay=True)


def test_experts_survive_the_coordinator(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        await job.server("r0")
        await job.generate()
        job.store.close()
        job.open()
        assert compare(job) == {}
        job.store.samples.forget(1)
        assert job.store.samples.experts(1) == {}

    play(tmp_path, scenario, replay=True)


@pytest.mark.parametrize("wrong", [b"%%%", encoded(np.zeros((2, 2), np.uint8)), encoded(np.zeros((1, 1, 1), "f4"))])
def test_an_answer_that_is_no_experts_is_an_error(wrong: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        checked_rows(wrong)


def test_later_pieces_win() -> None:
    def piece(start: int, *experts: int) -> tuple[int, bytes]:
        return start, checked_rows(encoded(np.array(experts, np.uint8).reshape(-1, 1, 1)))

    found = whole([piece(0, 1, 2, 3, 4), piece(2, 8, 9)], 5)
    assert found is not None
    assert found[:, 0, 0].tolist() == [1, 2, 8, 9, UNKNOWN]
    assert whole([], 5) is None
