"""Where a job's coordinator is asked: at its pod's address.

The job's Service has a name for it, but the job's tenant may change that Service, or what it stands for. The status API
would then send its requests to any address that it can reach."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from dovetail.kube import names
from dovetail.kube.connection import KubeError
from dovetail.kube.coordinator_http import NoAnswer
from dovetail.protocol.process.env import COORDINATOR_PORT
from dovetail.protocol.process.process_names import COORDINATOR
from dovetail.statusapi.kube import Kube, Object, core_path, get

REMEMBERED = 2000  # names of pods


class CoordinatorPods:
    """Looks coordinators' pods up: one `get` of a pod that is known, so that its address is that of now."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._names: OrderedDict[str, str] = OrderedDict()  # of pods, by the job's UID

    async def url(self, job: Object) -> str:
        """`http://address:port` of the job's coordinator. Raises NoAnswer if no pod of it runs, or KubeError."""
        uid, namespace = job["metadata"]["uid"], job["metadata"]["namespace"]
        pod = await self._known(uid, namespace) or await self._find(uid, namespace)
        if pod is None:
            self._names.pop(uid, None)
            raise NoAnswer("the coordinator's pod does not run")
        self._names[uid] = pod["metadata"]["name"]
        self._names.move_to_end(uid)
        while len(self._names) > REMEMBERED:
            self._names.popitem(last=False)
        address = pod["status"]["podIP"]
        return f"http://[{address}]:{COORDINATOR_PORT}" if ":" in address else f"http://{address}:{COORDINATOR_PORT}"

    async def _known(self, uid: str, namespace: str) -> Object | None:
        if uid not in self._names:
            return None
        try:
            pod = await get(self._kube, core_path(namespace, "pods", self._names[uid]))
        except KubeError as error:
            if error.status != 404:
                raise
            return None
        return pod if _serves(pod, uid) else None

    async def _find(self, uid: str, namespace: str) -> Object | None:
        """The newest, as an old one may still end."""
        wanted = f"{names.UID_LABEL}={uid},{names.ROLE_LABEL}={COORDINATOR}"
        pods = (await get(self._kube, core_path(namespace, "pods"), {"labelSelector": wanted}))["items"]
        there = [pod for pod in pods if _serves(pod, uid)]
        return max(there, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), default=None)


def _serves(pod: dict[str, Any], uid: str) -> bool:
    labels, status = pod["metadata"].get("labels") or {}, pod.get("status") or {}
    return bool(
        labels.get(names.UID_LABEL) == uid
        and labels.get(names.ROLE_LABEL) == COORDINATOR
        and status.get("phase") == "Running"
        and status.get("podIP")
        and not pod["metadata"].get("deletionTimestamp")
    )
