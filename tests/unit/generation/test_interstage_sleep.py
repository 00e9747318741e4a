"""Freed servers sleep while the scorer beside them works, and wake before they get weights or requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from dovetail.coordinator.samples.device_sharing import Devices
from dovetail.coordinator.samples.fusion.sleep import Sleepers
from dovetail.coordinator.workers.fleet import Fleet
from dovetail.protocol.messages import Register
from helpers.coordinated import job_of
from helpers.patience import PATIENCE
from helpers.records import Records


class Server:
    """Answers /sleep and /wake_up with `status` and remembers them. It wakes up when `may_wake` is set."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.status = 200
        self.may_wake = asyncio.Event()
        self.may_wake.set()

    async def handle(self, request: web.Request) -> web.Response:
        self.calls.append(request.path_qs)
        if request.path == "/wake_up":
            await self.may_wake.wait()
        return web.Response(status=self.status)


def play(
    scenario: Callable[[Server, Fleet, Sleepers, list[tuple[str, str]]], Awaitable[None]],
    sleep: bool = True,
    published: bool = True,
) -> None:
    async def main() -> None:
        server = Server()
        app = web.Application()
        app.router.add_post("/{route:.*}", server.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        fleet = Fleet(time.monotonic, lambda event, **fields: None)
        if published:
            fleet.publish(1)
        join(fleet, f"http://127.0.0.1:{runner.addresses[0][1]}", "1", sleep)
        swaps: list[tuple[str, str]] = []
        async with aiohttp.ClientSession() as session:
            sleepers = Sleepers(
                fleet, session, lambda event, **fields: None, lambda group, way, _: swaps.append((group, way))
            )
            async with asyncio.timeout(PATIENCE):
                await scenario(server, fleet, sleepers, swaps)
            sleepers.close()
        await runner.cleanup()

    asyncio.run(main())


def join(fleet: Fleet, url: str, incarnation: str, sleep: bool = True, asleep: bool = False) -> None:
    message: dict[str, Any] = {"name": "r0", "kind": "rollout", "group": "g", "url": url, "ready": True}
    message |= {"incarnation": incarnation, "weight_version": 1, "abilities": {"sleep": sleep}, "asleep": asleep}
    fleet.register(Register.model_validate(message))


async def asleep(sleepers: Sleepers) -> None:
    while not sleepers.out_of_the_way("r0"):  # noqa: ASYNC110
        await asyncio.sleep(0.002)


def test_a_freed_server_sleeps_gets_nothing_and_wakes_for_its_weights() -> None:
    async def scenario(server: Server, fleet: Fleet, sleepers: Sleepers, swaps: list[tuple[str, str]]) -> None:
        assert not sleepers.out_of_the_way("r0")
        sleepers.free(["r0"])
        sleepers.free(["r0"])
        assert fleet.eligible("rollout") == []
        await asleep(sleepers)
        await sleepers.wake("r0")
        await sleepers.wake("r0")
        assert server.calls == ["/sleep?level=1", "/wake_up"]
        assert [i.name for i in fleet.eligible("rollout")] == ["r0"]
        assert swaps == [("g", "in"), ("g", "out")]

    play(scenario)


def test_a_server_beside_trainers_is_asleep_before_they_begin() -> None:
    async def scenario(server: Server, fleet: Fleet, sleepers: Sleepers, swaps: list[tuple[str, str]]) -> None:
        await sleepers.rest(["r0", "unknown"])
        assert server.calls == ["/sleep?level=1"]
        assert sleepers.out_of_the_way("r0")
        assert not fleet.has_current("rollout")
        await sleepers.rest(["r0"])
        await sleepers.wake("r0")
        assert server.calls == ["/sleep?level=1", "/wake_up"]
        assert fleet.has_current("rollout")

    play(scenario)


def test_a_server_that_cannot_sleep_is_left_alone() -> None:
    async def scenario(server: Server, fleet: Fleet, sleepers: Sleepers, swaps: list[tuple[str, str]]) -> None:
        sleepers.free(["r0", "unknown"])
        assert sleepers.out_of_the_way("r0")
        assert fleet.has_current("rollout")
        await sleepers.wake_all()
        assert server.calls == []

    play(scenario, sleep=False)


def test_a_server_that_does_not_wake_up_is_a_failure_of_its_own() -> None:
    async def scenario(server: Server, fleet: Fleet, sleepers: Sleepers, swaps: list[tuple[str, str]]) -> None:
        sleepers.free(["r0"])
        await asleep(sleepers)
        server.status = 500
        with pytest.raises(OSError, match="r0 did not wake up"):
            await sleepers.wake("r0")
        sleepers.free(["r0"])
        await asleep(sleepers)
        await sleepers.wake_all()
        assert fleet.has_current("rollout"), "it never fell asleep, so it is awake"

    play(scenario)


def test_a_new_process_is_awake() -> None:
    async def scenario(server: Server, fleet: Fleet, sleepers: Sleepers, swaps: list[tuple[str, str]]) -> None:
        sleepers.free(["r0"])
        await asleep(sleepers)
        instance = fleet.get("r0")
        assert instance is not None
        join(fleet, instance.url, "2")
        await sleepers.wake("r0")
        assert server.calls == ["/sleep?level=1"]
        assert fleet.has_current("rollout")

    play(scenario)


def test_who_needs_a_server_waits_until_it_is_awake() -> None:
    async def scenario(server: Server, fleet: Fleet, sleepers: Sleepers, swaps: list[tuple[str, str]]) -> None:
        await sleepers.rest(["r0"])
        server.may_wake.clear()
        first = asyncio.create_task(sleepers.wake("r0"))
        while "/wake_up" not in server.calls:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        second = asyncio.create_task(sleepers.wake("r0"))
        await asyncio.sleep(0.02)
        assert not second.done(), "it would send weights to a server that is still asleep"
        server.may_wake.set()
        await asyncio.gather(first, second)
        assert server.calls == ["/sleep?level=1", "/wake_up"]

    play(scenario)


def test_a_server_that_wakes_slowly_sleeps_again_while_the_trainers_work() -> None:
    async def scenario(server: Server, fleet: Fleet, sleepers: Sleepers, swaps: list[tuple[str, str]]) -> None:
        await sleepers.rest(["r0"])
        server.may_wake.clear()
        waking = asyncio.create_task(sleepers.wake("r0"))
        while "/wake_up" not in server.calls:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        resting = asyncio.create_task(sleepers.rest(["r0"]))
        await asyncio.sleep(0.02)
        assert server.calls == ["/sleep?level=1", "/wake_up"], "it cannot sleep before it is awake"
        server.may_wake.set()
        await asyncio.gather(waking, resting)
        assert server.calls == ["/sleep?level=1", "/wake_up", "/sleep?level=1"]
        assert not fleet.has_current("rollout"), "it sleeps, so it gets no requests"

    play(scenario)


def test_a_server_that_was_just_told_to_sleep_can_be_woken() -> None:
    async def scenario(server: Server, fleet: Fleet, sleepers: Sleepers, swaps: list[tuple[str, str]]) -> None:
        resting = asyncio.create_task(sleepers.rest(["r0"]))
        waking = asyncio.create_task(sleepers.wake("r0"))
        async with asyncio.timeout(30):
            await asyncio.gather(resting, waking)
        assert server.calls == ["/sleep?level=1", "/wake_up"]
        assert fleet.has_current("rollout")

    play(scenario)


def holding(fleet: Fleet, sleepers: Sleepers) -> tuple[Devices, asyncio.Task[None]]:
    """The devices of a restarted coordinator, and their background task."""
    spec = SimpleNamespace(
        groups=[SimpleNamespace(name="g", colocated=True)],
        ppo=SimpleNamespace(reads_reference=False, advantage="grpo"),
        plan=SimpleNamespace(inter_stage_fusion="Off"),
        generation=SimpleNamespace(max_concurrent=1, max_tokens=1),
        seed=1,
    )
    scorers: Any = SimpleNamespace(load_all=sleepers._sleeps)
    devices = Devices(job_of(Records(), spec=spec), fleet, sleepers._session, scorers, scorers)
    devices._sleepers = sleepers
    return devices, asyncio.create_task(devices.hold())


@pytest.mark.slow
@pytest.mark.parametrize("current", [True, False])
def test_after_a_restart_servers_that_hold_their_weights_are_woken_too(current: bool) -> None:
    """A restarted coordinator puts them to sleep until it publishes. Nobody sends them what they hold already."""

    async def scenario(server: Server, fleet: Fleet, sleepers: Sleepers, swaps: list[tuple[str, str]]) -> None:
        _, task = holding(fleet, sleepers)
        await asleep(sleepers)
        fleet.publish(1 if current else 2)
        await asyncio.sleep(0.7)
        if current:
            while not fleet.has_current("rollout"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        task.cancel()
        # The other one is woken when it takes version 2.
        assert server.calls == ["/sleep?level=1", "/wake_up"][: 2 if current else 1]

    play(scenario, published=False)


@pytest.mark.slow
def test_a_server_that_slept_before_the_coordinator_came_gets_nothing_and_is_woken() -> None:
    async def scenario(server: Server, fleet: Fleet, sleepers: Sleepers, swaps: list[tuple[str, str]]) -> None:
        url = fleet.instances()[0].url
        join(fleet, url, "2", asleep=True)
        assert fleet.eligible("rollout") == [], "its requests would wait until it is woken"
        _, task = holding(fleet, sleepers)
        while not fleet.has_current("rollout"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert server.calls == ["/wake_up"]
        # This report was written before it was awake.
        join(fleet, url, "2", asleep=True)
        join(fleet, url, "2")
        await asyncio.sleep(0.7)
        assert server.calls == ["/wake_up"]
        assert fleet.has_current("rollout")
        task.cancel()

    play(scenario)


@pytest.mark.slow
def test_a_server_that_comes_asleep_while_the_trainers_work_is_woken_for_its_weights() -> None:
    async def scenario(server: Server, fleet: Fleet, sleepers: Sleepers, swaps: list[tuple[str, str]]) -> None:
        maker, task = holding(fleet, sleepers)
        await maker.rest()
        join(fleet, fleet.instances()[0].url, "2", asleep=True)
        await asyncio.sleep(0.7)
        assert server.calls == ["/sleep?level=1"], "the trainers use its GPU"
        assert not fleet.has_current("rollout")
        fleet.publish(2)
        await sleepers.wake("r0")
        assert server.calls == ["/sleep?level=1", "/wake_up"]
        task.cancel()

    play(scenario)


def test_a_server_that_is_found_asleep_is_not_told_to_sleep_again() -> None:
    async def scenario(server: Server, fleet: Fleet, sleepers: Sleepers, swaps: list[tuple[str, str]]) -> None:
        join(fleet, fleet.instances()[0].url, "2", asleep=True)
        await sleepers.rest(["r0"])
        assert sleepers.out_of_the_way("r0")
        assert server.calls == []
        await sleepers.wake_all()
        assert server.calls == ["/wake_up"]
        assert fleet.has_current("rollout")

    play(scenario)


def test_a_server_that_failed_to_wake_up_is_tried_again() -> None:
    async def scenario(server: Server, fleet: Fleet, sleepers: Sleepers, swaps: list[tuple[str, str]]) -> None:
        url = fleet.instances()[0].url
        await sleepers.rest(["r0"])
        server.status = 500
        with pytest.raises(OSError, match="r0 did not wake up"):
            await sleepers.wake("r0")
        server.status = 200
        join(fleet, url, "1", asleep=True)
        join(fleet, url, "1", asleep=True)
        assert fleet.eligible("rollout") == [], "it still sleeps"
        await sleepers.wake("r0")
        assert server.calls == ["/sleep?level=1", "/wake_up", "/wake_up"]
        assert fleet.has_current("rollout")

    play(scenario)


def test_the_scorer_brings_its_weights_in_and_takes_them_out_before_the_server_wakes() -> None:
    async def scenario(server: Server, fleet: Fleet, sleepers: Sleepers, swaps: list[tuple[str, str]]) -> None:
        rollout = fleet.get("r0")
        assert rollout is not None
        scorer: dict[str, Any] = {
            "name": "r0-scorer",
            "kind": "scorer",
            "group": "g",
            "url": rollout.url,
            "ready": True,
        }
        scorer |= {"incarnation": "1", "weight_version": 1, "abilities": {"host_weights": True}}
        fleet.register(Register.model_validate(scorer))
        sleepers.expect(["r0"])
        sleepers.expect(["r0"])
        while not server.calls:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        sleepers.free(["r0"])
        await asleep(sleepers)
        await sleepers.wake("r0")
        assert server.calls == ["/v1/bring", "/sleep?level=1", "/v1/bring", "/v1/leave", "/wake_up"]
        assert swaps == [("g", "in"), ("g", "out")], "a scorer's part is no swap of its own"

    play(scenario)
