"""kopf's part: watches that feed the queue. The operator uses no finalizers, timers, daemons or annotations."""

from __future__ import annotations

import asyncio
from threading import Event, Lock
from typing import Any

import kopf
import uvloop

from dovetail.kube.resources import CHILDREN, RLHFJOB
from dovetail.operator.cluster.kopf_watches import OnEvent, direct_watches
from dovetail.operator.controller import MANAGED, Controller
from dovetail.operator.reconcile.children import Object


def watch(controller: Controller, loop: asyncio.AbstractEventLoop, namespaces: tuple[str, ...], stop: Event) -> None:
    """Run kopf until `stop` is set. Raises if a watch dies. `loop` is the controller's loop.

    Run this in a thread of its own: kopf takes over the main thread's signals and cancels the tasks in its loop."""
    feed = _Feed(controller, loop)

    async def work() -> None:
        try:
            await kopf.operator(
                registry=make_registry(feed.give),
                settings=make_settings(),
                standalone=True,
                clusterwide=not namespaces,
                namespaces=namespaces,
                stop_flag=stop,
            )
        finally:
            stop.set()  # a thread of kopf's waits for it, and the runner would wait for that thread

    with direct_watches(feed.give), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())


# Events of one job come in bursts: its pods start together.
GATHER_SECONDS = 0.02
# Of objects that are there when the operator starts: a pod of 10 KB takes ten times that in memory.
CHUNK = 100


class _Feed:
    """Events from kopf's thread to the controller's loop, which is woken once for what comes within GATHER_SECONDS."""

    def __init__(self, controller: Controller, loop: asyncio.AbstractEventLoop) -> None:
        self._controller = controller
        self._loop = loop
        self._lock, self._turn = Lock(), asyncio.Lock()
        self._waiting: list[tuple[Object, bool]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def give(self, kind: str, thing: Object, deleted: bool) -> None:
        with self._lock:
            self._waiting.append(({"kind": kind, **thing}, deleted))
            if len(self._waiting) > 1:
                return
        self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._loop.call_later(GATHER_SECONDS, self._start)

    def _start(self) -> None:
        task = self._loop.create_task(self._take())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take(self) -> None:
        async with self._turn:  # in the order in which they came
            with self._lock:
                events, self._waiting = self._waiting, []
            for thing, deleted in events:
                await self._controller.observe(thing, deleted)


def make_registry(on_event: OnEvent) -> kopf.OperatorRegistry:
    """Handlers of every kind that the operator watches. kopf watches what has a handler."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**arguments: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)

    for resource in (RLHFJOB, *(r for r in CHILDREN if r.watched)):

        async def observe(event: Any, kind: str = resource.kind, **_: Any) -> None:
            on_event(kind, event["object"], event["type"] == "DELETED")

        kopf.on.event(resource.group, resource.version, resource.plural, registry=registry)(observe)
    return registry


def make_settings() -> kopf.OperatorSettings:
    """kopf's settings with least privilege: kopf does not look for CRDs and namespaces, and watches only objects of
    ours."""
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.networking.trust_env = False
    settings.watching.chunk_size = CHUNK
    for resource in CHILDREN:
        settings.watching.label_selectors[resource.group, resource.version, resource.plural] = MANAGED
    return settings
