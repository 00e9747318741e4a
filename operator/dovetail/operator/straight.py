"""kopf's watches without kopf's bookkeeping: what they bring goes straight to the operator.

For every object kopf would run a task, remember it, copy it and compare it with what it was, make three loggers and
look for handlers. Ours need none of it, and it took much of the operator's processor time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from kopf._cogs.clients import api, watching
from kopf._core.reactor import queueing
from pydantic_core import from_json

Hear = Callable[[str, Any, bool], None]


@contextmanager
def straight(hear: Hear) -> Iterator[None]:
    """In the block, which is to start and end all of kopf, its watchers call `hear` with kind, object, and whether it
    was deleted: in the order of the API server. As kopf's own they reconnect, list anew when they were away for too
    long, and raise what cannot be helped, which ends the operator."""

    async def watcher(*, settings: Any, resource: Any, namespace: Any, operator_paused: Any = None, **_: Any) -> None:
        stream = watching.infinite_watch(
            settings=settings, resource=resource, namespace=namespace, operator_paused=operator_paused
        )
        async for event in stream:
            # What is no object of the cluster: the end of a list, a version to go on from.
            if not isinstance(event, watching.Bookmark) and event["type"] != "BOOKMARK":
                hear(resource.kind, event["object"], event["type"] == "DELETED")

    kopfs, queueing.watcher = queueing.watcher, watcher
    module: Any = api
    slower, module.json = module.json, SimpleNamespace(loads=from_json)
    try:
        yield
    finally:
        queueing.watcher, module.json = kopfs, slower
