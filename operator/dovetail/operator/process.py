"""Runs one replica of the operator. It serves its probes, waits for the lease, and works while it holds the lease.

kopf watches the RLHFJobs. It gets no finalizers, timers, daemons or annotations to work with."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import kopf
from aiohttp import web

from dovetail.kube import coordinator_http
from dovetail.kube.connection import connect
from dovetail.kube.resources import POD_GROUPS, RLHFJOB
from dovetail.operator.cluster.client import Client, until_served
from dovetail.operator.cluster.coordinator_poller import CoordinatorPoller
from dovetail.operator.cluster.leader import LEASE, Claim, Lock, NoClaim, lead
from dovetail.operator.job_controller import Controller
from dovetail.operator.log import log, log_libraries
from dovetail.operator.operator_metrics import OperatorMetrics
from dovetail.operator.operator_settings import OperatorSettings
from dovetail.operator.plan_worker import Planner
from dovetail.operator.reconcile.children import Object
from dovetail.protocol.http import serving
from dovetail.protocol.process.endings import BAD_CONFIGURATION, cancel
from dovetail.protocol.process.garbage import keep_what_is_here

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


# The process is restarted if a job that is due has waited this long for a worker, or if the lease could not be read.
STUCK_SECONDS = 120.0


@dataclass
class ProbeHealth:
    """The state that the probes show. A follower is alive while it can read the lease. A leader must also process its
    jobs in time."""

    lease_seen: float
    controller: Controller | None = None

    def problem(self, now: float) -> str | None:
        if now - self.lease_seen > STUCK_SECONDS:
            return f"the lease could not be read for {now - self.lease_seen:.0f} s"
        lag = self.controller.queue.lag() if self.controller is not None else 0.0
        return f"a job has waited for {lag:.0f} s" if lag > STUCK_SECONDS else None


async def run(settings: OperatorSettings) -> int:
    """Serve until SIGTERM or until the lease is lost."""
    keep_what_is_here(10_000, older=20)  # data that is read from JSON has no cycles
    log_libraries()
    metrics, health = OperatorMetrics(), ProbeHealth(time.monotonic())
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signals() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)

    on_signals()
    api = await connect()

    def seen() -> None:
        health.lease_seen = time.monotonic()

    async def work() -> None:
        log("leader.started", identity=settings.identity)
        metrics.leading.set(1)
        await _operate(settings, Client(api, gang=POD_GROUPS.get(settings.gang)), metrics, health, on_signals)

    lock = Lock(LEASE, settings.namespace, settings.identity, api, seen)
    claim = Claim(lock, api, seen)

    async def claimed() -> None:
        await lead(claim, work)

    server = await _serve(settings, metrics, health)
    leading = asyncio.create_task(lead(lock, work if settings.namespaces else claimed))
    waiting = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait({leading, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if leading.done():
            error = leading.exception()
            if isinstance(error, NoClaim):
                log("leader.refused", level="error", error=str(error))
                return BAD_CONFIGURATION
            said = f"{type(error).__name__}: {error}" if error is not None else "the lease could not be renewed"
            log("leader.lost", level="error", error=said)
            return 1
        log("operator.stopped")
        return 0
    finally:
        await cancel((leading, waiting))
        if not settings.namespaces:
            await claim.release()
        await lock.release()
        await server.cleanup()
        await api.close()


async def _operate(
    settings: OperatorSettings,
    client: Client,
    metrics: OperatorMetrics,
    health: ProbeHealth,
    on_signals: Callable[[], None],
) -> None:
    """Do the leader's work. Ends when a watch dies or when it is cancelled."""
    planner = Planner(settings.planner_seconds)
    planner.use(given=settings.gpu_products)
    async with coordinator_http.session() as session:
        coordinators = CoordinatorPoller(session, settings.progress_seconds, lambda key: controller.queue.add(key))
        controller = Controller(client, planner, coordinators, settings, metrics)
        health.controller = controller
        controller.nodes.found = lambda products: planner.use(found=products)
        planner.guess = lambda: settings.nodes_seconds <= 0 or controller.nodes.refused
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(controller.run())
                await _watch(controller, client, settings.namespaces, on_signals)
        finally:
            health.controller = None
            metrics.jobs.clear()  # the next leader shows them
            await coordinators.close()
            await planner.close()


async def _watch(
    controller: Controller, client: Client, namespaces: tuple[str, ...], on_signals: Callable[[], None]
) -> None:
    """Watch RLHFJobs, whenever the API server has them. Raises when the watch dies for another reason."""
    while True:
        await until_served(client, RLHFJOB)
        watching = asyncio.create_task(watch_jobs(controller.observe, namespaces, on_signals))
        try:
            await asyncio.wait({watching})
        finally:
            await cancel([watching])
        if await client.serves(RLHFJOB):
            raise watching.exception() or RuntimeError("the watches ended")
        for namespace in namespaces or (None,):
            await controller.relist(RLHFJOB, namespace)


async def _serve(settings: OperatorSettings, metrics: OperatorMetrics, health: ProbeHealth) -> web.AppRunner:
    """Serve /healthz, /readyz and /metrics, on every replica."""

    async def healthz(_: web.Request) -> web.Response:
        problem = health.problem(time.monotonic())
        return web.Response(status=503 if problem else 200, text=problem or "ok")

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", serving.healthz)])
    app.add_routes([web.get("/metrics", serving.metrics(metrics.registry))])
    return await serving.listen(app, "0.0.0.0", settings.health_port)
