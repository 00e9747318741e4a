"""The part of the operator that kopf runs. It watches RLHFJobs. The operator uses no finalizers, timers, daemons or
annotations."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import kopf

from dovetail.kube.resources import RLHFJOB
from dovetail.operator.reconcile.children import Object
from dovetail.protocol.process.endings import cancel

Observe = Callable[[Object, bool], Awaitable[None]]
# The number of objects in one part of the first list. Each may have more than 1 MB, and takes many times that in
# memory.
CHUNK = 5


async def watch_jobs(observe: Observe, namespaces: tuple[str, ...], on_signals: Callable[[], None]) -> None:
    """Run kopf until cancelled. `observe` is called with each RLHFJob, and whether it was deleted. Raises if a watch
    dies. kopf takes over the process's signals, and `on_signals` is called to take them back."""
    tasks = await kopf.spawn_tasks(
        registry=make_registry(observe),
        settings=make_settings(),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
    )
    on_signals()
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        raise RuntimeError("kopf's watches ended")
    finally:
        # kopf.run_tasks would also cancel the tasks of others in this loop.
        await cancel(tasks)


def make_registry(observe: Observe) -> kopf.OperatorRegistry:
    """The handler of RLHFJobs."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**arguments: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)

    @kopf.on.event(RLHFJOB.group, RLHFJOB.version, RLHFJOB.plural, registry=registry)
    async def on_event(event: Any, **_: Any) -> None:
        await observe({**event["object"], "kind": RLHFJOB.kind}, event["type"] == "DELETED")

    return registry


def make_settings() -> kopf.OperatorSettings:
    """kopf's settings with least privilege. kopf does not look for CRDs and namespaces, and writes nothing."""
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.networking.trust_env = False
    settings.watching.chunk_size = CHUNK
    return settings
