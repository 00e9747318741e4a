"""The choice between moving tokens and moving keys and values, and what servers are told of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import assume, given
from hypothesis import strategies as st

from dovetail.coordinator.samples.kv_migration import FRESH_SECONDS, KVMigration, nixl_leg
from dovetail.coordinator.samples.migration_costs import MeasuredCosts, Mechanism, MigrationCosts
from dovetail.coordinator.workers.fleet import Instance, InstanceHealth
from dovetail.protocol.messages import HOLD, PULL, KVAbility, KVHold, KVPull
from helpers.generation_job import Job, play, until

COSTS = MigrationCosts(
    token_bytes=1000,
    block_tokens=16,
    bytes_per_second=1e9,
    prefill_seconds_per_token=1e-4,
    tokens_fixed_seconds=0.01,
    kv_fixed_seconds=0.02,
)
KV = {"transport": "tcp", "host": "127.0.0.1", "ports": [7001], "layout": "float32 x 1", "token_bytes": 1536}

costs_strategy = st.builds(
    MigrationCosts,
    token_bytes=st.integers(1, 10**6),
    block_tokens=st.sampled_from([1, 16, 128]),
    bytes_per_second=st.floats(1e6, 1e11),
    prefill_seconds_per_token=st.floats(1e-7, 1e-2),
    tokens_fixed_seconds=st.floats(0, 1),
    kv_fixed_seconds=st.floats(0, 1),
)


# ---------------------------------------------------------------- costs


def test_a_short_sample_moves_its_tokens_and_a_long_one_its_keys_and_values() -> None:
    assert COSTS.nbytes(17) == 32_000
    assert COSTS.seconds(Mechanism.TOKENS, 64) == pytest.approx(0.0164)
    assert COSTS.seconds(Mechanism.KV, 64) == pytest.approx(0.020064)
    assert [COSTS.choose(n) for n in (64, 512, 4096)] == [Mechanism.TOKENS, Mechanism.KV, Mechanism.KV]
    slow = replace(COSTS, bytes_per_second=5e6)
    assert slow.choose(10**6) is Mechanism.TOKENS
    assert slow.least_tokens() is None


@given(costs_strategy, st.integers(1, 200_000))
def test_the_choice_is_the_cheaper_and_nothing_shorter_than_the_least_moves(costs: MigrationCosts, n: int) -> None:
    chosen = costs.choose(n)
    assert costs.seconds(chosen, n) == min(costs.seconds(m, n) for m in Mechanism)
    least = costs.least_tokens()
    if chosen is Mechanism.KV:
        # Differences of the size of rounding errors aside.
        assume(costs.seconds(Mechanism.TOKENS, n) - costs.seconds(Mechanism.KV, n) > 1e-9)
        assert least is None or n >= least
        if least is None:
            assert costs.kv_fixed_seconds < costs.tokens_fixed_seconds


def test_costs_follow_what_was_measured() -> None:
    measured = MeasuredCosts(COSTS)
    assert measured.costs == COSTS
    # Prefill is ten times as fast as assumed, moving as slow as assumed.
    for _ in range(40):
        measured.measured(Mechanism.TOKENS, 512, COSTS.seconds(Mechanism.TOKENS, 512) / 10)
        measured.measured(Mechanism.KV, 512, COSTS.seconds(Mechanism.KV, 512))
    assert measured.costs.seconds(Mechanism.TOKENS, 512) == pytest.approx(0.00612, rel=1e-3)
    assert measured.costs.choose(512) is Mechanism.TOKENS
    assert measured.costs.choose(100_000) is Mechanism.KV
    # A transfer that hung and was then computed anew counts with all its time.
    for _ in range(40):
        measured.measured(Mechanism.TOKENS, 4096, COSTS.seconds(Mechanism.TOKENS, 4096))
    assert measured.costs.choose(4096) is Mechanism.KV
    measured.measured(Mechanism.KV, 4096, 20.0)
    assert measured.costs.choose(4096) is Mechanism.TOKENS


# ---------------------------------------------------------------- what servers are told


def instance(name: str = "r0", kv: Any = KV, version: int | None = 3) -> Instance:
    return Instance(name, "rollout", "g", "http://x", "1", InstanceHealth.HEALTHY, True, version, {"kv": kv}, 0.0, "")


def told(
    kv: KVMigration, target: Instance, source: Instance | None = None, tokens: int = 3000, resumed: bool = True
) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        departure = None if source is None else kv.left(source, "old-id")
        body = {"request_id": "new-id", "token_ids": list(range(tokens))}
        async with aiohttp.ClientSession() as session:
            await kv.prepare(session, body, target, departure, resumed)
        params: dict[str, Any] = body.get("kv_transfer_params", {})
        return params

    return asyncio.run(run())


def test_a_request_may_be_held_and_its_successor_fetches_it() -> None:
    kv = KVMigration()
    first = told(kv, instance("r0"), resumed=False)
    hold = KVHold.model_validate(first.pop(HOLD))
    assert (hold.key, hold.weights, first) == ("new-id", 3, {})
    assert 0 < hold.min_tokens < 1000
    second = told(kv, instance("r1"), instance("r0"))
    pull = KVPull.model_validate(second[PULL])
    assert (pull.key, pull.host, pull.ports, pull.weights) == ("old-id", "127.0.0.1", [7001], 3)
    assert HOLD in second, "it may have to move again"


@pytest.mark.parametrize(
    ("target", "source", "tokens"),
    [
        (instance("r1"), None, 3000),
        (instance("r1"), instance("r0", kv=None), 3000),
        (instance("r1"), instance("r0", kv={"transport": "pigeon"}), 3000),
        (instance("r1", kv=None), instance("r0"), 3000),
        (instance("r1", version=4), instance("r0", version=3), 3000),
        (instance("r1"), instance("r0", version=None), 3000),
        (instance("r1", kv={**KV, "layout": "bfloat16 x 1"}), instance("r0"), 3000),
        (instance("r0"), instance("r0"), 3000),
        (instance("r1"), instance("r0"), 20),
    ],
    ids=[
        "nothing-held",
        "source-cannot",
        "unknown",
        "target-cannot",
        "newer-weights",
        "no-weights",
        "other-layout",
        "same",
        "short",
    ],
)
def test_anything_else_is_prefilled(target: Instance, source: Instance | None, tokens: int) -> None:
    assert PULL not in told(KVMigration(), target, source, tokens)


def test_blocks_left_long_ago_are_not_asked_for() -> None:
    now = 0.0
    kv = KVMigration(lambda: now)
    departure = kv.left(instance("r0"), "old-id")
    now = FRESH_SECONDS + 1

    async def run() -> dict[str, Any]:
        body: dict[str, Any] = {"request_id": "new-id", "token_ids": list(range(3000))}
        async with aiohttp.ClientSession() as session:
            await kv.prepare(session, body, instance("r1"), departure, True)
        return body

    assert PULL not in asyncio.run(run())["kv_transfer_params"]


def test_slow_moves_are_given_up_for_prefills() -> None:
    now = 0.0
    kv = KVMigration(lambda: now)

    async def run() -> None:
        nonlocal now
        body: dict[str, Any] = {"request_id": "new-id", "token_ids": list(range(3000))}
        departure = kv.left(instance("r0"), "old-id")
        async with aiohttp.ClientSession() as session:
            arrived = await kv.prepare(session, body, instance("r1"), departure, True)
        now += 15.0
        assert arrived() == (Mechanism.KV, 15.0)
        assert arrived() is None, "only the first tokens count"

    asyncio.run(run())
    assert kv.moves == {Mechanism.KV: 1}
    assert kv.nbytes == 3000 * 1536
    assert PULL not in told(kv, instance("r1"), instance("r0"))
    assert HOLD not in told(kv, instance("r1")), "so nothing need be kept either"


# ---------------------------------------------------------------- NIXL


def leg(answer: Callable[[dict[str, Any]], web.Response]) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        async def generate(request: web.Request) -> web.Response:
            return answer(json.loads(await request.read()))

        app = web.Application()
        app.router.add_post("/inference/v1/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        try:
            async with aiohttp.ClientSession() as session:
                return await nixl_leg(session, f"http://127.0.0.1:{port}", [1, 2, 3])
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_nixl_takes_the_parameters_of_one_more_token_on_the_old_server() -> None:
    handed = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "e", "remote_host": "h"}

    def answer(body: dict[str, Any]) -> web.Response:
        assert body["token_ids"] == [1, 2, 3]
        assert body["sampling_params"]["max_tokens"] == 1
        assert body["kv_transfer_params"]["do_remote_decode"] is True
        return web.json_response({"choices": [], "kv_transfer_params": handed})

    assert leg(answer) == handed
    assert leg(lambda body: web.json_response({"choices": []})) == {}
    assert leg(lambda body: web.json_response({"error": "no"}, status=500)) == {}
    assert leg(lambda body: web.Response(text="not json", content_type="application/json")) == {}


# ---------------------------------------------------------------- in a generation


def test_drained_samples_ask_for_the_blocks_they_left_and_fail_over_without_them(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        one = await job.server("r0", join=False, step=0.005)
        two = await job.server("r1", join=False, step=0.005)
        for server in (one, two):
            server.join(job.fleet, kv=KV)
        # Tokens as if they had taken long, so that a move of few tokens pays.
        job.generator.kv._measured(KVAbility.model_validate(KV)).measured(Mechanism.TOKENS, 10, 10.0)
        task = asyncio.create_task(job.generate())
        await until(lambda: one.tokens_sent > 40)
        before = len(two.requests)
        await job.generator.drain("r0")
        await task
        job.check()
        job.reported_once()
        assert all(HOLD in r["kv_transfer_params"] for r in one.requests + two.requests)
        moved = [r for r in two.requests[before:] if PULL in r["kv_transfer_params"]]
        assert moved
        asked = {r["kv_transfer_params"][PULL]["key"] for r in moved}
        assert asked <= {r["kv_transfer_params"][HOLD]["key"] for r in one.requests}
        assert asked <= set(one.aborted)
        assert job.generator.kv.moves[Mechanism.KV] == len(moved)
        events = [fields for event, fields in job.events if event == "sample.moved"]
        assert {e["source"] for e in events if e["mechanism"] == "kv"} == {"r0"}

    play(tmp_path, scenario)


def test_servers_without_the_ability_are_told_nothing(tmp_path: Path) -> None:
    async def scenario(job: Job) -> None:
        one, two = await job.server("r0", step=0.005), await job.server("r1", step=0.005)
        task = asyncio.create_task(job.generate())
        await until(lambda: one.tokens_sent > 40)
        await job.generator.drain("r0")
        await task
        job.check()
        assert not any("kv_transfer_params" in r for r in one.requests + two.requests)
        assert job.generator.kv.moves[Mechanism.TOKENS] > 0

    play(tmp_path, scenario)
