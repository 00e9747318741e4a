"""kopf's watches without kopf's bookkeeping: each event goes straight to the operator.

For every object kopf would run a task, remember the object, copy it, compare it with its earlier state, make three
loggers and look for handlers. The operator needs none of this, and it took much of the operator's CPU time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from pydantic_core import from_json

from dovetail.operator.compat import kopf_api, kopf_queueing, kopf_watching

OnEvent = Callable[[str, Any, bool], None]


@contextmanager
def direct_watches(on_event: OnEvent) -> Iterator[None]:
    """Start and end kopf within this block. Its watchers then call `on_event` with the kind, the object, and whether it
    was deleted, in the API server's order. Like kopf's own watchers they reconnect, and they list anew after a long
    break. They raise what cannot be helped, which ends the operator."""

    async def watcher(*, settings: Any, resource: Any, namespace: Any, operator_paused: Any = None, **_: Any) -> None:
        stream = kopf_watching.infinite_watch(
            settings=settings, resource=resource, namespace=namespace, operator_paused=operator_paused
        )
        async for event in stream:
            # Other events are no objects of the cluster: the end of a list, a version to go on from.
            if not isinstance(event, kopf_watching.Bookmark) and event["type"] != "BOOKMARK":
                on_event(resource.kind, event["object"], event["type"] == "DELETED")

    kopfs_watcher, kopf_queueing.watcher = kopf_queueing.watcher, watcher
    module: Any = kopf_api
    kopfs_json, module.json = module.json, SimpleNamespace(loads=from_json)  # the same values, several times as fast
    try:
        yield
    finally:
        kopf_queueing.watcher, module.json = kopfs_watcher, kopfs_json
