"""Freed servers sleep while the scorer beside them works, and wake before they get weights or requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from dovetail.coordinator.fleet.fleet import Fleet
from dovetail.coordinator.fusion.sleep import Sleepers
from dovetail.protocol.messages import Register


class Server:
    """Answers /sleep and /wake_up with `status` and remembers them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.status = 200

    async def handle(self, request: web.Request) -> web.Response:
        self.calls.append(request.path_qs)
        return web.Response(status=self.status)


def play(
    scenario: Callable[[Server, Fleet, Sleepers, list[tuple[str, str]]], Awaitable[None]], sleep: bool = True
) -> None:
    async def main() -> None:
        server = Server()
        app = web.Application()
        app.router.add_post("/{route:.*}", server.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        fleet = Fleet(time.monotonic, lambda event, **fields: None)
        fleet.publish(1)
        join(fleet, f"http://127.0.0.1:{runner.addresses[0][1]}", "1", sleep)
        swaps: list[tuple[str, str]] = []
        async with aiohttp.ClientSession() as session:
            sleepers = Sleepers(
                fleet, session, lambda event, **fields: None, lambda name, way, _: swaps.append((name, way))
            )
            async with asyncio.timeout(240):
                await scenario(server, fleet, sleepers, swaps)
            sleepers.close()
        await runner.cleanup()

    asyncio.run(main())


def join(fleet: Fleet, url: str, incarnation: str, sleep: bool = True) -> None:
    message: dict[str, Any] = {"name": "r0", "kind": "rollout", "group": "g", "url": url, "ready": True}
    message |= {"incarnation": incarnation, "weight_version": 1, "abilities": {"sleep": sleep}}
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
        assert swaps == [("r0", "in"), ("r0", "out")]

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
        assert swaps == [("r0", "in"), ("r0", "out")], "a scorer's part is no swap of its own"

    play(scenario)
