"""The GPU nodes of the cluster. They are listed at a bounded rate, and a change counts when two lists in a row show
it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from dovetail.gpus.gpu_products import GPU, PRODUCT_LABEL, Pools, count, estimate, is_known
from dovetail.kube.connection import KubeError
from dovetail.kube.resources import NODE
from dovetail.operator.cluster.client import Client
from dovetail.operator.log import log

# A Node is about 10 KB of JSON, most of which lists its images. Rights seldom change.
REFUSED_SECONDS = 600.0


class SteadyNodes:
    """`value` is the first value, then each value that was offered twice in a row. So a node that comes and goes
    changes nothing."""

    def __init__(self) -> None:
        self.value: Pools | None = None
        self._last: Pools | None = None

    def offer(self, value: Pools) -> bool:
        """Take a value. Returns whether `self.value` has changed."""
        believed = self.value is None or self._last == value
        self._last = value
        if not believed or value == self.value:
            return False
        self.value = value
        return True


class Nodes:
    """Lists the GPU nodes every `seconds`. `changed` is called when the pools change, or the right to list nodes.
    Before that, `found` is called with the GPUs that no table knows."""

    def __init__(self, client: Client, seconds: float, changed: Callable[[], Awaitable[None]]) -> None:
        self._client = client
        self._seconds = seconds
        self._changed = changed
        self._steady = SteadyNodes()
        self.refused = False
        self.found: Callable[[Mapping[str, GPU]], None] = lambda _: None
        self.unknown: dict[str, GPU] = {}

    @property
    def pools(self) -> Pools | None:
        """The pools of nodes. None before the first list."""
        return self._steady.value

    async def run(self) -> None:
        """List nodes until cancelled."""
        while True:
            await asyncio.sleep(max(self._seconds, REFUSED_SECONDS) if self.refused else self._seconds)
            await self.look()

    async def look(self) -> None:
        """List the nodes once. If that fails, the pools stay as they are."""
        try:
            found: Counter[tuple[str, int]] = Counter()
            labels: dict[str, Mapping[str, str]] = {}
            fields = "spec.unschedulable=false"
            async for page in self._client.pages(NODE, None, PRODUCT_LABEL, fields):
                found.update(count(page.items))
                for node in page.items:
                    said = node["metadata"].get("labels") or {}
                    labels.setdefault(str(said.get(PRODUCT_LABEL)), said)
        except KubeError as error:
            if error.status == 403 and not self.refused:
                self.refused = True
                log("nodes.refused", level="warning", error=str(error))
                await self._changed()
            elif error.status != 403:
                log("nodes.failed", level="warning", status=error.status, error=str(error))
            return
        new = {name: estimate(name, said) for name, said in labels.items() if not is_known(name, {})}
        if more := new.keys() - self.unknown.keys():
            log("nodes.unknown_products", level="warning", products=sorted(more))
            self.unknown |= new  # a product that leaves for a while keeps its figures
            self.found(self.unknown)
        back, self.refused = self.refused, False
        if self._steady.offer(dict(found)):
            log("nodes.changed", gpus=sum(per_node * nodes for (_, per_node), nodes in found.items()))
        elif not back:
            return
        await self._changed()
