"""The coordinator's part while the trainers are gone: a server that came late gets its weights from another one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn
from unittest import mock

import aiohttp

from dovetail.coordinator.workers import publishing
from dovetail.coordinator.workers.fleet import Fleet, Timeouts
from dovetail.coordinator.workers.publishing import Publisher, Target
from dovetail.coordinator.workers.weights import Weights
from dovetail.protocol.messages import Register
from helpers.coordinated import job_of
from helpers.generation_job import until
from helpers.vllm_servers import TOKEN, Server
from helpers.weight_trainer import probe_of

DEADLINE_SECONDS = 240.0


class Ready:
    async def prepare(self, target: Target) -> None:
        """A server is always ready for weights."""


class GoneTrainers:
    """Trainers that nobody restores."""

    step = 0
    keeps_versions = False

    def need(self, version: int) -> None:
        pass

    def can_send(self, version: int) -> bool:
        return False

    async def at_target(self, action: Any) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError


def relay(
    servers: Sequence[Server],
    late: Server,
    model: Any,
    version: int,
    on_offer: Callable[[str], None] = lambda receiver: None,
) -> list[tuple[str, dict[str, Any]]]:
    """Wait until `late` serves the version, which others of the `servers` hold. Returns the coordinator's events about
    weights. `on_offer` is called when a server listens, and before the receiver hears of it."""
    return asyncio.run(_relay(servers, late, model, version, on_offer))


async def _relay(
    servers: Sequence[Server],
    late: Server,
    model: Any,
    version: int,
    on_offer: Callable[[str], None],
) -> list[tuple[str, dict[str, Any]]]:
    events: list[tuple[str, dict[str, Any]]] = []

    def log(event: str, **fields: Any) -> None:
        if event.startswith("weights."):
            events.append((event, fields))

    async def push(session: Any, offer: Any, receivers: Any, *rest: Any) -> Any:
        on_offer(receivers[0][0].name)
        return await push_offer(session, offer, receivers, *rest)

    push_offer = publishing.push_offer
    # Nobody reports here.
    fleet = Fleet(time.monotonic, log, Timeouts(suspect=3600.0, dead=3600.0), versioned=("rollout",))
    for server in servers:
        fleet.register(_report(server))
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        publisher = Publisher(None, session, DEADLINE_SECONDS)  # type: ignore[arg-type]
        publisher._remember(version, probe_of(model, version))
        job = job_of(None, log=log, start_seconds=900.0)
        weights = Weights(job, fleet, publisher, GoneTrainers(), Ready())  # type: ignore[arg-type]
        weights.begin(version)
        holding = asyncio.create_task(weights.hold())
        try:
            with mock.patch.object(publishing, "push_offer", push):
                await until(lambda: holding.done() or late.name in {t.name for t in fleet.holders(version)}, 1200)
            assert not holding.done(), holding
        finally:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
    return events


def _report(server: Server) -> Register:
    info = server.call("/dovetail/info")[1]
    return Register(
        name=server.name,
        kind="rollout",
        group="rollout",
        url=server.url,
        incarnation=info["incarnation"],
        ready=True,
        weight_version=info["weight_version"],
        abilities=info,
    )
