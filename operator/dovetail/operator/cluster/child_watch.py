"""Lists and watches the objects of one kind, as Kubernetes' own clients do. It lists once, and then follows the
changes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Protocol

from dovetail.kube.connection import KubeError
from dovetail.kube.resources import Resource
from dovetail.operator.cluster.client import Client, Object
from dovetail.operator.log import log

RECONNECT_SECONDS = 0.1  # a server ends watches from time to time
MISSING_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 10.0
# After these answers the version cannot be used. It is invalid, forgotten or not known yet, or the kind does not exist.
LIST_ANEW = frozenset({400, 404, 410, 504})


class Listener(Protocol):
    """Receives lists and events. Both methods may raise KubeError."""

    async def relist(self, resource: Resource, namespace: str | None) -> str | None:
        """List all objects, store them, and drop those that are gone. Returns the list's version, or None if the API
        server does not have the kind."""

    async def observe(self, thing: Object, deleted: bool) -> None:
        """Take one event."""


async def follow(
    client: Client,
    resource: Resource,
    namespace: str | None,
    selector: str,
    listener: Listener,
    listed: Callable[[bool], Awaitable[None]],
    reconnect: float = RECONNECT_SECONDS,
) -> None:
    """Tell `listener` of each object until cancelled, in the API server's order. After a break the watch goes on from
    the last version that it knows, so no event is lost. If the API server has forgotten that version, everything is
    listed anew. `listed` is called after each list. Its argument says whether the API server has the kind."""
    version: str | None = None
    failures = 0
    while True:
        pause = reconnect
        try:
            if version is None:
                version = await listener.relist(resource, namespace)
                await listed(version is not None)
            if version is None:
                pause = MISSING_SECONDS
            else:
                async with aclosing(client.watch(resource, namespace, selector, version)) as events:
                    async for kind, thing in events:
                        version, failures = str(thing["metadata"]["resourceVersion"]), 0
                        if kind != "BOOKMARK":
                            await listener.observe({**thing, "kind": resource.kind}, kind == "DELETED")
        except KubeError as error:
            if error.status in LIST_ANEW:
                version = None
            pause = min(LONGEST_PAUSE_SECONDS, reconnect * 2.0 ** min(failures, 16))
            failures += 1
            if failures > 4 and error.status != 404:  # shorter breaks are normal
                log(
                    "watch.again",
                    level="warning",
                    kind=resource.kind,
                    status=error.status,
                    error=str(error),
                    seconds=pause,
                )
        await asyncio.sleep(pause)
