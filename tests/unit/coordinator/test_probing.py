"""A server serves nothing before it has shown that it serves the weights that it was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

import aiohttp
import pytest

from dovetail.coordinator.workers import publishing
from dovetail.coordinator.workers.publishing import Published, Publisher
from dovetail.protocol.messages import CALLED_OFF, Probe
from helpers.fake_updates import FakeTrainers, UpdatableVllm
from helpers.fake_vllm import TOKEN

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def with_servers(
    servers: list[UpdatableVllm],
    work: Callable[[Publisher], Awaitable[None]],
    tokens: list[int] = TOKENS,
    dtype: str = "float32",
) -> None:
    async def run() -> None:
        trainers = FakeTrainers(tokens, dtype)
        for server in servers:
            await server.start()
        try:
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
                trainers.publisher = Publisher(trainers, session, 20.0)  # type: ignore[arg-type]
                await work(trainers.publisher)
        finally:
            for server in servers:
                await server.stop()

    asyncio.run(run())


def publish(servers: list[UpdatableVllm], version: int = 4, **more: Any) -> Published:
    found: list[Published] = []

    async def work(publisher: Publisher) -> None:
        found.append(await publisher.publish(version, [server.target for server in servers]))

    with_servers(servers, work, **more)
    return found[0]


def test_a_server_that_says_what_the_trainers_say_serves_the_version() -> None:
    servers = [UpdatableVllm("a"), UpdatableVllm("b")]
    published = publish(servers)
    assert published.errors == {"a": None, "b": None}
    assert [server.weight_version for server in servers] == [4, 4]
    assert servers[0].asked == [TOKENS], "a few tokens, once"


def test_a_server_of_other_weights_serves_nothing_says_why_and_hurts_nobody() -> None:
    good, stale = UpdatableVllm("good"), UpdatableVllm("stale")
    stale.serves = 1
    published = publish([good, stale])
    assert published.errors["good"] is None
    said = published.errors["stale"] or ""
    assert said.count(".") < 15
    for part in ("does not serve the weights of version 4", "7 tokens", "by 3 on average", "limit 0.01", "no samples"):
        assert part in said
    assert (good.weight_version, stale.weight_version) == (4, None)
    assert published.result is not None
    assert published.blamed == {"stale"}


def test_a_server_that_only_waited_for_another_is_not_to_blame() -> None:
    lost, waited = UpdatableVllm("lost"), UpdatableVllm("waited")
    lost.refuses, waited.refuses = "the connection broke", f"TransferError: {CALLED_OFF} before all ranks had all of it"
    published = publish([lost, waited])
    assert all(published.errors.values())
    assert published.blamed == {"lost"}


def test_it_may_serve_again_once_it_passes() -> None:
    server = UpdatableVllm("a")
    server.serves = 1

    async def work(publisher: Publisher) -> None:
        assert (await publisher.publish(4, [server.target])).errors["a"]
        server.serves = None
        assert (await publisher.publish(4, [server.target])).errors == {"a": None}

    with_servers([server], work)
    assert server.weight_version == 4


def test_a_server_that_does_not_answer_its_probe_fails_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "PROBE_SECONDS", 0.3)
    good, frozen = UpdatableVllm("good"), UpdatableVllm("frozen")
    frozen.hangs = True
    published = publish([good, frozen])
    assert "did not answer within 0.3 s" in (published.errors["frozen"] or "")
    assert (good.weight_version, frozen.weight_version) == (4, None)


@pytest.mark.parametrize("answer", [{}, {"prompt_logprobs": None}, {"prompt_logprobs": [None, {}]}, [], "x"])
def test_an_answer_that_is_none_is_a_failure(answer: Any) -> None:
    server = UpdatableVllm("a")
    server.probe = answer
    published = publish([server])
    assert "without log-probabilities" in (published.errors["a"] or "")
    assert server.weight_version is None


def test_numbers_that_are_none_fail() -> None:
    probe = Probe(version=2, tokens=[1, 2], logprobs=[-1.0], dtype="float32")
    assert "version 2" in (publishing.verdict(probe, [float("nan")], "float32") or "")


def test_the_limit_is_that_of_the_coarser_dtype() -> None:
    assert publishing.tolerance("float32", "float32") == 0.01
    assert publishing.tolerance("float32", "bfloat16") == publishing.tolerance("bfloat16", "float32") == 0.5
    assert publishing.tolerance("bfloat16", None) == 2.0, "quantised"
    probe = Probe(version=2, tokens=[1, 2, 3], logprobs=[-1.0, -2.0], dtype="bfloat16")
    assert publishing.verdict(probe, [-1.3, -2.1], "bfloat16") is None
    assert publishing.verdict(probe, [-8.3, -2.1], "bfloat16") is not None


def test_a_prompt_never_exceeds_what_the_server_takes() -> None:
    server = UpdatableVllm("a")
    published = publish([server], tokens=list(range(100)))
    assert published.errors == {"a": None}
    assert server.asked == [list(range(63))]


def test_each_data_parallel_engine_is_asked() -> None:
    good, half = UpdatableVllm("good"), UpdatableVllm("half")
    good.engines = half.engines = 2
    half.stale_engine = 1
    published = publish([good, half])
    assert good.asked == half.asked == [TOKENS, TOKENS]
    assert (good.weight_version, half.weight_version) == (4, None)
    assert "version 4" in (published.errors["half"] or "")


def test_without_a_probe_whole_weights_are_served() -> None:
    """Where servers take no two tokens as a prompt, there is nothing to compare."""
    server = UpdatableVllm("a")

    async def work(publisher: Publisher) -> None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            server.arrived = 7
            await publishing.prove(session, publishing.ProbedServer(server.url), None, 7)

    with_servers([server], work)
    assert server.weight_version == 7


def relayed(holder: UpdatableVllm, late: UpdatableVllm, version: int = 4) -> tuple[str | None, bool]:
    """What a relay says, and whether the next publish makes new communicators."""
    found: list[tuple[str | None, bool]] = []

    async def work(publisher: Publisher) -> None:
        assert not publisher.has_probe(4)
        await publisher.publish(4, [holder.target])
        assert publisher.has_probe(4)
        said = await publisher.relay(version, holder.target, late.target)
        found.append((said, publisher._members is None))

    with_servers([holder, late], work)
    return found[0]


def test_a_version_that_came_from_another_server_is_probed_too() -> None:
    late = UpdatableVllm("late")
    assert relayed(UpdatableVllm("holder"), late) == (None, True)
    assert (late.weight_version, late.asked) == (4, [TOKENS])
    late.serves = 1
    said, _ = relayed(UpdatableVllm("holder"), late)
    assert "version 4 came from holder, but it does not serve" in (said or "")


def test_a_relay_ends_as_it_should_although_many_versions_were_published_meanwhile() -> None:
    holder, late = UpdatableVllm("holder"), UpdatableVllm("late")

    async def work(publisher: Publisher) -> None:
        async def push(*arguments: Any) -> Any:
            for version in range(5, 5 + 2 * publishing.MOST_PROBES):
                publisher._remember(version, None)
            return await push_offer(*arguments)

        await publisher.publish(4, [holder.target])
        with mock.patch.object(publishing, "push_offer", push):
            assert await publisher.relay(4, holder.target, late.target) is None

    push_offer = publishing.push_offer
    with_servers([holder, late], work)
    assert (late.weight_version, late.asked) == (4, [TOKENS])


def test_a_version_that_was_given_up_while_its_receiver_woke_is_not_sent() -> None:
    holder, late = UpdatableVllm("holder"), UpdatableVllm("late")

    async def work(publisher: Publisher) -> None:
        await publisher.publish(4, [holder.target])
        for version in range(5, 5 + publishing.MOST_PROBES):
            publisher._remember(version, None)
        said = await publisher.relay(4, holder.target, late.target)
        assert said == "version 4 is not sent to late any more: too many newer ones were published"

    with_servers([holder, late], work)
    assert late.weight_version != 4


def test_a_relay_that_fails_names_the_sender() -> None:
    holder, late = UpdatableVllm("holder"), UpdatableVllm("late")
    holder.sends = "it holds no copy of version 4"
    said, _ = relayed(holder, late)
    assert said is not None
    assert said.startswith("holder cannot send version 4: /dovetail/send_weights answered 409: ")
    assert holder.sends in said
    holder, late.refuses = UpdatableVllm("holder"), "TransferError: the connection broke or stalled"
    said, _ = relayed(holder, late)
    assert said == (
        "version 4 did not come from holder: /update_weights answered 500: TransferError: the connection broke or "
        "stalled"
    )
