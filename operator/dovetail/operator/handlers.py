"""kopf's part: watches that feed the queue, and nothing else: no finalizers, timers, daemons or annotations."""

from __future__ import annotations

import asyncio
from threading import Event
from typing import Any

import kopf

from dovetail.operator.controller import MANAGED, Controller
from dovetail.operator.resources import CHILDREN, RLHFJOB


def watch(controller: Controller, loop: asyncio.AbstractEventLoop, namespaces: tuple[str, ...], stop: Event) -> None:
    """Run kopf until `stop` is set or a watch dies, which raises. `loop` is the controller's.

    For a thread of its own: kopf takes over the main thread's signals, and cancels what it finds in its loop."""
    asyncio.run(
        kopf.operator(
            registry=make_registry(controller, loop),
            settings=make_settings(),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            stop_flag=stop,
        )
    )


def make_registry(controller: Controller, loop: asyncio.AbstractEventLoop) -> kopf.OperatorRegistry:
    """Handlers of every kind that the operator wants to hear of."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**arguments: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)

    for resource in (RLHFJOB, *(r for r in CHILDREN if r.watched)):

        async def observe(event: Any, kind: str = resource.kind, **_: Any) -> None:
            thing, deleted = {"kind": kind, **event["object"]}, event["type"] == "DELETED"
            asyncio.run_coroutine_threadsafe(controller.observe(thing, deleted), loop)

        kopf.on.event(resource.group, resource.version, resource.plural, registry=registry)(observe)
    return registry


def make_settings() -> kopf.OperatorSettings:
    """Least privilege: no looking for CRDs and namespaces; of other kinds only what is ours."""
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.networking.trust_env = False
    for resource in CHILDREN:
        settings.watching.label_selectors[resource.group, resource.version, resource.plural] = MANAGED
    return settings
