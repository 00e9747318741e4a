"""Watches all nodes, for taints that say that a node will end soon, for nodes that are drained and for nodes that are
not ready. A list from time to time would be too slow, because the notice may come only 30 s before the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from datetime import datetime
from types import MappingProxyType
from typing import Any

from dovetail.kube.resources import NODE, Resource
from dovetail.operator.cluster.child_watch import follow
from dovetail.operator.cluster.client import Client, Object
from dovetail.operator.log import log
from dovetail.operator.reconcile.children import parse_time
from dovetail.operator.reconcile.disruption import Taking, source, takings
from dovetail.operator.reconcile.rootcause import LostNode, lost_node


class Notices:
    """The nodes that will end soon, lose their pods or are not ready. `taints` has the keys of taints that announce the
    end of a node. `changed` is called when a node is announced, cordoned or lost, or is back. `now` returns the time of
    day, which is used for a node whose record lacks the time of its taints."""

    def __init__(
        self,
        client: Client,
        taints: Collection[str],
        changed: Callable[[], Awaitable[None]],
        now: Callable[[], datetime],
    ) -> None:
        self._client = client
        self._taints = frozenset(taints)
        self._changed = changed
        self._now = now
        self._ending: dict[str, datetime] = {}
        # The time of the notice, by node.
        self.ending = MappingProxyType(self._ending)
        self._leaving: dict[str, tuple[Taking, ...]] = {}
        # What takes the pods, by node whose pods leave.
        self.leaving = MappingProxyType(self._leaving)
        self._lost: dict[str, LostNode] = {}
        # The problem, by node that is not ready.
        self.lost = MappingProxyType(self._lost)

    async def run(self) -> None:
        """Watch nodes until cancelled."""
        await follow(self._client, NODE, None, "", self, _ignore)

    async def relist(self, resource: Resource, namespace: str | None) -> str | None:
        """Take the list of all nodes. Returns its version. Raises KubeError."""
        version, seen = "", set[str]()
        async for page in self._client.pages(resource, namespace):
            version = page.version
            for node in page.items:
                seen.add(node["metadata"]["name"])
                await self.observe(node, deleted=False)
        known: tuple[dict[str, Any], ...] = (self._ending, self._leaving, self._lost)
        for nodes in known:
            for gone in nodes.keys() - seen:
                del nodes[gone]
        return version

    async def observe(self, thing: Object, deleted: bool) -> None:
        """Take one node."""
        name = thing["metadata"]["name"]
        news = False
        keys = {taint.get("key") for taint in (thing.get("spec") or {}).get("taints") or ()}
        found = sorted(keys & self._taints)
        if deleted or not found:
            if self._ending.pop(name, None) is not None:
                log("node.gone" if deleted else "node.stays", node=name)
        elif name not in self._ending:
            self._ending[name] = _tainted(thing) or self._now()
            log("node.notice", level="warning", node=name, taints=found)
            news = True
        leaving = () if deleted else takings(thing, self._taints)
        if leaving != (told := self._leaving.get(name, ())):
            self._leaving |= {name: leaving}
            if not leaving:
                del self._leaving[name]
            elif not told and not found:
                log("node.leaving", level="warning", node=name, problem=source(leaving))
            news = True
        lost = None if deleted else lost_node(thing)
        if lost != (before := self._lost.get(name)):
            if lost is None:
                del self._lost[name]
                log("node.gone" if deleted else "node.ready", node=name)
            else:
                self._lost[name] = lost
                log("node.lost", level="warning", node=name, problem=lost.told)
            news = news or (lost is None) != (before is None)
        if news:
            await self._changed()


def _tainted(node: Object) -> datetime | None:
    """The time when the node's taints were last written. It is by the API server's clock, like the times of creation of
    pods. The clocks of nodes and of the operator's own node may differ from it by more than the notice's length."""
    times = [
        parse_time(entry.get("time"))
        for entry in node["metadata"].get("managedFields") or ()
        if "f:taints" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
    ]
    return max((time for time in times if time is not None), default=None)


async def _ignore(there: bool) -> None:
    """Do nothing, because every API server has nodes."""
