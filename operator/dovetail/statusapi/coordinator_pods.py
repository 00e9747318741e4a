"""Finds the address at which a job's coordinator is asked. It is the address of the coordinator's pod.

The job's Service has a name for it, but the job's tenant may change that Service. The status API would then send its
requests to any address that it can reach."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from dovetail.kube import names
from dovetail.kube.connection import KubeError
from dovetail.kube.coordinator_http import NoAnswer, pod_url
from dovetail.kube.owners import pod_of
from dovetail.protocol.process.process_names import COORDINATOR
from dovetail.statusapi.kube import KubeClient, Object, core_path, get

REMEMBERED = 2000  # names of pods


class CoordinatorPods:
    """Looks up the pods of coordinators. A known pod is read with one `get`, so that its address is current."""

    def __init__(self, kube: KubeClient) -> None:
        self._kube = kube
        self._names: OrderedDict[str, str] = OrderedDict()  # of pods, by the job's UID

    async def url(self, job: Object) -> str:
        """`http://address:port` of the job's coordinator. Raises NoAnswer if no pod of it runs, or KubeError."""
        uid = job["metadata"]["uid"]
        pod = await self._known(job) or await self._find(job)
        if pod is None:
            self._names.pop(uid, None)
            raise NoAnswer("the coordinator's pod does not run")
        self._names[uid] = pod["metadata"]["name"]
        self._names.move_to_end(uid)
        while len(self._names) > REMEMBERED:
            self._names.popitem(last=False)
        return pod_url(pod["status"]["podIP"])

    async def _known(self, job: Object) -> Object | None:
        uid = job["metadata"]["uid"]
        if uid not in self._names:
            return None
        try:
            pod = await get(self._kube, core_path(job["metadata"]["namespace"], "pods", self._names[uid]))
        except KubeError as error:
            if error.status != 404:
                raise
            return None
        return pod if _serves(pod, job) else None

    async def _find(self, job: Object) -> Object | None:
        """The oldest pod. There is one at a time, and a pod that pretends to be it comes later."""
        wanted = f"{names.UID_LABEL}={job['metadata']['uid']},{names.ROLE_LABEL}={COORDINATOR}"
        path = core_path(job["metadata"]["namespace"], "pods")
        pods = (await get(self._kube, path, {"labelSelector": wanted}))["items"]
        there = [pod for pod in pods if _serves(pod, job)]
        return min(there, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), default=None)


def _serves(pod: dict[str, Any], job: Object) -> bool:
    labels, status = pod["metadata"].get("labels") or {}, pod.get("status") or {}
    return bool(
        pod_of(pod, job["metadata"]["name"], job["metadata"]["uid"])
        and labels.get(names.ROLE_LABEL) == COORDINATOR
        and names.GROUP_LABEL not in labels
        and status.get("phase") == "Running"
        and status.get("podIP")
        and not pod["metadata"].get("deletionTimestamp")
    )
